"""What `make docs` adds to the pages of this folder: notebooks, the command line, and files that pages link to.

The pages are written for a reader of the repository, so their links lead to files. Here links to files outside of this folder
lead to copies in the site.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Documents of the repository, and what they are in the site."""

COMMAND_LINE = "reference/command_line.md"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
SECTION = re.compile(r" +(Args|Returns|Raises|Attributes|Example|Source):$")
NAMES = re.compile(r" +(\w+(?:, \w+)+): (.*)$")
BACK = "[Back to the README](../README.md)\n\n"


def generated() -> list[str]:
    """Pages of the site that are no Markdown files of this folder."""
    notebooks = [f"tutorials/{file.stem}.md" for file in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))]
    return [*notebooks, COMMAND_LINE, "contributing.md", "changes.md"]


def moved(text: str, place: str) -> str:
    """A document of the repository with links that are right in the site.

    Args:
        place: of the document, from the root of the repository.
    """

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        return f"{found[1]}{posixpath.relpath(in_site(path), posixpath.dirname(in_site(place)) or '.')}{found[3]}"

    return LINK.sub(link, text.replace(BACK, ""))


def in_site(path: str) -> str:
    """Where a file of the repository is in the site, before Markdown becomes HTML."""
    path = PAGES.get(path, path).removeprefix("docs/")
    return path.removesuffix(".ipynb") + ".md" if path.endswith(".ipynb") else path


def linked_files() -> list[str]:
    """Files of the repository outside of this folder that its pages link to, such as pictures of results."""
    found = set()
    for file in (ROOT / "docs").rglob("*.md"):
        place = file.relative_to(ROOT).as_posix()
        for _, target, _ in LINK.findall(file.read_text("utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
            if not re.match(r"[a-z]+:", target) and not path.startswith("docs/") and path not in PAGES:
                found.add(path)
    return sorted(found)


def notebook_page(file: Path) -> str:
    """A notebook as Markdown, with its outputs."""
    parts = []
    for cell in json.loads(file.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/html" in data:
                parts.append("".join(data["text/html"]))
            else:
                parts.append(f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """Every command and option, by typer's own description of the app."""
    import typer
    from typer.cli import get_docs_for_click

    from graphopt.cli import app

    group = typer.main.get_command(app)
    return get_docs_for_click(obj=group, ctx=typer.Context(group), name="graphopt", title="Command line")


def depth(line: str) -> int:
    """Spaces before the text of a line."""
    return len(line) - len(line.lstrip(" "))


def for_the_reference(source: str) -> str:
    """A module whose docstrings are as mkdocstrings reads them.

    Ours have no blank line between sections, name what is alike in one line ("flops, memory: limits"), and give examples as they
    are. There every section has a blank line above, every name a line, and an example is code.
    """
    lines, found, at, inside = source.splitlines(), list[str](), 0, -1
    while at < len(lines):
        line, at = lines[at], at + 1
        section, indent = SECTION.match(line), depth(line)
        if section:
            inside = indent
        elif line.strip() and indent <= inside:
            inside = -1
        names = NAMES.match(line) if 0 <= inside == indent - 4 else None
        below = at
        while below < len(lines) and depth(lines[below]) > indent:
            below += 1
        if section and found and found[-1].strip():
            found.append("")
        if section and section[1] == "Example":
            found += [line, f"{' ' * (indent + 4)}```python", *lines[at:below], f"{' ' * (indent + 4)}```"]
        elif names:
            found += [part for n in names[1].split(", ") for part in (f"{' ' * indent}{n}: {names[2]}", *lines[at:below])]
        else:
            found.append(line)
            below = at
        at = below
    return "\n".join(found) + "\n"


def on_config(config: Any) -> Any:
    """Lay the sources out as they are installed, so that the reference finds `graphopt.passes`."""
    sources = ROOT / "out" / "docs_sources"
    shutil.rmtree(sources, ignore_errors=True)
    for folder, place in (("graphopt", "graphopt"), ("passes", "graphopt/passes")):
        shutil.copytree(ROOT / folder, sources / place, ignore=shutil.ignore_patterns("__pycache__", "passes", "*_data"))
    for file in sources.rglob("*.py"):
        file.write_text(for_the_reference(file.read_text("utf-8")), "utf-8")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages and the linked files."""
    from mkdocs.structure.files import File

    for notebook in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        files.append(File.generated(config, f"tutorials/{notebook.stem}.md", content=notebook_page(notebook)))
    files.append(File.generated(config, COMMAND_LINE, content=command_line()))
    for document in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, PAGES[document], content=moved((ROOT / document).read_text("utf-8"), document)))
    for path in linked_files():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Have the links of a page of this folder lead to the site's files."""
    return markdown if page.file.generated_by else moved(markdown, f"docs/{page.file.src_uri}")
