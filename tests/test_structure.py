"""The structure of the package: who may import whom, and what lies at the root."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

import graphopt

CORE = Path(graphopt.__file__).parent
PASSES = Path(graphopt.passes.__file__).parent
ROOT = {
    "__init__", "__main__", "api", "budget", "calls", "capture", "cli", "cli_options", "errors", "graph", "loss", "lower",
    "specialise",
}  # fmt: skip

TECHNIQUES = r"(vcas|lsp|runlora|recompute|greentrainer|dead_rows|linear_cross_entropy|distribute)"
CLASSES = r"(Vcas|Lsp|RunLora|Recompute|GreenTrainer|DeadRows|LinearCrossEntropy|Distribute)"
IMPORT = re.compile(rf"^\s*from graphopt\.passes(\.{TECHNIQUES}[. ]| import .*\b{CLASSES}\b)", re.M)


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for folder, package in ((CORE, "graphopt"), (PASSES, "graphopt.passes")):
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            if package == "graphopt" and parts[0] == "passes":
                continue
            found[".".join((package, *(part for part in parts if part != "__init__")))] = file
    return found


def imports(body: list[ast.stmt], known: set[str]) -> Iterator[str]:
    """What a module imports when it is loaded: not for its types alone, and not inside functions."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(getattr(node, "body", []), known)


def circles(files: dict[str, Path]) -> list[set[str]]:
    graph = networkx.DiGraph()
    for name, file in files.items():
        for other in imports(ast.parse(file.read_text()).body, set(files)):
            if other in files and other != name:
                graph.add_edge(name, other)
    return [found for found in networkx.strongly_connected_components(graph) if len(found) > 1]


def test_the_core_imports_no_technique() -> None:
    core = {name: file for name, file in modules().items() if not name.startswith(("graphopt.passes", "graphopt.bench"))}
    assert len(core) > 100
    assert {name for name, file in core.items() if IMPORT.search(file.read_text())} == set()


def test_no_modules_import_each_other() -> None:
    assert circles(modules()) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.py").write_text(f"from {other} import x\n")
    assert circles({name: tmp_path / f"{name}.py" for name in "abc"}) == [{"a", "b", "c"}]


def test_a_wheel_has_every_package_and_file() -> None:
    settings = tomllib.loads((PASSES.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name if file.name == "__init__.py" else name.rpartition(".")[0]: file.parent for name, file in modules().items()}
    assert sorted(settings["packages"]) == sorted(folders)
    listed = {file for name, patterns in settings["package-data"].items() for p in patterns for file in folders[name].glob(p)}
    others = {f for folder in folders.values() for f in folder.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert others - listed == set()


def test_the_root_is_the_pipeline() -> None:
    assert {file.stem for file in CORE.glob("*.py")} == ROOT


@pytest.mark.parametrize("line", ["from graphopt.passes.lsp.choose import x", "    from graphopt.passes import Pass, Vcas"])
def test_an_import_of_a_technique_is_found(line: str) -> None:
    assert IMPORT.search(f"import os\n{line}\n")


LINES, LINES_OF_A_FUNCTION = 350, 80
"""Of a file, and of a function without its docstring."""


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """Functions of a file, and how many lines each has without its docstring."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            before = node.body[0].lineno - node.lineno
            assert node.end_lineno is not None
            yield node.name, before + node.end_lineno - first.lineno + 1


def test_files_and_functions_are_short() -> None:
    lines = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert len(lines) > 100
    assert {name: n for name, n in lines.items() if n > LINES} == {}
    long = {f"{name}.{f}": n for name, file in modules().items() for f, n in functions(file) if n > LINES_OF_A_FUNCTION}
    assert long == {}
