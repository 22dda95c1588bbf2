"""What the commands of `graphopt` share: options, and what is told while they work."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from graphopt.errors import InputError

Model = Annotated[str, typer.Argument(help="A Hugging Face folder or config file (never downloaded), or package.module:factory.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples in the example batch.")]
Length = Annotated[int, typer.Option(min=1, help="Tokens per sample, for text models.")]
AnyBackend = Literal["inductor", "aot_eager", "eager"]
Compiled = Literal["inductor", "aot_eager"]
Backend = Annotated[AnyBackend, typer.Option(help="Whose memory; eager is the uncompiled model's.")]
CompiledBackend = Annotated[Compiled, typer.Option(help="How steps are compiled, and whose memory counts.")]
Optimizer = Annotated[str, typer.Option(help="Whose states: sgd, momentum, adam, adamw, adamw8bit, ..., or none.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing of what is being done, and how long it takes.")]
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


class _Told(logging.Handler):
    """Shows the stage that is under way, and writes a line for every one that is over."""

    def __init__(self, console: Console, status: object) -> None:
        super().__init__(logging.INFO)
        self.console, self.status = console, status

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        name, seconds = getattr(record, "stage", record.getMessage()), getattr(record, "seconds", None)
        if seconds is None:
            self.status.update(name)  # type: ignore[attr-defined]
        else:
            self.console.print(f"{name:<12}{seconds:6.1f} s", highlight=False)


@contextlib.contextmanager
def stages_told(quiet: bool) -> Iterator[None]:
    """Say on stderr which stage is under way and how long each one took; see `graphopt.runtime.stages`.

    Args:
        quiet: say nothing.
    """
    logger = logging.getLogger("graphopt.stages")
    if quiet:
        yield
        return
    console, level = Console(stderr=True), logger.level
    with console.status("starting") as status:
        handler = _Told(console, status)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
