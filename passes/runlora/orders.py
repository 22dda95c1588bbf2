"""The orders in which a layer with low-rank adapters can be computed, and what each costs (RunLoRA, section 3).

The layer is Y = XW + sum of c (XA)B over its adapters, for X (t x i), W (i x o), A (i x r), B (r x o). Gradients are
dA = c X'dY B', dB = c A'X'dY and dX = dY W' + c dY B'A'. Intermediate results are computed at most once:
Z1 = dY B' (t x r), Z2 = XA (t x r), Z3 = X'dY (i x o) and Z4 = W + cAB (i x o).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from graphopt.graph import BATCH

Save = Literal["none", "xa", "merged"]
"""What the forward keeps for the backward beside X and the weights: nothing, Z2, or Z4."""


@dataclass(frozen=True)
class Order:
    """One way to compute a layer and its gradients.

    Attributes:
        merged_forward: Y = X(W + cAB) instead of XW + c(XA)B.
        save: see `Save`; "xa" needs a forward that computes it, "merged" a merged forward and input gradient.
        weight_grad_a, weight_grad_b: dA, dB come from Z3 instead of Z1 and Z2.
        merged_input_grad: dX = dY (W + cAB)' instead of dY W' + Z1 A'.
    """

    merged_forward: bool = False
    save: Save = "xa"
    weight_grad_a: bool = False
    weight_grad_b: bool = False
    merged_input_grad: bool = False

    def for_layer(self, shape: LayerShape) -> Order:
        """The same order without what a layer does not need: gradients of frozen factors, or of an input without one."""
        trains_b = any(a.trains_b for a in shape.adapters)
        a = self.weight_grad_a and any(a.trains_a for a in shape.adapters)
        b = self.weight_grad_b and trains_b
        merged = self.merged_input_grad and shape.input_grad
        possible = {
            "none": True,
            "xa": trains_b and not b and not self.merged_forward and not shape.recomputed,
            "merged": self.merged_forward and merged and not shape.recomputed,
        }
        return Order(self.merged_forward, self.save if possible[self.save] else "none", a, b, merged)

    @property
    def merges(self) -> bool:
        """Whether W + cAB is ever formed."""
        return self.merged_forward or self.merged_input_grad

    def __str__(self) -> str:
        kept = {"none": "", "xa": ", XA saved", "merged": ", W+cAB saved"}[self.save]
        backward = _BACKWARD_NAMES[self.weight_grad_a, self.weight_grad_b, self.merged_input_grad]
        return f"forward{2 if self.merged_forward else 1} + {backward}{kept}"


AUTOGRAD = Order()
"""What PEFT's code and autograd compute."""

_BACKWARD_NAMES = {
    (False, False, False): "backward1",
    (False, True, False): "backward2",
    (True, True, False): "backward3",
    (True, True, True): "backward4",
    (False, False, True): "backward5",
    (True, False, False): "backward6",
    (False, True, True): "backward7",
    (True, False, True): "backward8",
}
"""As in the paper and, for the last three, in its code."""


def named_order(forward: str, backward: str) -> Order:
    """The paper's variant: nothing but X, W, A and B is saved.

    Raises:
        KeyError: an unknown name.
    """
    merged = {"forward1": False, "forward2": True}[forward]
    flags = {name: key for key, name in _BACKWARD_NAMES.items()}[backward]
    return Order(merged, "none", *flags)


