"""Processes on the loopback interface that run one function each, bounded in time; what each returns comes back."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120


def on_ranks(work: Callable[..., Any], *args: Any, size: int = 2, seconds: float = SECONDS, timeout: float = 60) -> list[Any]:
    """What `work(rank, *args)` returns in each of `size` processes of a gloo group, or the text of the error that it ended with.

    Args:
        work: a function at the top of a module.
        timeout: of the group, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "work").write_bytes(pickle.dumps((work.__module__, work.__name__, args, timeout)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "tests.distributed.spawned", folder, str(size)]
        running = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(size)]
        try:
            for process in running:
                process.wait(seconds)
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        found = []
        for rank in range(size):
            result = place / f"result {rank}"
            found.append(pickle.loads(result.read_bytes()) if result.exists() else None)
        return found


def results(work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`on_ranks`, where no process may fail."""
    found = on_ranks(work, *args, **options)
    for rank, value in enumerate(found):
        assert value is not None, f"rank {rank} has ended"
        assert not isinstance(value, str), f"rank {rank}: {value}"
    return found


def _main(folder: str, size: int, rank: int) -> None:
    import importlib
    import traceback

    torch.set_num_threads(1)
    place = Path(folder)
    module, name, args, timeout = pickle.loads((place / "work").read_bytes())
    store = dist.FileStore(str(place / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout))
    try:
        value = getattr(importlib.import_module(module), name)(rank, *args)
    except Exception:  # handed to the test, which fails with it: see `results`
        value = traceback.format_exc()
    beside = place / f"part {rank}"
    beside.write_bytes(pickle.dumps(value))
    beside.rename(place / f"result {rank}")
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
