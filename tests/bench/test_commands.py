"""`graphopt bench ...`: what a command asks of a benchmark is what that takes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import typer
from typer.testing import CliRunner

from graphopt.bench.commands import bench_app

COMMANDS = typer.main.get_command(bench_app).commands  # type: ignore[attr-defined]
OPTIONS = {"logits": ["--layers", "1", "--chunks", "2"], "lsp": ["--chart", "chart.png"], "suite": ["--tasks", "digits"]}


@pytest.mark.parametrize(("name", "more"), [*((name, OPTIONS.get(name, [])) for name in COMMANDS), ("logits", ["--trainer"])])
def test_its_options_reach_the_benchmark(name: str, more: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    module: Any = importlib.import_module("graphopt.bench.logits_trainer" if more == ["--trainer"] else f"graphopt.bench.{name}")
    run, show = create_autospec(module.run, return_value={"torch": "2"}), create_autospec(module.show)
    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "show", show)
    keeps = any(option.name == "out" and option.default is not None for option in COMMANDS[name].params)
    done = CliRunner().invoke(bench_app, [name, *more, "--out", "kept"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "console" in run.call_args.kwargs
    assert show.call_args.args[0] == {"torch": "2"}
    if keeps:
        assert run.call_args.kwargs["folder"] == Path("kept")
    else:
        assert json.loads(Path("kept").read_text()) == {"torch": "2"}
