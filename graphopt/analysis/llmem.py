"""LLMem's closed forms: peak GPU memory of full fine-tuning on one device and on several.

The setting is the paper's: fp16 mixed precision with fp32 masters, Adam, every layer checkpointed, parameters in chunks that
gradients reuse. One formula serves the four methods, with n devices of which t share each matrix (paper: gpu_n, tp_n):

    peak = base + fp16 parameters / t + (fp32 parameters + optimizer states) / n + outputs + head + gather(t)

CDP is the formula of a single device, ADP (ZeRO-3) is t = 1, TP is t = n, and DP+TP lies between. All sizes are bytes. The
working set of the layer that is being recomputed is not part of it. `llmem_shape` reads a model's sizes off its modules, and
`llmem_search` chooses among the methods.

Source: LLMem, sections 4 and 5; `Counting.CODE` counts like its reference implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from graphopt.analysis.llmem_shape import HALF_BYTES, SINGLE_BYTES, ModelShape, divide_up
from graphopt.errors import InputError

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
