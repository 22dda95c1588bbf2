"""LLMem's Algorithm 1: the distributed method that should fine-tune fastest, by the largest batch that each one fits.

Differences from the listing, all towards the paper's own text: offloading is chosen when every score is 0 (line 23 looks at TP
alone), batches are found by doubling and bisection, and DP+TP may try every division of the devices.

Source: LLMem, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from graphopt.analysis.llmem import Counting, Layout, Method, base_bytes, peak_memory
from graphopt.analysis.llmem_shape import ModelShape
from graphopt.errors import InputError

ZERO_3_COMMUNICATION = 1.5  # volume of ADP relative to CDP


_LARGEST_BATCH = 2**40


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


@dataclass(frozen=True)
class Decision:
    """What Algorithm 1 chose, and what it chose from.

    Attributes:
        method: of the best candidate, OFFLOAD if nothing fits.
        layout: of the best candidate, None if nothing fits.
        batch: of the best candidate, 0 if nothing fits.
        candidates: every layout that was tried.
    """

    method: Method
    layout: Layout | None
    batch: int
    candidates: tuple[Candidate, ...]


def choose_strategy(
    shape: ModelShape,
    devices: int,
    sequence: int,
    capacity_bytes: int,
    context_bytes: int,
    *,
    tensor_parallel: int | None = None,
    counting: Counting = Counting.CODE,
    published_hybrid: bool = False,
) -> Decision:
    """The method with the highest score, each with the largest batch whose peak is within the capacity.

    Args:
        shape: of the model, from `read_shape` or by hand.
        devices: gpu_n.
        sequence: sl, tokens per sample.
        capacity_bytes: m_total of one device.
        context_bytes: CUDA context of one device; `shape.loaded_bytes` comes on top, divided by the tensor-parallel size.
        tensor_parallel: devices that share each matrix in DP+TP; None tries every proper divisor of `devices`.
        counting: the paper's bookkeeping or its implementation's.
        published_hybrid: the paper's formula for DP+TP instead of the right one.
    Raises:
        InputError: no devices, a tensor-parallel size that does not divide them, or no tokens.
    """

    def largest(layout: Layout) -> int:
        base = base_bytes(shape, context_bytes, layout.tensor_parallel)

        def fits(batch: int) -> bool:
            peak = peak_memory(shape, layout, batch, sequence, base, counting, published_hybrid=published_hybrid)
            return peak.total_bytes <= capacity_bytes

        return largest_batch(fits)

    candidates = tuple(Candidate(layout, largest(layout)) for layout in layouts(devices, tensor_parallel))
    best = best_candidate(candidates)
    if best is None:
        return Decision(Method.OFFLOAD, None, 0, candidates)
    return Decision(best.layout.method, best.layout, best.batch, candidates)


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
