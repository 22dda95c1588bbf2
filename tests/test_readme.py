"""The README is short, its programs run as they stand, and the links of all documents lead somewhere."""

from __future__ import annotations

import functools
import re
import runpy
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

import graphopt

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in FENCE.findall((ROOT / "README.md").read_text("utf-8")) if language == "python"]


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
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", FENCE.sub("", document.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200
    assert len(PROGRAMS) == 2


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
    linked = {target.partition("#")[0] for target in re.findall(r"\]\((docs/[^)\s]+)\)", prose(ROOT / "README.md"))}
    assert linked == {f"docs/{document.name}" for document in (ROOT / "docs").glob("*.md")}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# One heading\n\n[a](#one-heading) [b](#two) ![c](c.png) [d](https://d.example) [e](a.md#one-heading)\n")
    assert broken(document) == ["#two", "c.png"]
