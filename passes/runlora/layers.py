"""What is known of a layer with low-rank adapters in a joint graph."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphopt.passes.runlora.orders import LayerShape
from torch import fx


@dataclass(frozen=True)
class Gradient:
    """A product in the backward of an adapter.

    Attributes:
        node: the product.
        transposed: it gives the transpose of what its name says.
        scale: its value is this number times the product of X, A, B and dY as the layer's products take them.
    """

    node: fx.Node
    transposed: bool
    scale: float


@dataclass(frozen=True)
class Adapter:
    """One chain c(XA)B of a layer.

    Attributes:
        name: of the parameter that A comes from.
        first, second: the products XA and (XA)B.
        total, chained: the addition of the chain to the layer, and its other summand.
        scale: c, where A and B are the operands of `first` and `second`.
        grad_a, grad_b: dA, dB; None if the factor is frozen.
        grad_input: Z1 A', with Z1 = dY B'; None if X needs no gradient.
        input_summed: `grad_input` is added, as it is, to the layer's own dY W'.
    """

    name: str
    first: fx.Node
    second: fx.Node
    total: fx.Node
    chained: fx.Node
    scale: float
    grad_a: Gradient | None = None
    grad_b: Gradient | None = None
    grad_input: Gradient | None = None
    input_summed: bool = False


@dataclass(frozen=True)
class LoraLayer:
    """A layer with adapters in a joint graph.

    Attributes:
        name: of the parameter that W comes from; the second layer with it, and all later ones, get a number.
        base: the product XW, with its bias if it has one.
        adapters: at least one, in the order in which they are added.
        grad_output: what dY is a multiple of, with rows that are not flattened; None if nothing needs it.
        grad_input: the product dY W'; None if X needs no gradient.
        grad_weight: the product that gives dW or its transpose; None if W is frozen.
        shape: sizes, with rows as an expression of `B`.
        unmergeable: why W + cAB must not be formed; "" if it may.
        shares_input: every adapter reads the layer's own X, so that X'dY serves them all.
    """

    name: str
    base: fx.Node
    adapters: tuple[Adapter, ...]
    grad_output: fx.Node | None
    grad_input: fx.Node | None
    grad_weight: Gradient | None
    shape: LayerShape
    unmergeable: str = ""
    shares_input: bool = True


@dataclass(frozen=True)
class LoraSites:
    """What was found.

    Attributes:
        layers: those that can be reordered.
        left_alone: reason by name for what looks like an adapter and is not part of such a layer.
    """

    layers: tuple[LoraLayer, ...]
    left_alone: dict[str, str] = field(default_factory=dict)
