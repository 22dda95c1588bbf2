"""LLMem's closed forms: peak GPU memory of full fine-tuning on one device and on several.

The setting is the paper's: fp16 mixed precision with fp32 masters, Adam, every layer checkpointed, parameters in chunks that
gradients reuse. One formula serves the four methods, with n devices of which t share each matrix (paper: gpu_n, tp_n):

    peak = base + fp16 parameters / t + (fp32 parameters + optimizer states) / n + outputs + head + gather(t)

CDP is the formula of a single device, ADP (ZeRO-3) is t = 1, TP is t = n, and DP+TP lies between. All sizes are bytes. The
working set of the layer that is being recomputed is not part of it. `llmem_shape` reads a model's sizes off its modules.

`choose_strategy` is Algorithm 1, with differences towards the paper's own text: offloading is chosen when every score is 0 (line
23 looks at TP alone), batches are found by doubling and bisection, and DP+TP may try every division of the devices.

Source: LLMem, sections 4 to 6; `Counting.CODE` counts like its reference implementation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from graphopt.analysis.memory import largest_batch
from graphopt.errors import InputError
from graphopt.planner.parallel import ZERO_3_COMMUNICATION, Layout, Method, layouts
from tests.analysis.llmem_shape import HALF_BYTES, SINGLE_BYTES, ModelShape, divide_up

PAGE_BYTES = 2 * 1024**2  # cu_p, a page of CUDA memory
TOKEN_BYTES = 8  # an input id
CODE_EMBEDDING_OUTPUTS = 2  # the reference implementation counts the token embedding twice, for every model


class Counting(Enum):
    """Whose bookkeeping is followed where the paper and its implementation differ.

    PAPER rounds each kind of memory to pages once, and counts weights only. CODE rounds every tensor by itself, and also counts
    biases, input ids, two embedding outputs whatever the model has, and an untied head among the parameters.
    """

    PAPER = "paper"
    CODE = "code"


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory of one device, by what holds it.

    Attributes:
        base_bytes: m_base, CUDA context and loaded model.
        state_bytes: parameters in fp16 and fp32, and optimizer states: this device's share.
        output_bytes: m_out, outputs of embeddings and layers kept for recomputation.
        head_bytes: m_lm, logits, the shifted copies that the loss needs, and the head's fp16 weight.
        gather_bytes: m_back, buffers of tensor parallelism's all-gather in the backward.
    """

    base_bytes: int
    state_bytes: int
    output_bytes: int
    head_bytes: int
    gather_bytes: int

    @property
    def total_bytes(self) -> int:
        """m_peak."""
        return self.base_bytes + self.state_bytes + self.output_bytes + self.head_bytes + self.gather_bytes


def round_to_pages(size: int) -> int:
    """`size` in bytes, rounded up to whole CUDA pages."""
    return divide_up(size, PAGE_BYTES) * PAGE_BYTES


def base_bytes(shape: ModelShape, context_bytes: int, tensor_parallel: int = 1) -> int:
    """m_base: the CUDA context, and this device's part of the fp16 model that was loaded and is never released.

    Source: LLMem, sections 3.1 and 4.1; its implementation measures this term instead.
    """
    return context_bytes + divide_up(shape.loaded_bytes, tensor_parallel)


def parameter_bytes(shape: ModelShape, counting: Counting = Counting.CODE) -> tuple[int, int]:
    """m_p in two parts, fp16 with the gradients that reuse its memory, and fp32: m_p,16 and m_p,32.

    Source: LLMem, section 4.2, m_p = ceil((embed_p + ceil(other_p / cs) cs) (B_16 + B_32)).
    """
    elements = shape.embedding_elements + shape.chunked_elements
    if counting is Counting.CODE and not shape.tied_head:
        elements += shape.head_elements
    half = round_to_pages(elements * HALF_BYTES)
    return half, round_to_pages(elements * (HALF_BYTES + SINGLE_BYTES)) - half


def optimizer_bytes(shape: ModelShape, counting: Counting = Counting.CODE) -> int:
    """m_os: momentum and variance in fp32 of embeddings and matrix products; the head's are left out, as in the paper.

    Source: LLMem, section 4.2, m_os = sum of ceil(t_p (B_32 + B_32)).
    """
    if counting is Counting.PAPER:
        return sum(round_to_pages(size * 2 * SINGLE_BYTES) for size in shape.weight_elements)
    return sum(2 * round_to_pages(size * SINGLE_BYTES) for size in shape.weight_elements + shape.bias_elements)


def output_bytes(shape: ModelShape, batch: int, sequence: int, counting: Counting = Counting.CODE) -> int:
    """m_out: outputs of embeddings and layers, kept from the forward to the backward.

    Source: LLMem, section 4.2, m_out = ceil((e_n + l_n) bs sl o_n B_16).
    """
    tokens = batch * sequence
    if counting is Counting.PAPER:
        return round_to_pages((shape.embeddings + shape.layers) * tokens * shape.hidden_size * HALF_BYTES)
    embedded = CODE_EMBEDDING_OUTPUTS * round_to_pages(tokens * shape.embedding_size * HALF_BYTES)
    return (
        round_to_pages(tokens * TOKEN_BYTES) + embedded + shape.layers * round_to_pages(tokens * shape.hidden_size * HALF_BYTES)
    )


