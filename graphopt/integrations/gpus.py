"""The memory of common GPUs, by the names that `graphopt fit --gpu` takes."""

from __future__ import annotations

from graphopt.budget import parse_bytes
from graphopt.errors import BudgetError, InputError

GPUS: dict[str, int] = {
    "t4": 15360, "l4": 23034, "a10g": 23028, "l40s": 46068, "a6000": 49140, "a100-40g": 40960, "a100-80g": 81920,
    "h100": 81559, "h200": 143771, "rtx3090": 24576, "rtx4090": 24564, "rtx5090": 32607,
}  # fmt: skip
"""MiB of one GPU, as nvidia-smi prints it."""


def gpu_bytes(gpu: int | str) -> int:
    """Bytes of a GPU's memory.

    Args:
        gpu: one of `GPUS`, bytes, or a text such as "16GiB".
    Raises:
        InputError: none of these.
    """
    if isinstance(gpu, str) and (mib := GPUS.get(gpu.lower())) is not None:
        return mib * 2**20
    try:
        return parse_bytes(gpu)
    except BudgetError as error:
        raise InputError(f"gpu={gpu!r} is unknown: use one of {', '.join(GPUS)}, or an amount such as '16GiB'.") from error
