"""Options that the commands of `graphopt` share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from graphopt.errors import InputError
from graphopt.report.files import make_folder_of
from graphopt.report.progress import stages_told

Model = Annotated[str, typer.Argument(help="A Hugging Face folder or config file (never downloaded), or package.module:factory.")]
Batch = Annotated[int, typer.Option(min=1, help="Samples in the example batch.")]
Length = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per sample, for text models: 512, or as many as it has positions.", show_default=False),
]
AnyBackend = Literal["inductor", "aot_eager", "eager"]
Compiled = Literal["inductor", "aot_eager"]
Backend = Annotated[AnyBackend, typer.Option(help="Whose memory; eager is the uncompiled model's.")]
CompiledBackend = Annotated[Compiled, typer.Option(help="How steps are compiled, and whose memory counts.")]
Optimizer = Annotated[str, typer.Option(help="Whose states: sgd, momentum, adam, adamw, adamw8bit, ..., or none.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing of what is being done, and how long it takes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def plain_console(stderr: bool = False) -> Console:
    """Where tables go. Names of users' modules and files are printed as they are: brackets and colons in them mean nothing."""
    return Console(stderr=stderr, markup=False, emoji=False)


@contextlib.contextmanager
def at_work(quiet: bool) -> Iterator[None]:
    """Stages are told; cycles are looked for rarely.

    A trace makes millions of objects that stay. Looking through them takes a tenth of the time of a large model.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    try:
        with stages_told(quiet):
            yield
    finally:
        gc.set_threshold(*thresholds)


def check_picture(file: Path | None) -> None:
    """Make the folder of a picture, before the work that it is to show.

    Raises:
        InputError: as `make_folder_of`; or the name ends with no format that matplotlib writes.
    """
    if file is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise InputError(
            f"cannot write {file}: the name of a picture ends with one of {', '.join('.' + k for k in sorted(known))}."
        )
    make_folder_of(file)


def default_flops(passes: str | Sequence[str]) -> float | None:
    """The limit on FLOPs where none of any kind is given; none where the passes that are named have no use for it."""
    from graphopt.passes import BY_NAME

    serve = passes == "auto" or any("flops" in BY_NAME[name].serves for name in passes if name in BY_NAME)
    return 0.5 if serve else None


def checked_optimizer(optimizer: str, compresses: bool | None = None) -> str | None:
    """The name of an optimizer as the functions take it; one that will not do is refused before anything is loaded.

    Args:
        compresses: it is to step compressed gradients, or whole ones; None: it is to step nothing.
    """
    import torch

    from graphopt.analysis.optimizers import check_optimizer, named_optimizer

    name = None if optimizer == "none" else optimizer
    check_optimizer(name)
    if compresses and name not in (None, "adam", "adamw"):
        raise InputError(f"optimizer: compressed gradients are stepped by adam or adamw, and not by {name}; or leave out lsp.")
    if compresses is False and name is not None:
        named_optimizer(name, torch.device("cpu"))
    return name
