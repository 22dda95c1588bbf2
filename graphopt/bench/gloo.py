"""Seconds of all-reduces that two processes of this machine exchange by gloo, to stand beside those of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from graphopt.bench.timing import medians

REPEATS = 20


def all_reduce_seconds(wanted: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Medians, of rank 0: all-reduces of so many bytes one after another, by name; every name in turn."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (folder, dict(wanted)), nprocs=2)
        found: dict[str, float] = torch.load(Path(folder) / "seconds")
    return found


def _rank(rank: int, folder: str, wanted: Mapping[str, Sequence[int]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tensors = {size: torch.ones(size // 4) for sizes in wanted.values() for size in sizes}

    def exchange(sizes: Sequence[int]) -> None:
        for size in sizes:
            dist.all_reduce(tensors[size])

    calls = {name: lambda sizes=sizes: exchange(sizes) for name, sizes in wanted.items()}
    seconds = medians(calls, REPEATS, "cpu")
    if rank == 0:
        torch.save(seconds, Path(folder) / "seconds")
    dist.destroy_process_group()
