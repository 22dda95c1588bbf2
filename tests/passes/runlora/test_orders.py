"""FLOPs and bytes of contraction orders against the paper's formulas (RunLoRA, table 1, with its erratum)."""

from __future__ import annotations

import pytest
import sympy
from graphopt.passes.runlora.orders import (
    AUTOGRAD,
    AdapterShape,
    LayerShape,
    all_orders,
    forward_crossover,
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
    assert (rows > forward_crossover(layer)) == (rows * (inputs + outputs) > inputs * outputs)
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


def test_xa_that_is_not_saved_is_4032_mib_in_the_papers_largest_case() -> None:
    """Llama-1.3b, 24 layers of 7 products, 24 x 1024 tokens, rank 512, bf16."""
    tokens, layers = 24 * 1024, 24
    shapes = [(2048, 2048)] * 4 + [(2048, 5461)] * 2 + [(5461, 2048)]
    total = sum(saved_bytes(AUTOGRAD, LayerShape(tokens, a, b, (AdapterShape(512),), itemsize=2)) for a, b in shapes)
    assert layers * total == 4032 * 2**20
