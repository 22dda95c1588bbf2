"""FLOPs and bytes of contraction orders against the paper's formulas (RunLoRA, table 1, with its erratum)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import sympy
from graphopt.passes.runlora.orders import (
    AUTOGRAD,
    AdapterShape,
    LayerShape,
    all_orders,
    named_order,
    order_flops,
    products,
    saved_bytes,
)
from hypothesis import given, strategies as st

t, i, o, r = sympy.symbols("t i o r", integer=True, positive=True)

BACKWARD = {
    "backward1": 2 * t * (2 * o * r + 3 * i * r + o * i),
    "backward2": 2 * t * (o * r + 2 * i * r + 2 * o * i) + 2 * i * o * r,
    "backward3": 2 * t * (o * r + i * r + 2 * o * i) + 4 * i * o * r,
    "backward4": 4 * t * o * i + 6 * i * o * r,
    "backward5": 2 * t * (2 * o * r + 2 * i * r + o * i) + 2 * i * o * r,
    "backward6": 2 * t * (2 * o * r + 2 * i * r + 2 * o * i) + 2 * i * o * r,
    "backward7": 2 * t * (o * r + i * r + 2 * o * i) + 4 * i * o * r,
    "backward8": 2 * t * (o * r + i * r + 2 * o * i) + 4 * i * o * r,
}
FORWARD = {"forward1": 2 * t * (i * o + i * r + r * o), "forward2": 2 * i * r * o + 2 * t * i * o}

sizes = st.integers(1, 5000)


def shape(rows: object = t, inputs: object = i, outputs: object = o, rank: object = r) -> LayerShape:
    return LayerShape(rows, inputs, outputs, (AdapterShape(rank),))  # type: ignore[arg-type]


@pytest.mark.parametrize("backward", BACKWARD)
@pytest.mark.parametrize("forward", FORWARD)
def test_flops_are_the_papers(forward: str, backward: str) -> None:
    found = order_flops(named_order(forward, backward), shape())
    assert sympy.expand(found - FORWARD[forward] - BACKWARD[backward]) == 0


def test_autograd_saves_xa_and_computes_it_once() -> None:
    assert sympy.expand(order_flops(AUTOGRAD, shape()) - 2 * t * (2 * i * o + 3 * i * r + 3 * o * r)) == 0


@given(sizes, sizes, sizes, sizes)
def test_the_papers_five_variants_are_never_beaten_by_the_other_three(rows: int, inputs: int, outputs: int, rank: int) -> None:
    costs = {n: order_flops(named_order("forward1", n), shape(rows, inputs, outputs, rank)) for n in BACKWARD}
    assert min(costs[f"backward{k}"] for k in range(1, 6)) == min(costs.values())


@given(sizes, sizes, sizes, sizes)
def test_crossovers(rows: int, inputs: int, outputs: int, rank: int) -> None:
    layer = shape(rows, inputs, outputs, rank)

    def cost(forward: str, backward: str) -> int:
        return int(order_flops(named_order(forward, backward), layer))

    assert (cost("forward2", "backward1") < cost("forward1", "backward1")) == (rows * (inputs + outputs) > inputs * outputs)
    assert (cost("forward1", "backward5") < cost("forward1", "backward1")) == (rows > outputs)
    assert (cost("forward1", "backward5") < cost("forward1", "backward2")) == (rank < inputs)
    fewer = rows * (2 * rank * (inputs + outputs) - inputs * outputs) > 2 * inputs * outputs * rank
    assert (cost("forward1", "backward4") < cost("forward1", "backward5")) == fewer


def test_unneeded_gradients_drop_their_products() -> None:
    frozen_b = LayerShape(t, i, o, (AdapterShape(r, trains_b=False),))  # type: ignore[arg-type]
    assert products(AUTOGRAD.for_layer(frozen_b), frozen_b)[1] == [(t, o, i), (t, o, r), (i, t, r), (t, r, i)]
    first = LayerShape(t, i, o, (AdapterShape(r),), input_grad=False)  # type: ignore[arg-type]
    assert products(AUTOGRAD.for_layer(first), first)[1] == [(t, o, r), (i, t, r), (r, t, o)]
    assert not any(order.merged_input_grad for order in all_orders(first))


def test_a_trained_weights_gradient_serves_the_adapter_too() -> None:
    layer = LayerShape(t, i, o, (AdapterShape(r),), weight_grad=True)  # type: ignore[arg-type]
    with_weight, without = (order_flops(named_order("forward2", "backward4"), s) for s in (layer, shape()))
    assert with_weight == without


@dataclass(frozen=True)
class Published:
    """A model of the paper's figures: tokens of a batch, width, width of the feed-forward, its products, layers, rank."""

    tokens: int
    width: int
    wide: int
    products: int
    layers: int
    rank: int

    @property
    def shapes(self) -> list[LayerShape]:
        """A block's linear layers: four projections, and a feed-forward of two products or, with a gate, of three."""
        up = [(self.width, self.wide)] * (self.products - 1)
        sizes = [(self.width, self.width)] * 4 + up + [(self.wide, self.width)]
        return [LayerShape(self.tokens, a, b, (AdapterShape(self.rank),), itemsize=2) for a, b in sizes]


PUBLISHED = {
    "llama-60m": (Published(64 * 1024, 512, 1376, 3, 8, 8), 0.012),
    "llama-250m": (Published(58 * 1024, 768, 2560, 3, 24, 128), 0.089),
    "llama-250m, rank 256": (Published(34 * 1024, 768, 2560, 3, 24, 256), 0.165),
    "llama-1.3b": (Published(24 * 1024, 2048, 5461, 3, 24, 512), 0.111),
    "roberta-base": (Published(64 * 512, 768, 3072, 2, 12, 128), 0.088),
    "roberta-large": (Published(64 * 512, 1024, 4096, 2, 24, 128), 0.070),
    "opt-350m": (Published(42 * 512, 1024, 4096, 2, 24, 128), 0.069),
    "vit-base": (Published(100 * 197, 768, 3072, 2, 12, 32), 0.027),
}
"""With the part of the linear layers' FLOPs that the chosen orders save (papers.md, 5.4)."""


@pytest.mark.parametrize(("name", "mebibytes"), [("llama-60m", 56), ("llama-250m", 2436), ("llama-1.3b", 4032)])
def test_xa_that_is_not_saved_takes_the_papers_memory(name: str, mebibytes: int) -> None:
    model, _ = PUBLISHED[name]
    assert model.layers * sum(saved_bytes(AUTOGRAD, shape) for shape in model.shapes) == mebibytes * 2**20


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_orders_that_the_paper_chooses_by_flops(name: str) -> None:
    """forward2 and backward5, but for the square layers of Llama-250m at rank 256: backward4."""
    model, saving = PUBLISHED[name]
    variants = [named_order(forward, backward) for forward in FORWARD for backward in BACKWARD]
    best = {shape: min(variants, key=lambda order: order_flops(order, shape)) for shape in model.shapes}
    for shape, order in best.items():
        square = shape.inputs == shape.outputs and model.rank == 256
        assert str(order) == f"forward2 + {'backward4' if square else 'backward5'}"
    chosen = sum(order_flops(best[shape], shape) for shape in model.shapes)
    autograds = sum(order_flops(AUTOGRAD, shape) for shape in model.shapes)
    assert 1 - chosen / autograds == pytest.approx(saving, abs=6e-4)
