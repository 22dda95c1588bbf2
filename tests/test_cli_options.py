"""What the commands have in common: plain names, JSON, files that cannot be written, numbers out of range."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphopt.bench.selection_tasks import TASKS
from graphopt.cli_options import plain_console
from graphopt.errors import InputError
from graphopt.integrations import models
from graphopt.report.files import json_text, make_folder_of
from tests.test_cli import run


class Named(nn.Module):
    """Two layers whose names mean something to rich."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"[bold]": nn.Linear(8, 8), "[/x]": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["[/x]"](self.layers["[bold]"](x).relu()).sum()


def named() -> tuple[nn.Module, Tensor]:
    return Named(), torch.randn(4, 8)


def deep() -> tuple[nn.Module, Tensor]:
    model: nn.Module = nn.Linear(8, 8)
    for _ in range(20):
        model = nn.Sequential(model)
    return model, torch.randn(4, 8)


@pytest.mark.parametrize("more", [[], ["--memory", "--backend", "aot_eager"]])
def test_names_are_printed_as_they_are(more, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """rich took brackets for its markup: names were lost, or an error."""
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(monkeypatch, capsys, "analyze", "tests.test_cli_options:named", "--quiet", *more)
    assert code == 0
    assert "layers.[/x].weight" in out
    assert "layers.[bold].weight" in out


def test_a_folder_is_named_as_it_is(monkeypatch, capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    arguments = ("optimize", "tests.test_cli_options:named", "--backend", "aot_eager", "--quiet", "--out", "[/x]:key:")
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "files to [/x]:key:" in out


def test_long_names_are_whole_in_narrow_terminals(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """They ended with an ellipsis, in pipes as well."""
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = run(monkeypatch, capsys, "analyze", "tests.test_cli_options:deep", "--quiet")
    assert "…" not in out


def test_json_holds_no_number_that_json_cannot_hold() -> None:
    text = json_text({"a": math.nan, "b": [math.inf, -math.inf, 0.5], "c": "NaN"})
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {"a": None, "b": [None, None, 0.5], "c": "NaN"}


def test_a_folder_in_which_nothing_can_be_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """It was noticed when the work was done."""
    with pytest.raises(InputError, match=r"cannot write /proc/page\.html"):
        make_folder_of(Path("/proc/page.html"))
    make_folder_of(tmp_path / "new" / "page.html")
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "old").write_text("kept")
    make_folder_of(tmp_path / "old")
    make_folder_of(Path("/dev/null"))
    assert (tmp_path / "old").read_text() == "kept"


def test_help_in_place_of_a_command_has_no_message(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    for arguments in ((), ("bench",)):
        code, out, err = run(monkeypatch, capsys, *arguments)
        assert (code, err) == (2, "")
        assert "Usage" in out


def test_a_factory_imports_from_the_folder_that_it_is_run_in(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """The folder was searched for the factory's module alone; and a module that changed it ended with a trace."""
    (tmp_path / "layers_of_this_folder.py").write_text("from torch import nn, randn\nmade = nn.Linear(8, 8), randn(4, 8)\n")
    text = "import os\nos.chdir('/')\ndef made():\n    import layers_of_this_folder\n    return layers_of_this_folder.made\n"
    (tmp_path / "factory_of_this_folder.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    code, _, err = run(monkeypatch, capsys, "analyze", "factory_of_this_folder:made", "--quiet")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["optimize", "m:f", "--optimizer", "adamw8bit"], "its memory alone is known"),
        (
            ["optimize", "m:f", "--passes", "lsp", "--optimizer", "sgd"],
            "stepped by adam or adamw, and not by sgd",
        ),
        (["bench", "selection", "--flops", "half"], "'half' must be numbers"),
        (["bench", "selection", "--flops", "0.5,2"], "flops=2.0 must be"),
        (["bench", "selection", "--out", f"{__file__}"], "cannot write"),
        (["bench", "suite", "--ways", "nonsense"], "unknown way"),
        (["bench", "suite", "--out", f"{__file__}"], "cannot write"),
        (["bench", "trials", "--folder", "nowhere"], "0 sets"),
        (["demo", "--batch", "0"], "--batch must be positive"),
        (["demo", "--evaluate", "0"], "--evaluate must be positive"),
        (["demo", "--validation-rows", "-1"], "--validation-rows must be positive"),
        (["demo", "--seconds", "nan"], "--seconds must be positive"),
        (["demo", "--budget", "2"], "flops=2.0 must be"),
    ],
)
def test_options_are_checked_before_the_work(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    def begun(*_: object, **__: object) -> None:
        pytest.fail("the work has begun")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load", begun)
    monkeypatch.setattr("graphopt.bench.demo.run_every", begun)
    for task in TASKS:
        monkeypatch.setitem(TASKS, task, begun)
    code, _, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_names_with_commas_may_have_blanks(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    seen: list[object] = []
    monkeypatch.setattr("graphopt.bench.memory.run", lambda models, console: seen.append(models) or {})
    assert run(monkeypatch, capsys, "bench", "memory", "--models", "mlp, cnn,", "--json")[0] == 0
    assert seen == [["mlp", "cnn"]]


def test_a_console_prints_to_where_it_is_told(capsys) -> None:  # type: ignore[no-untyped-def]
    plain_console(stderr=True).print("[x]")
    plain_console().print("[y]")
    assert capsys.readouterr() == ("[y]\n", "[x]\n")
