"""README.md is short, its code runs as it stands, and what it and the other documents name exists."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

import graphopt

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *GUIDES]
MOST_LINES = 200

CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:docs|examples|tests)/[\w./]+)`")
HEADING = re.compile(r"^#+ (.*)$", re.M)


def snippets(document: Path) -> list[str]:
    return CODE.findall(document.read_text())


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = HEADING.findall(FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(document: Path) -> Iterator[str]:
    """Links to files that do not exist or headings that a document does not have, and names of files that do not exist."""
    text = document.read_text()
    for link in LINK.findall(FENCED.sub("", text)):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not link.startswith("https://") and (not target.exists() or (anchor and anchor not in anchors(target))):
            yield link
    if document.name != "CHANGELOG.md":  # which names what is gone
        yield from (name for name in FILE.findall(text) if not (ROOT / name).exists())


@pytest.fixture
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In an empty folder, without what earlier tests compiled, and without Inductor, which would take a minute."""
    for function in (graphopt.optimize, graphopt.TrainerCallback.__init__):
        defaults = function.__defaults__ or ()
        assert "inductor" in defaults
        monkeypatch.setattr(function, "__defaults__", tuple("aot_eager" if d == "inductor" else d for d in defaults))
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(("number", "limit"), [(0, 0.6), (1, 0.5)], ids=["loop", "trainer"])
def test_the_readmes_code_runs_within_its_budget(number: int, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block by itself: it is complete."""
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    exec(compile(snippets(README)[number], "README.md", "exec"), vars(module))
    names = vars(module)
    opt = names["opt"] if "opt" in names else names["callback"].opt
    assert 0 < opt.report.flops_ratio <= limit
    assert 0 < len(opt.selected) < len(list(opt.parameters()))
    assert opt.model_runs == 0


def test_all_code_of_the_readme_is_run() -> None:
    assert len(snippets(README)) == 2


@pytest.mark.parametrize("document", GUIDES, ids=lambda path: path.name)
def test_code_in_the_guides_is_python_and_names_what_there_is(document: Path) -> None:
    for code in snippets(document):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "graphopt":
                assert hasattr(graphopt, node.attr)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document: Path) -> None:
    assert list(broken(document)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n\n[a](page.md#one) [b](#one) [c](other.md) [d](page.md#two) `tests/nothing.py`\n\n```\n# Two\n```\n")
    assert list(broken(page)) == ["other.md", "page.md#two", "tests/nothing.py"]


def test_the_readme_is_short_and_links_every_guide() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert {f"docs/{guide.name}" for guide in GUIDES} <= {link.partition("#")[0] for link in LINK.findall(text)}
