"""What the commands of `graphopt` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphopt.errors import InputError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def make_folder_of(file: Path | None) -> None:
    """Make the folder that a file is to be written to, before the work whose result it is.

    Raises:
        InputError: it cannot be made.
    """
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {file}: {error}") from error
