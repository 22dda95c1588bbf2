"""The documentation's site has every page, its links lead somewhere, and its generated pages say what is there."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import graphopt
from graphopt import errors
from graphopt.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = loaded("pages")


def listed(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in listed(entry)]


def test_the_navigation_has_every_page_once() -> None:
    nav = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    written = [file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")]
    assert sorted(nav) == sorted([*written, *pages.generated()])


def test_links_of_the_repository_lead_to_pages_of_the_site() -> None:
    def moved(link: str, place: str) -> str:
        return pages.moved(f"[a]({link})", place)[4:-1]

    assert moved("../README.md", "docs/budget.md") == "index.md"
    assert moved("../CONTRIBUTING.md", "docs/budget.md") == "contributing.md"
    assert moved("../../CONTRIBUTING.md", "docs/reference/api.md") == "../contributing.md"
    assert moved("tutorials/adapters.ipynb#a", "docs/index.md") == "tutorials/adapters.md#a"
    assert moved("../examples/results/demo.png", "docs/benchmarks.md") == "examples/results/demo.png"
    assert moved("docs/exact.md#rows", "CHANGELOG.md") == "exact.md#rows"
    assert moved("https://example.com/a", "docs/budget.md") == "https://example.com/a"
    assert "Back to the README" not in pages.moved((DOCS / "budget.md").read_text("utf-8"), "docs/budget.md")
    assert "examples/results/demo.png" in pages.linked_files()


def test_docstrings_are_written_for_the_reference() -> None:
    source = '''
    """What it does.

    Args:
        a: one.
        b, c: others,
            with more.
    Returns:
        Something.
    Example:
        f(1)
    """
'''
    assert (
        pages.for_the_reference(source)
        == '''
    """What it does.

    Args:
        a: one.
        b: others,
            with more.
        c: others,
            with more.

    Returns:
        Something.

    Example:
        ```python
        f(1)
        ```
    """
'''
    )
    for file in [*(ROOT / "graphopt").glob("*.py"), *(ROOT / "passes").glob("*.py")]:
        ast.parse(pages.for_the_reference(file.read_text("utf-8")))


def test_every_command_and_option_is_in_the_reference() -> None:
    text = pages.command_line()
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for name, command in group.commands.items():
        assert f"## `graphopt {name}`" in text
        for option in (option for parameter in command.params for option in parameter.opts if option.startswith("--")):
            assert option in text, (name, option)


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(
        re.findall(r"^::: graphopt\.(?:[a-z_]+\.)*(\w+)$", "".join(f.read_text("utf-8") for f in DOCS.rglob("*.md")), re.M)
    )
    classes = {name for name in vars(errors) if isinstance(getattr(errors, name), type)}
    assert {name for name in dir(graphopt) if not name.startswith("_")} - classes - {"passes"} <= shown
    techniques = {name for name in graphopt.passes.__all__ if not isinstance(getattr(graphopt.passes, name), ModuleType | dict)}
    assert techniques <= shown


@pytest.mark.parametrize("name", [name for name in vars(errors) if isinstance(getattr(errors, name), type)])
def test_every_error_has_a_cause_and_a_remedy(name: str) -> None:
    text = getattr(errors, name).__doc__
    assert "\n    Cause: " in text
    assert "\n    Remedy: " in text


READERS = {"model", "batch", "loader", "optimizer", "opt", "analysis", "trainer", "args", "data", "collator", "points"}
"""Names in short examples that are the reader's, or come from the example before."""


@pytest.mark.parametrize("file", sorted(DOCS.glob("*.md")), ids=lambda file: file.stem)
def test_short_examples_need_no_name_that_is_not_the_readers(file: Path) -> None:
    for text in re.findall(r"^```python\n(.*?)^```$", file.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        tree = ast.parse(text)
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value is ...], text
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        imported = {(a.asname or a.name).partition(".")[0] for n in ast.walk(tree) for a in getattr(n, "names", [])}
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        assert used <= bound | imported | READERS | {"graphopt", "torch"} | set(dir(builtins)), text


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_tutorials_have_outputs_of_a_run_without_errors(file: Path) -> None:
    cells = json.loads(file.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
    page = pages.notebook_page(file)
    assert page.startswith("# ")
    assert page.count("```python") == len(code)
    assert len(page.splitlines()) < 400


def test_the_makefile_builds_the_site_strictly() -> None:
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["strict"]
    made = subprocess.run(["make", "-n", "docs-test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "mkdocs build" in made
    assert "notebooks.py" in made
