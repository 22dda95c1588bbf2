"""The scalar that training differentiates, from whatever a model returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphopt.compat import pytree
from graphopt.errors import ImportanceError, InputError

LossFunction = Callable[[Any], Tensor]
"""From the model's output to a scalar loss."""

PROBED = "sensitivity of the outputs (no scalar loss among them: pass loss= for the real one)"
"""Where a scalar is from that stands in for a loss."""

_PROBE_SEED = 0x6772

FLOAT16_SCALE = 2.0**12
"""Of a loss whose backward runs in float16: a sixteenth of what `torch.amp.GradScaler` starts with."""


def scalar_loss(output: Any, loss: LossFunction | None = None) -> tuple[Tensor, str]:
    """The scalar to differentiate, and where it is from.

    Args:
        output: of the model.
        loss: scalar from the output; by default the output's own loss, or the output where it is a scalar. A model that has
            none is probed with random output gradients.
    Raises:
        ImportanceError: no output requires a gradient.
        InputError: see `own_loss`.
    """
    own = own_loss(output, loss)
    if own is not None:
        return own, "the model's own loss" if loss is None else "the given loss"
    outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:
        raise ImportanceError("the model's output does not require a gradient: pass labels, or loss=.")
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    probes = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    total = torch.stack([(t * probe).sum().float() for t, probe in zip(outputs, probes, strict=True)]).sum()
    return total, PROBED


def own_loss(output: Any, loss: LossFunction | None = None) -> Tensor | None:
    """The scalar that `loss` makes of a model's output, or that it holds itself; None where there is none.

    Args:
        output, loss: see `scalar_loss`.
    Raises:
        InputError: `loss` returns something else.
    """
    if loss is not None:
        own: Any = loss(output)
    else:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if own is None and isinstance(output, (tuple, list)) and output:
            own = output[0]
        if own is None:
            own = output
    if isinstance(own, Tensor) and own.numel() == 1 and own.requires_grad:
        return own.sum()
    if loss is None:
        return None
    what = f"a tensor of shape {tuple(own.shape)}" if isinstance(own, Tensor) else f"a {type(own).__name__}"
    without = " that requires no gradient" if isinstance(own, Tensor) and not own.requires_grad else ""
    raise InputError(
        f"loss= must return a tensor of one number that can be differentiated, and returns {what}{without}. Remedy: take the "
        "mean there, and neither .item() nor .detach()."
    )


def gradients_of(scalar: Tensor, tensors: Sequence[Tensor], float16: bool) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`; None for tensors that `scalar` does not depend on.

    Args:
        float16: the backward has tensors of float16, in which small gradients are 0. The loss is scaled, and gradients, in
            float32, are scaled back.
    """
    scaled = scalar.float() * FLOAT16_SCALE if float16 else scalar
    found = torch.autograd.grad(scaled, tensors, allow_unused=True)
    return tuple(g.float() / FLOAT16_SCALE if float16 and g is not None else g for g in found)