def head_bytes(shape: ModelShape, batch: int, sequence: int) -> int:
    """m_lm: logits, twice the logits shifted by one token, and lm_p, the head's fp16 weight.

    Source: LLMem, section 4.2, m_lm = ceil(bs sl dict_n B) + 2 ceil(bs (sl - 1) dict_n B) + lm_p.
    """
    logits = batch * shape.vocabulary * shape.logits_bytes
    return round_to_pages(logits * sequence) + 2 * round_to_pages(logits * (sequence - 1)) + shape.head_elements * HALF_BYTES


def gather_bytes(shape: ModelShape, batch: int, sequence: int, tensor_parallel: int, counting: Counting = Counting.CODE) -> int:
    """m_back: what the all-gather in the backward of tensor parallelism brings from the other devices.

    Source: LLMem, section 5, m_back = ceil(l_n bs sl o_n (tp_n - 1) / tp_n B_16).
    """
    output = batch * sequence * shape.hidden_size * HALF_BYTES * (tensor_parallel - 1)
    if counting is Counting.PAPER:
        return round_to_pages(divide_up(shape.layers * output, tensor_parallel))
    return shape.layers * round_to_pages(divide_up(output, tensor_parallel))


def state_bytes(shape: ModelShape, layout: Layout, counting: Counting = Counting.CODE, *, published_hybrid: bool = False) -> int:
    """Parameters and optimizer states that one device of `layout` holds at the peak.

    During the computation a device needs the fp16 parameters of its tensor-parallel part, m_p,16 / tp_n. For DP+TP the paper has
    m_p,16 (1 - tp_n / gpu_n) instead, which is the same for 2 x 2 devices only; `published_hybrid` selects it.
    """
    half, single = parameter_bytes(shape, counting)
    sharded = single + optimizer_bytes(shape, counting)
    if layout.method is Method.CDP:
        return half + sharded
    copies = layout.data_parallel
    if published_hybrid and layout.method is Method.DP_TP:
        copies = layout.devices - layout.tensor_parallel
    return divide_up(half * copies + sharded, layout.devices)


def peak_memory(
    shape: ModelShape,
    layout: Layout,
    batch: int,
    sequence: int,
    base: int,
    counting: Counting = Counting.CODE,
    *,
    published_hybrid: bool = False,
) -> PeakMemory:
    """Peak memory of each device when every data-parallel group takes `batch` samples.

    Args:
        shape: of the model, from `read_shape` or by hand.
        layout: method and devices.
        batch: bs, samples per data-parallel group.
        sequence: sl, tokens per sample.
        base: m_base in bytes, such as `base_bytes` gives.
        counting: the paper's bookkeeping or its implementation's.
        published_hybrid: the paper's formula for DP+TP instead of the right one.
    Raises:
        InputError: no samples or no tokens.
    Source: LLMem, sections 4.2 and 5.
    """
    if batch < 1 or sequence < 1:
        raise InputError(f"batch={batch} and sequence={sequence} must both be at least 1.")
    return PeakMemory(
        base_bytes=base,
        state_bytes=state_bytes(shape, layout, counting, published_hybrid=published_hybrid),
        output_bytes=output_bytes(shape, batch, sequence, counting),
        head_bytes=head_bytes(shape, batch, sequence),
        gather_bytes=gather_bytes(shape, batch, sequence, layout.tensor_parallel, counting),
    )


@dataclass(frozen=True)
class Candidate:
    """A layout and bs, the largest batch per data-parallel group that fits on it; 0 if not even one sample does."""

    layout: Layout
    batch: int

    @property
    def score(self) -> float:
        """Samples per step, in units of a step with ADP's communication."""
        samples = float(self.batch * self.layout.data_parallel)
        return samples * ZERO_3_COMMUNICATION if self.layout.method is Method.CDP else samples


def best_candidate(candidates: Iterable[Candidate]) -> Candidate | None:
    """The highest score, of equals the method that the paper prefers (CDP, ADP, TP, DP+TP); None if every score is 0."""
    order = list(Method)
    feasible = [candidate for candidate in candidates if candidate.score > 0]
    return max(feasible, key=lambda c: (c.score, -order.index(c.layout.method)), default=None)


@dataclass(frozen=True)
class Decision:
    """What Algorithm 1 chose, and what it chose from.

    Attributes:
        method: of the best candidate, None, for offloading, if nothing fits.
        layout: of the best candidate, None if nothing fits.
        batch: of the best candidate, 0 if nothing fits.
        candidates: every layout that was tried.
    """

    method: Method | None
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
        return Decision(None, None, 0, candidates)
    return Decision(best.layout.method, best.layout, best.batch, candidates)
