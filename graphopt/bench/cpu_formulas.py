"""FLOPs of operators that torch's own counter does not know on CPUs, or has wrong, apart from graphopt's, which they check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count


def cpu_formulas() -> dict[Any, Callable[..., int]]:
    """For `FlopCounterMode(custom_mapping=...)`: by operator, from the shapes of its arguments to FLOPs, 2 per multiply-add."""
    aten, experts = torch.ops.aten, torch.ops.transformers
    found: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten._grouped_mm: _grouped,
        aten.convolution_backward: _convolution_backward,
    }
    if hasattr(experts, "grouped_mm_fallback"):  # in its place in what is compiled, once transformers has been imported
        found[experts.grouped_mm_fallback] = _grouped
        found[experts.grouped_mm_fallback_backward] = _grouped_backward
    return found


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _convolution_backward(gradient: Any, inputs: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Each gradient as the forward: torch counts that of the weight once for each group."""
    transposed, *_, mask = args[4:]
    return conv_flop_count(inputs, weight, gradient, transposed=transposed) * (mask[0] + mask[1])


def _grouped(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Of all experts together, each of which multiplies its own tokens."""
    return int(2 * left[-2] * left[-1] * right[-1])


def _grouped_backward(rows: Any, weights: Any, *args: Any, **kwargs: Any) -> int:
    """The gradients of tokens and of weights."""
    return 2 * _grouped(rows, weights)
