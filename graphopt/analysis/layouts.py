"""Ways to spread training over devices, and the one that should be fastest by the largest batch that fits on each.

Source: LLMem, sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from graphopt.errors import InputError

ZERO_3_COMMUNICATION = 1.5  # volume of ADP relative to CDP
_LARGEST_BATCH = 2**40


class Method(Enum):
    """How fine-tuning is distributed, in the paper's order of preference."""

    CDP = "conventional data parallelism"
    ADP = "advanced data parallelism (ZeRO-3)"
    TP = "tensor parallelism"
    DP_TP = "data and tensor parallelism"
    OFFLOAD = "CPU offloading"


@dataclass(frozen=True)
class Layout:
    """One way to use the devices.

    Attributes:
        method: any but OFFLOAD, which has no closed form.
        devices: gpu_n.
        tensor_parallel: tp_n, devices that share each matrix: 1 for CDP and ADP, all of them for TP.
    Raises:
        InputError: no devices, or a tensor-parallel size that does not divide them or that the method does not have.
    """

    method: Method
    devices: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise InputError(f"devices={self.devices}: at least 1 device is needed.")
        if self.tensor_parallel < 1 or self.devices % self.tensor_parallel:
            raise InputError(f"tensor_parallel={self.tensor_parallel} does not divide devices={self.devices}.")
        if self.method is Method.OFFLOAD:
            raise InputError("CPU offloading has no closed form: choose a layout of CDP, ADP, TP or DP_TP.")
        required = {Method.CDP: 1, Method.ADP: 1, Method.TP: self.devices}.get(self.method, self.tensor_parallel)
        if self.tensor_parallel != required:
            raise InputError(f"{self.method.name} on devices={self.devices} needs tensor_parallel={required}.")

    @property
    def data_parallel(self) -> int:
        """dp_n: groups of devices that see different samples."""
        return self.devices // self.tensor_parallel


@dataclass(frozen=True)
class Candidate:
    """A layout and the largest batch that fits on it.

    Attributes:
        layout: method and devices.
        batch: bs, samples per data-parallel group; 0 if not even one fits.
    """

    layout: Layout
    batch: int

    @property
    def score(self) -> float:
        """Samples per step, in units of a step with ADP's communication."""
        samples = float(self.batch * self.layout.data_parallel)
        return samples * ZERO_3_COMMUNICATION if self.layout.method is Method.CDP else samples


def layouts(devices: int, tensor_parallel: int | None = None) -> tuple[Layout, ...]:
    """CDP, ADP, TP, and DP+TP with the given tensor-parallel size or with every proper divisor of `devices`.

    Raises:
        InputError: no devices, or a tensor-parallel size that does not divide them.
    """
    simple = (Layout(Method.CDP, devices), Layout(Method.ADP, devices), Layout(Method.TP, devices, devices))
    divisors = [size for size in range(2, devices) if devices % size == 0]
    sizes = divisors if tensor_parallel is None else [tensor_parallel]
    return simple + tuple(Layout(Method.DP_TP, devices, size) for size in sizes)


def best_candidate(candidates: Iterable[Candidate]) -> Candidate | None:
    """The highest score, of equals the method that the paper prefers (CDP, ADP, TP, DP+TP); None if every score is 0."""
    order = list(Method)
    feasible = [candidate for candidate in candidates if candidate.score > 0]
    return max(feasible, key=lambda c: (c.score, -order.index(c.layout.method)), default=None)


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, by doubling and bisection; 0 if one sample does not.

    Raises:
        InputError: there is no largest, because memory does not grow with the batch.
    """
    if not fits(1):
        return 0
    good, bad = 1, 2
    while fits(bad):
        good, bad = bad, 2 * bad
        if good >= _LARGEST_BATCH:
            raise InputError("the memory of this model does not grow with its batch: every batch size fits.")
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
