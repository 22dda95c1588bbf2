"""What files are asked of: that they can be written, before the work whose result they hold; and JSON that every reader takes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from graphopt.errors import InputError


def plain(values: Any) -> Any:
    """Values as JSON has them; None for infinity and NaN, which JSON does not have."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)


def json_text(values: Any) -> str:
    """JSON of `plain` values."""
    return json.dumps(plain(values), indent=1)


def make_folder_of(file: Path | None) -> None:
    """Make the folder that a file is to be written to, before the work whose result it is.

    Raises:
        InputError: it cannot be made, nothing can be written there, or the file is a folder.
    """
    if file is not None and file.is_dir():
        raise InputError(f"cannot write {file}: it is a folder. Name a file in it.")
    try:
        if file is not None and not os.access(file, os.W_OK):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=file.parent) if not file.exists() else file.open("ab"):
                pass
    except OSError as error:
        raise InputError(f"cannot write {file}: {error}") from error
