"""Measured times of matrix products: per device, dtype and shape, with random data, kept on disk."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import graphopt.ops.sparse  # noqa: F401  registers the operator
from graphopt.compat import no_autocast
from graphopt.compat.dynamo import outside_tracing

_NAME = re.compile(r"\d+x\d+x\d+|combine \d+x\d+ of \d+x\d+|copy \d+")
_ENOUGH_SECONDS = 0.05
_REPEATS = 5


class ProductTimes:
    """Times of products on one device in one dtype; measured when first asked for."""

    def __init__(self, device: torch.device, dtype: torch.dtype, path: Path | None = None) -> None:
        """Start with what is known.

        Args:
            path: where times are kept; by default in the user's cache directory.
        """
        self.device = device
        self.dtype = dtype
        self.path = path or cache_file()
        self.key = machine(device, dtype)
        self._known: dict[str, float] = {**_read(self.path).get(self.key, {}), **_adopted.get(self.key, {})}
        self.used: dict[str, float] = {}

    @property
    def peak(self) -> float:
        """FLOPs per second of a product that is large for the device."""
        size = 4096 if self.device.type == "cuda" else 1024
        return 2 * size**3 / self.product(size, size, size)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of copying a tensor that is larger than the device's caches, reading and writing counted."""
        count = (128 if self.device.type == "cuda" else 16) * 2**20 // self.dtype.itemsize
        return 2 * count * self.dtype.itemsize / self._time(f"copy {count}", lambda: self._copy(count))

    def product(self, m: int, k: int, n: int) -> float:
        """Seconds of an (m x k) by (k x n) product."""
        return self._time(f"{m}x{k}x{n}", lambda: self._product(m, k, n))

    def _product(self, m: int, k: int, n: int) -> float:
        left = torch.randn(m, k, device=self.device, dtype=self.dtype)
        right = torch.randn(k, n, device=self.device, dtype=self.dtype)
        return self._measure(lambda: torch.mm(left, right))

    def combined(self, rows: int, entries: int, table: int, width: int) -> float:
        """Seconds of `combine_rows`: `rows` sums of `entries` rows each of a (table x width) matrix."""
        return self._time(f"combine {rows}x{entries} of {table}x{width}", lambda: self._combined(rows, entries, table, width))

    def _combined(self, rows: int, entries: int, table: int, width: int) -> float:
        source = torch.randn(table, width, device=self.device, dtype=self.dtype)
        indices = torch.randint(table, (rows, entries), device=self.device, dtype=torch.int32)
        weights = torch.randn(rows, entries, device=self.device, dtype=torch.float32)
        return self._measure(lambda: torch.ops.graphopt.combine_rows(source, indices, weights))

    def _copy(self, count: int) -> float:
        source = torch.randn(count, device=self.device, dtype=self.dtype)
        target = torch.empty_like(source)
        return self._measure(lambda: target.copy_(source))

    def _time(self, name: str, measure: object) -> float:
        if name not in self._known:
            devices = [self.device] if self.device.type == "cuda" else []
            with outside_tracing(), no_autocast(), torch.random.fork_rng(devices):  # orders are chosen while AOTAutograd traces
                self._known[name] = measure()  # type: ignore[operator]
            _write(self.path, self.key, self._known)
        self.used[name] = self._known[name]
        return self._known[name]

    def adopt(self, times: dict[str, float]) -> bool:
        """Go by these times; whether one of them was another when it was used."""
        changed = any(self.used.get(name, seconds) != seconds for name, seconds in times.items())
        self._known |= times
        self.used |= {name: seconds for name, seconds in times.items() if name in self.used}
        return changed

    def _measure(self, call: object) -> float:
        samples: list[float] = []
        for i in range(1 + _REPEATS):
            start = time.perf_counter()
            call()  # type: ignore[operator]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if i:
                samples.append(time.perf_counter() - start)
            if sum(samples) > _ENOUGH_SECONDS and len(samples) >= 3:
                break
        return statistics.median(samples)


TimesFor = Callable[[torch.device, torch.dtype], ProductTimes | None]

_by_device: dict[tuple[torch.device, str], ProductTimes] = {}
_adopted: dict[str, dict[str, float]] = {}


def product_times(device: torch.device, dtype: torch.dtype) -> ProductTimes | None:
    """Times for a device; None for one on which nothing can run, such as `meta`."""
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        key = device, machine(device, dtype)
        if key not in _by_device:
            _by_device[key] = ProductTimes(device, dtype)
        return _by_device[key]
    return None


def used_times() -> dict[str, dict[str, float]]:
    """The times by which this process has decided so far, by `ProductTimes.key`."""
    found: dict[str, dict[str, float]] = {key: dict(times) for key, times in _adopted.items()}
    for times in _by_device.values():
        found.setdefault(times.key, {}).update(times.used)
    return found


def are_times(times: Any) -> bool:
    """Whether these may be times that `used_times` gave: positive numbers of seconds under names of `ProductTimes`."""
    if not isinstance(times, dict) or not all(isinstance(seconds, dict) for seconds in times.values()):
        return False
    named = [entry for seconds in times.values() for entry in seconds.items()]
    known = all(isinstance(name, str) and _NAME.fullmatch(name) for name, _ in named)
    return known and all(type(value) in (int, float) and 0 < value < math.inf for _, value in named)


def adopt_times(times: dict[str, dict[str, float]]) -> bool:
    """Decide by these times from now on, as far as they are of this machine; others are kept, and not used.

    Returns:
        Whether a decision may have been taken by other times already.
    """
    for key, seconds in times.items():
        _adopted.setdefault(key, {}).update(seconds)
    changed = [known.adopt(times.get(known.key, {})) for known in _by_device.values()]
    return any(changed)


def cache_file() -> Path:
    """Where times are kept: `graphopt/product_times.json` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphopt" / "product_times.json"


def machine(device: torch.device, dtype: torch.dtype) -> str:
    """What times depend on beside a product's shape, as it is now: the device, the processor, and torch with its settings."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    settings = f"{torch.get_num_threads()} threads, float32 as {float32_precision()}"
    return f"{device.type} {name}, {_processor()}, {settings}, torch {torch.__version__}, {dtype}"


@functools.cache
def _processor() -> str:
    """The model of the CPU; Linux tells it in a file alone."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def float32_precision() -> str:
    """What products of float32 may calculate in; torch has one word for it unless its old and new settings were mixed."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends: tuple[Any, ...] = (torch.backends.mkldnn, torch.backends.cuda)  # the first has no declared `matmul`
        return " and ".join(str(backend.matmul.fp32_precision) for backend in backends)


def _read(path: Path) -> dict[str, dict[str, float]]:
    """What was measured before; a file that cannot be read, or holds something else, counts as empty."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if are_times(known) else {}


def _write(path: Path, key: str, times: dict[str, float]) -> None:
    """Add times to the file; where it cannot be written, they are measured again by the next process."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # processes that measure at the same time write one after another
            known = _read(path)
            known.setdefault(key, {}).update(times)
            beside = path.with_suffix(".part")
            beside.write_text(json.dumps(known))
            os.replace(beside, path)
