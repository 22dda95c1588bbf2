"""The README is short, all of its blocks run as they stand, and the links of all documents lead somewhere."""

from __future__ import annotations

import functools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

import graphopt
from graphopt import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall((ROOT / "README.md").read_text("utf-8"))
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [text for language, text in BLOCKS if language == "console"]
TARGETS = [text for language, text in BLOCKS if language == ""]


def prose(document: Path) -> str:
    """A document without its fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", document.read_text("utf-8")))


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub and PyPI make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(document: Path) -> list[str]:
    """Links and images, inline ones, whose file or heading is not there; those with a scheme are not looked at."""
    found = []
    for target in re.findall(r"(?:\]\(|src=\")([^)\s\"]+)", FENCE.sub("", document.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
    assert (len(PROGRAMS), len(COMMANDS), len(TARGETS)) == (2, 1, 1)
    assert len(BLOCKS) == 4  # each is run below


def test_targets_of_the_readme_are_there() -> None:
    """Their commands are looked up here and not run: `make test` is what runs this. tests/fresh_machine.py runs them."""
    for line in TARGETS[0].splitlines():
        command = [*line.partition("#")[0].split(), "-n"]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("layers", [1, pytest.param(None, marks=pytest.mark.long)])
def test_commands_print_what_stands_there(
    layers: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word by word; in the long form with figures, within 5 %, as Inductor's programs differ between machines."""
    number = r"\d+(?:\.\d+)?"
    monkeypatch.chdir(ROOT)
    for line, expected in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", COMMANDS[0], re.MULTILINE):
        command = line.split()
        if layers is not None:
            config = tmp_path / "config.json"
            config.write_text(
                json.dumps(json.loads(Path(command[2]).read_text("utf-8")) | {"num_hidden_layers": layers}), "utf-8"
            )
            command[2:3] = [str(config), "--backend", "aot_eager"]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            cli.main()
        texts = capsys.readouterr().out, expected
        words = [re.sub(number, "", text).split() for text in texts]
        figures = [list(map(float, re.findall(number, text))) for text in texts]
        assert words[0] == words[1]
        assert layers is not None or figures[0] == pytest.approx(figures[1], rel=0.05)


@pytest.mark.parametrize("program", PROGRAMS, ids=["loop", "trainer"])
def test_programs_of_the_readme_run(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, but for kernels, which would take a minute to compile."""
    for name in ("optimize", "TrainerCallback"):
        monkeypatch.setattr(graphopt, name, functools.partial(getattr(graphopt, name), backend="aot_eager"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "program.py"
    file.write_text(program, "utf-8")
    try:
        names = runpy.run_path(str(file), run_name="program")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    opt = names["opt"] if "opt" in names else names["callback"].opt
    assert isinstance(opt, graphopt.OptimizedModule)
    assert opt.report.flops_ratio <= opt.report.budget["flops"]
    assert 0 < opt.report.trained < opt.report.trainable
    assert all(torch.isfinite(p).all() for p in opt.parameters())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_and_images_resolve(document: Path) -> None:
    assert broken(document) == []


def test_every_document_is_reached_from_the_readme() -> None:
    """The index and the pages of the reference are the site's alone."""
    linked = {target.partition("#")[0] for target in re.findall(r"\]\((docs/[^)\s]+)\)", prose(ROOT / "README.md"))}
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    assert {f"docs/{file.relative_to(ROOT / 'docs')}" for file in documents} - linked == {"docs/index.md"}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# One heading\n\n[a](#one-heading) [b](#two) ![c](c.png) [d](https://d.example) [e](a.md#one-heading)\n")
    assert broken(document) == ["#two", "c.png"]
