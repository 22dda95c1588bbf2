"""Which contraction order each layer with adapters gets (RunLoRA, section 3.3): the fewest FLOPs, or the least time."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from graphopt.passes.runlora.layers import LoraLayer
from graphopt.passes.runlora.orders import (
    AUTOGRAD,
    LayerShape,
    Order,
    moved_bytes,
    order_flops,
    products,
    saved_bytes,
)
from graphopt.passes.runlora.rewrite import legal_orders, refusal
from graphopt.passes.runlora.sites import lora_sites
from torch import Tensor, fx

from graphopt.analysis.products import product
from graphopt.compat import draws, no_autocast
from graphopt.graph import TrainingGraph, ancestors
from graphopt.planner.product_times import ProductTimes, TimesFor

if TYPE_CHECKING:
    from graphopt.passes.runlora.technique import RunLora

TOLERABLE = 0.1
"""Largest part of an adapter's contribution that rounding W + cAB may lose, for merged orders to be legal."""

FLOAT32_BITS = 23
"""Of the fraction of a float32 number."""

CLOSE = 1.3
"""Orders within this factor of the best by roofline are timed product by product."""


@dataclass(frozen=True)
class Choice:
    """The order of one layer, at one batch size.

    Attributes:
        layer: name of its weight.
        order, before: the chosen one, and autograd's.
        flops_before, flops_after: forward and backward of the layer.
        saved_before, saved_after: bytes kept for the backward beside X and the weights.
        seconds_before, seconds_after: predicted for forward and backward; None where time was not measured.
        why: in words.
    """

    layer: str
    order: Order
    before: Order
    flops_before: int
    flops_after: int
    saved_before: int
    saved_after: int
    seconds_before: float | None
    seconds_after: float | None
    why: str

    def __str__(self) -> str:
        time = ""
        if self.seconds_before is not None and self.seconds_after is not None:
            time = f", {self.seconds_before * 1e3:.2f} -> {self.seconds_after * 1e3:.2f} ms"
        return (
            f"{self.layer}: {self.order}, {self.flops_before:,} -> {self.flops_after:,} FLOPs, "
            f"{self.saved_before:,} -> {self.saved_after:,} bytes saved{time}; {self.why}"
        )


def choose_orders(
    graph: TrainingGraph, batch_size: int, rewrite: RunLora, imprecise: Mapping[str, float], times_for: TimesFor
) -> dict[str, Choice]:
    """An order for every layer with adapters of `graph`, which needs no more FLOPs and keeps no more bytes than autograd's.

    Args:
        batch_size: for which costs are compared.
        rewrite: says whether FLOPs or time decide, or the order itself.
        imprecise: layers whose weight must not be merged with their adapters, with the error (see `merge_errors`).
        times_for: measured times of products on a device; None where nothing can be measured, so that FLOPs decide.
    """
    choices = {}
    for layer in lora_sites(graph).layers:
        shape = layer.shape.at(batch_size)
        value = layer.base.meta["val"]
        times = times_for(value.device, value.dtype) if rewrite.criterion == "time" else None
        error = imprecise.get(layer.name, 0.0)
        try:
            choices[layer.name] = _choose(layer, shape, rewrite.fixed_order, error, times)
        except torch.OutOfMemoryError:  # no room to time products beside the model
            choices[layer.name] = _choose(layer, shape, rewrite.fixed_order, error, None)
    return choices


def _choose(layer: LoraLayer, shape: LayerShape, given: Order | None, error: float, times: ProductTimes | None) -> Choice:
    before = AUTOGRAD.for_layer(shape)
    legal = legal_orders(layer)
    blocked = layer.unmergeable
    if error > TOLERABLE:
        legal = [o for o in legal if not o.merges]
        blocked = f"merging would lose {error:.0%} of the adapter in products of {layer.base.meta['val'].dtype}"
        if error == math.inf:
            blocked = "what merging would lose cannot be computed before a step"
    flops = {o: order_flops(o, shape) for o in legal}
    saved = {o: saved_bytes(o, shape) for o in legal}
    affordable = [o for o in legal if flops[o] <= order_flops(before, shape) and saved[o] <= saved_bytes(before, shape)]
    if given is not None:
        order, why = given.for_layer(shape), "as asked for"
        if refusal(layer, order) or (order.merges and error > TOLERABLE):
            order = before
    elif times is None:
        order = min(affordable, key=lambda o: (flops[o], saved[o]))
        why = "the fewest FLOPs"
    else:
        rough = {o: _roofline(o, shape, times) for o in affordable}
        close = [o for o in affordable if rough[o] <= CLOSE * min(rough.values())]
        order = min(close, key=lambda o: (_seconds(o, shape, times), saved[o]))
        why = "the least time"
    if order == before:
        why = f"autograd's own order has {why.removeprefix('the ')}" if given is None else why
    if blocked:
        why = f"{why} of those that do not merge: {blocked}" if given is None else blocked
    return Choice(
        layer.name,
        order,
        before,
        order_flops(before, shape),
        order_flops(order, shape),
        saved_bytes(before, shape),
        saved_bytes(order, shape),
        None if times is None else _seconds(before, shape, times),
        None if times is None else _seconds(order, shape, times),
        why,
    )


