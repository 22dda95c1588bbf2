"""Copies between devices and the host, beside what the devices compute.

On CUDA, copies run on streams of their own, in threads that may wait:

* a copy out begins when the event that the producer's stream recorded has come, so that it never reads what is not yet written;
* every copy has pinned memory of its own, which PyTorch's allocator gives to another only when the copies that use it have ended;
* memory of the device that a copy reads or writes is recorded on its stream, so that the allocator does not give it away.

Where the device is the host, copies are copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Transfer:
    """Copies to and from the host, for any number of devices."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def stage(self, value: Tensor) -> tuple[Tensor, Any]:
        """A copy of `value` that nothing else writes to, and the event after which it is there; on the producer's stream."""
        staged = value.detach().clone()
        return staged, torch.cuda.current_stream(value.device).record_event() if value.is_cuda else None

    def wait(self, written: Any) -> None:
        """Wait for an event of `stage`."""
        if written is not None:
            written.synchronize()

    def to_host(self, staged: Tensor) -> Tensor:
        """Copy out what has been written; returns when the copy has ended."""
        if not staged.is_cuda:
            return staged
        stream = self._stream(staged.device, "out")
        copy = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            staged.record_stream(stream)
            copy.copy_(staged, non_blocking=True)
            ended = stream.record_event()
        ended.synchronize()
        return copy

    def to_device(self, value: Tensor, device: torch.device) -> Callable[[], Tensor]:
        """Start to copy in; returns a function that has the current stream wait and gives the copy."""
        if device.type != "cuda":
            return lambda: value.to(device)
        stream = self._stream(device, "in")
        pinned = value.pin_memory()
        with torch.cuda.stream(stream):
            copy = pinned.to(device, non_blocking=True)
            arrived = stream.record_event()

        def received() -> Tensor:
            current = torch.cuda.current_stream(device)
            current.wait_event(arrived)
            copy.record_stream(current)
            return copy

        return received

    def _stream(self, device: torch.device, direction: str) -> Any:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]


class Span:
    """Time between two moments of the device's work."""

    def __init__(self) -> None:
        self._moments: list[Any] = []

    def mark(self, tensor: Tensor) -> None:
        """Note that `tensor` has been computed."""
        if tensor.is_cuda:
            moment: Any = torch.cuda.Event(enable_timing=True)
            moment.record(torch.cuda.current_stream(tensor.device))
        else:
            moment = time.perf_counter()
        self._moments[1:] = [moment]

    def seconds(self) -> float:
        """From the first moment to the last."""
        if len(self._moments) < 2:
            return 0.0
        first, last = self._moments
        if isinstance(last, float):
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
