"""Run the tutorials, each in a process of its own; `--write` keeps their outputs, which the pages show."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parents[1] / "tutorials"


def run(file: Path, write: bool) -> None:
    """Execute a notebook; a cell that fails is an error."""
    start = time.perf_counter()
    notebook = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False).execute()
    if write:
        for cell in notebook.cells:
            cell["metadata"] = {}
            if cell["cell_type"] == "code":  # without what libraries say to one another
                cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
        notebook["metadata"] = {"kernelspec": notebook["metadata"]["kernelspec"], "language_info": {"name": "python"}}
        nbformat.write(notebook, file)
    print(f"{file.stem:24} {time.perf_counter() - start:5.1f} s")


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for tutorial in sorted(FOLDER.glob("*.ipynb")):
        if not named or tutorial.stem in named:
            run(tutorial, "--write" in sys.argv)