def _seconds(order: Order, shape: LayerShape, times: ProductTimes) -> float:
    forward, backward = products(order, shape)
    return sum(times.product(*p) for p in forward + backward) + moved_bytes(order, shape) / times.bandwidth


def _roofline(order: Order, shape: LayerShape, times: ProductTimes) -> float:
    forward, backward = products(order, shape)
    seconds = moved_bytes(order, shape) / times.bandwidth
    for m, k, n in forward + backward:
        moved = (m * k + k * n + m * n) * shape.itemsize
        seconds += max(2 * m * k * n / times.peak, moved / times.bandwidth)
    return seconds


def merge_errors(graph: TrainingGraph, tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Per layer the part of its adapters' contribution that rounding W + cAB loses: |error| / |cAB|.

    In half precision the sum is rounded. In float32 the product rounds it where it calculates with fewer bits, as in TF32.
    An adapter that contributes nothing yet (B = 0) counts as lost entirely; where W, A or B cannot be computed beforehand, the
    error is infinite. Layers in full precision are left out.

    Args:
        tensors: the model's parameters and buffers by name.
    """
    known: dict[fx.Node, Any] = {
        node: tensors[desc.target]
        for desc, node in zip(graph.inputs, graph.placeholders, strict=True)
        if desc.kind in ("parameter", "buffer") and desc.target in tensors
    }
    known.update((node, operator.attrgetter(str(node.target))(graph.module)) for node in graph.graph.find_nodes(op="get_attr"))
    bits: dict[torch.device, int] = {}
    errors = {}
    for layer in lora_sites(graph).layers:
        value = layer.base.meta["val"]
        if value.dtype == torch.float64 or layer.unmergeable:
            continue
        if value.dtype == torch.float32:
            if value.device not in bits:
                bits[value.device] = product_bits(value.device)
            if bits[value.device] == FLOAT32_BITS:
                continue
        with no_autocast():  # the graph has casts of its own
            errors[layer.name] = _merge_error(layer, known, bits.get(value.device, FLOAT32_BITS))
    return errors


def _merge_error(layer: LoraLayer, known: Mapping[fx.Node, Any], bits: int) -> float:
    """See `merge_errors`; in float32, products keep so many `bits` of fractions."""
    operands = product(layer.base)
    assert operands is not None
    factors = [(adapter.first.args[1], adapter.second.args[1]) for adapter in layer.adapters]
    read = ancestors(node for node in (operands[1], *itertools.chain(*factors)) if isinstance(node, fx.Node))
    if any((node.op == "placeholder" and node not in known) or draws(node) for node in read):  # the model's inputs, say
        return math.inf
    weight = _evaluate(operands[1], known)
    change = torch.zeros_like(weight, dtype=torch.float32)
    for adapter, pair in zip(layer.adapters, factors, strict=True):
        a, b = (_evaluate(n, known) for n in pair)
        change += adapter.scale * (a.float() @ b.float())
    before, merged = weight.float(), (weight.float() + change).to(weight.dtype).float()
    if weight.dtype == torch.float32:
        before, merged = (_rounded(x, bits) for x in (before, merged))
    size = float(change.norm())
    return float((merged - before - change).norm()) / size if size else 1.0


def product_bits(device: torch.device) -> int:
    """Bits of fractions that float32 products calculate with: 23, but 10 in TF32 and 7 in bfloat16.

    It is tried: settings ask for less, and the device decides.
    """
    numbers = 1 + 0.5 ** torch.arange(1, FLOAT32_BITS + 1, device=device, dtype=torch.float32)
    factor = torch.ones(256, 256, device=device, dtype=torch.float32)
    factor[:, :FLOAT32_BITS] = numbers
    with no_autocast():
        kept = (factor @ torch.eye(256, device=device, dtype=torch.float32))[:, :FLOAT32_BITS] == numbers
    return int(kept.all(0).sum())


def _rounded(numbers: Tensor, bits: int) -> Tensor:
    """Float32 numbers whose fractions have so many bits."""
    unit = 1 << FLOAT32_BITS - bits
    return ((numbers.contiguous().view(torch.int32) + unit // 2) & -unit).view(torch.float32)


def _evaluate(node: Any, known: Mapping[fx.Node, Any]) -> Tensor:
    """The value of a node that depends on parameters and constants alone."""
    if node in known:
        value: Tensor = known[node].detach()
        return value
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _evaluate(n, known))
    with torch.no_grad():
        result: Tensor = node.target(*args, **kwargs)
    return result