@dataclass(frozen=True)
class AdapterShape:
    """Rank of an adapter, and which of its factors are trained."""

    rank: int
    trains_a: bool = True
    trains_b: bool = True


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer with adapters.

    Attributes:
        rows: t, rows of X: a number or an expression of `B`.
        inputs, outputs: i and o.
        adapters: at least one.
        input_grad: dX is needed.
        weight_grad: W is trained too, so that Z3 is computed anyway.
        itemsize: bytes per element.
        recomputed: the backward computes the layer's output a second time (activation checkpointing), so that nothing is saved.
    """

    rows: Any
    inputs: int
    outputs: int
    adapters: tuple[AdapterShape, ...]
    input_grad: bool = True
    weight_grad: bool = False
    itemsize: int = 4
    recomputed: bool = False

    def at(self, batch_size: int) -> LayerShape:
        """The sizes at a concrete batch size."""
        return self if isinstance(self.rows, int) else replace(self, rows=int(self.rows.subs(BATCH, batch_size)))


Product = tuple[Any, Any, Any]
"""m, k, n: an (m x k) by (k x n) matrix product, 2mkn FLOPs."""


def all_orders(shape: LayerShape) -> Iterator[Order]:
    """Every order that differs from the others in what it computes or keeps, autograd's first."""
    for forward, a, b, dx in product((False, True), repeat=4):
        saves: list[Save] = ["xa", "none", "merged"]
        for order in (Order(forward, save, a, b, dx) for save in saves):
            if order == order.for_layer(shape):
                yield order


def products(order: Order, shape: LayerShape) -> tuple[list[Product], list[Product]]:
    """The matrix products of forward and of backward."""
    t, i, o = shape.rows, shape.inputs, shape.outputs
    forward: list[Product] = [(t, i, o)]
    backward: list[Product] = []
    reads_z3 = any((a.trains_a and order.weight_grad_a) or (a.trains_b and order.weight_grad_b) for a in shape.adapters)
    if shape.weight_grad or reads_z3:
        backward.append((i, t, o))
    if shape.input_grad:
        backward.append((t, o, i))
    for adapter in shape.adapters:
        r = adapter.rank
        forward += [(i, r, o)] if order.merged_forward else [(t, i, r), (t, r, o)]
        separate_a = adapter.trains_a and not order.weight_grad_a
        separate_b = adapter.trains_b and not order.weight_grad_b
        separate_x = shape.input_grad and not order.merged_input_grad
        if separate_a or separate_x:
            backward.append((t, o, r))
        if separate_b and order.save != "xa" and (order.merged_forward or not shape.recomputed):
            backward.append((t, i, r))
        if adapter.trains_a:
            backward.append((i, t, r) if separate_a else (i, o, r))
        if adapter.trains_b:
            backward.append((r, t, o) if separate_b else (r, i, o))
        if separate_x:
            backward.append((t, r, i))
        elif shape.input_grad and not (order.merged_forward and (order.save == "merged" or shape.recomputed)):
            backward.append((i, r, o))
    return forward, (forward if shape.recomputed else []) + backward


def order_flops(order: Order, shape: LayerShape) -> Any:
    """FLOPs of forward and backward, 2 per multiply-add: a number, or an expression if `shape.rows` is one."""
    forward, backward = products(order, shape)
    return 2 * sum(m * k * n for m, k, n in forward + backward)


def saved_bytes(order: Order, shape: LayerShape) -> Any:
    """Bytes that the forward keeps beside X and the weights."""
    if order.save == "xa":
        return shape.rows * sum(a.rank for a in shape.adapters if a.trains_b) * shape.itemsize
    return shape.inputs * shape.outputs * shape.itemsize if order.save == "merged" else 0


def moved_bytes(order: Order, shape: LayerShape) -> Any:
    """Bytes that elementwise work reads and writes: adding up Y and dX, and forming W + cAB from a copy of W."""
    t, i, o = shape.rows, shape.inputs, shape.outputs
    runs = 2 if shape.recomputed else 1
    of_an_adapter = 0 if order.merged_forward else runs * 3 * t * o
    if shape.input_grad and not order.merged_input_grad:
        of_an_adapter += 3 * t * i
    kept = order.merged_forward and (order.save == "merged" or shape.recomputed)
    merges = runs * order.merged_forward + (order.merged_input_grad and not kept)
    return (len(shape.adapters) * of_an_adapter + merges * 2 * i * o) * shape.itemsize
