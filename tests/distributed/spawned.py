"""Processes on the loopback interface that run one function each, bounded in time; what each returns comes back."""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forked import FORKED
from tests.shared_captures import shared_captures

SECONDS = 120


def on_ranks(work: Callable[..., Any], *args: Any, size: int = 2, seconds: float = SECONDS, timeout: float = 60) -> list[Any]:
    """What `work(rank, *args)` returns in each of `size` processes of a gloo group, or the text of the error that it ended with.

    None for a process that was killed.

    Args:
        work: a function at the top of a module.
        timeout: of the group, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORKED.Pipe(duplex=False) for _ in range(size)]
        group = str(Path(folder) / "store"), size, timeout
        running = [FORKED.Process(target=_run, args=(pipes[rank][1], group, rank, work, args)) for rank in range(size)]
        try:
            for process in running:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            return _received([ours for ours, _ in pipes], time.monotonic() + seconds)
        finally:
            for process in running:
                process.kill()


def results(work: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`on_ranks`, where no process may fail."""
    found = on_ranks(work, *args, **options)
    for rank, value in enumerate(found):
        assert value is not None, f"rank {rank} has ended"
        assert not isinstance(value, str), f"rank {rank}: {value}"
    return found


def _received(pipes: list[Connection], end: float) -> list[Any]:
    """What each process sends, in whatever order: one that waits to be heard does not end, and others may wait for that."""
    found: dict[int, Any] = {}
    while len(found) < len(pipes):
        ready = wait([p for i, p in enumerate(pipes) if i not in found], max(end - time.monotonic(), 0))
        if not ready:
            raise TimeoutError("a rank takes too long")
        for i, pipe in enumerate(pipes):
            if pipe in ready:
                try:
                    found[i] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    found[i] = None
    return [found[i] for i in range(len(pipes))]


def _run(theirs: Connection, group: tuple[str, int, float], rank: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place, size, timeout = group
    store = dist.FileStore(place, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout))
    try:
        with shared_captures():
            value = work(rank, *args)
    except Exception:  # handed to the test, which fails with it: see `results`
        value = traceback.format_exc()
    theirs.send_bytes(pickle.dumps(value))
    os._exit(0)
