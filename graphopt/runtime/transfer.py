"""Copies between the device and the host, beside what the device computes.

On CUDA, copies run on streams of their own through pinned buffers, and every hand-over is an event:

* a copy out waits for the event that the producer's stream has recorded, so that it never starts before the write is done;
* a pinned buffer is written again only after the copy that reads it has ended;
* memory that a copy reads or writes is recorded on its stream, so that the allocator does not give it away.

Where the device is the host, copies are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Buffers:
    """Pinned memory of one site, and the event after which `back` may be written again."""

    out: Tensor
    back: Tensor
    read: Any = None


class Transfer:
    """Copies of every site between one device and the host."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device
        self.buffers: dict[str, _Buffers] = {}
        if self.cuda:
            self.out_stream, self.in_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def stage(self, value: Tensor) -> tuple[Tensor, Any]:
        """A copy of `value` that nothing else writes to, and the event after which it is there; on the producer's stream."""
        staged = value.detach().clone()
        return staged, torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    def to_host(self, name: str, staged: Tensor, written: Any) -> Tensor:
        """Copy out; returns when the copy has ended."""
        if not self.cuda:
            return staged
        buffers = self._of(name, staged)
        with torch.cuda.stream(self.out_stream):
            self.out_stream.wait_event(written)
            staged.record_stream(self.out_stream)
            buffers.out.copy_(staged, non_blocking=True)
            ended = self.out_stream.record_event()
        ended.synchronize()
        return buffers.out

    def to_device(self, name: str, value: Tensor) -> Callable[[], Tensor]:
        """Start to copy in; returns a function that has the current stream wait and gives the copy."""
        if not self.cuda:
            return lambda: value
        buffers = self._of(name, value)
        if buffers.read is not None:
            buffers.read.synchronize()
        buffers.back.copy_(value)
        with torch.cuda.stream(self.in_stream):
            copy = buffers.back.to(self.device, non_blocking=True)
            buffers.read = self.in_stream.record_event()
        arrived = buffers.read

        def received() -> Tensor:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            copy.record_stream(stream)
            return copy

        return received

    def _of(self, name: str, like: Tensor) -> _Buffers:
        found = self.buffers.get(name)
        if found is None:
            pinned = (torch.empty(like.shape, dtype=like.dtype, pin_memory=True) for _ in range(2))
            found = self.buffers[name] = _Buffers(*pinned)
        return found
