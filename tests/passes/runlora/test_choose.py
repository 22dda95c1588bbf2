"""Choosing orders: never costlier than any listed variant, and by times that are measured once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import RunLora
from graphopt.passes.runlora import choose as contraction
from graphopt.passes.runlora.choose import TOLERABLE, Choice, choose_orders, merge_errors
from graphopt.passes.runlora.layers import LoraSites
from graphopt.passes.runlora.orders import AUTOGRAD, LayerShape, Order, named_order, order_flops, saved_bytes
from graphopt.passes.runlora.rewrite import legal_orders
from graphopt.passes.runlora.sites import find_lora_sites
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import graphopt
from graphopt.capture import capture
from graphopt.graph import TrainingGraph
from graphopt.planner.product_times import ProductTimes, product_times
from tests import zoo

NAMES = [(f"forward{f}", f"backward{b}") for f in (1, 2) for b in range(1, 9)]


GRAPH = capture(zoo.Adapted(), (torch.randn(5, 4),))
SITES = find_lora_sites(GRAPH)


class Linear:
    """A machine whose time for a product is its FLOPs, or something else."""

    bandwidth = 1e30
    peak = 1.0

    def __init__(self, seconds: Any = lambda m, k, n: 2.0 * m * k * n) -> None:
        self.product = seconds


def choose(monkeypatch: Any, shape: LayerShape, times: Any = None, criterion: str = "flops") -> Choice:
    layer = replace(SITES.layers[0], shape=shape)
    monkeypatch.setattr(contraction, "lora_sites", lambda _: LoraSites((layer,)))
    (choice,) = choose_orders(GRAPH, 1, RunLora(criterion=criterion), {}, lambda *_: times).values()
    return choice


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 3000), st.booleans(),
)  # fmt: skip
def test_the_choice_is_never_costlier_than_a_listed_variant(t: int, i: int, o: int, r: int, input_grad: bool) -> None:
    shape = replace(
        SITES.layers[0].shape, rows=t, inputs=i, outputs=o, adapters=(replace(SITES.layers[0].shape.adapters[0], rank=r),),
        input_grad=input_grad,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        choice = choose(patch, shape)
        timed = choose(patch, shape, Linear(), "time")
    listed = [named_order(*names).for_layer(shape) for names in NAMES] + [AUTOGRAD.for_layer(shape)]
    assert all(choice.flops_after <= order_flops(order, shape) for order in listed)
    assert choice.saved_after <= choice.saved_before
    assert timed.flops_after == choice.flops_after
    assert timed.seconds_after is not None
    assert timed.seconds_before is not None
    assert timed.seconds_after <= timed.seconds_before


def test_time_decides_where_it_differs_from_flops(monkeypatch: Any) -> None:
    shape = SITES.layers[0].shape.at(64)
    slow_thin = choose(monkeypatch, shape, Linear(lambda m, k, n: 2.0 * m * k * n + (1e9 if m == 64 and n == 2 else 0)), "time")
    assert slow_thin.order.merged_forward
    assert slow_thin.order.weight_grad_a
    assert slow_thin.order.merged_input_grad


def test_nothing_is_merged_where_rounding_would_lose_the_adapter() -> None:
    name = SITES.layers[0].name
    merged = choose_orders(GRAPH, 64, RunLora(criterion="flops"), {}, lambda *_: None)[name]
    kept = choose_orders(GRAPH, 64, RunLora(criterion="flops"), {name: 0.5}, lambda *_: None)[name]
    assert merged.order.merges
    assert not kept.order.merges
    assert "lose 50%" in kept.why
    forced = choose_orders(GRAPH, 64, RunLora("forward2+backward5"), {name: 0.5}, lambda *_: None)[name]
    assert forced.order == AUTOGRAD


class InTF32(TorchDispatchMode):
    """Products round their factors to 10 bits of the fraction, as on a GPU with `allow_tf32`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[0].dtype == torch.float32:
            args = [((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32) for x in args]
        return func(*args, **(kwargs or {}))


def test_nothing_is_merged_where_products_in_tf32_would_lose_the_adapter() -> None:
    torch.manual_seed(0)
    model = zoo.Adapted()
    tensors = dict(model.named_parameters())
    assert merge_errors(GRAPH, tensors) == {}
    with InTF32():
        assert merge_errors(GRAPH, tensors)[SITES.layers[0].name] < TOLERABLE
        with torch.no_grad():
            model.up.mul_(1e-4)
        small = merge_errors(GRAPH, tensors)
        name = SITES.layers[0].name
        x = torch.randn(64, 8)
        weight, change = model.base.weight.T, model.down @ model.up
        lost = (x @ (weight + change) - x @ weight - x @ change).norm() / (x @ change).norm()
        assert small[name] == pytest.approx(lost.item(), rel=0.2)
    assert not choose_orders(GRAPH, 64, RunLora(criterion="flops"), small, lambda *_: None)[name].order.merges
    assert merge_errors(GRAPH, tensors) == {}


class FromConstants(zoo.Adapted):
    """The layer's weight is a tensor that is neither parameter nor buffer, with rows that another picks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.order = torch.randn(9, 6), torch.arange(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.below(x))
        return (x @ self.table[self.order] + x @ self.down @ self.up).square().sum()


def test_a_weight_that_is_computed_of_constants_is_compared_too() -> None:
    torch.manual_seed(0)
    model, x = FromConstants(), torch.randn(64, 4)
    graph, tensors = capture(model, (x,)), dict(model.named_parameters())
    (layer,) = find_lora_sites(graph).layers
    assert merge_errors(graph, tensors) == {}
    with InTF32():
        assert 0 < merge_errors(graph, tensors)[layer.name] < TOLERABLE
    loss = graphopt.optimize(model, (x,), backend="aot_eager")(x)
    torch.testing.assert_close(loss, model(x))


def test_a_layer_whose_weight_is_not_known_beforehand_is_not_merged() -> None:
    with InTF32():
        errors = merge_errors(GRAPH, {})
    assert merge_errors(GRAPH, {}) == {}
    (choice,) = choose_orders(GRAPH, 64, RunLora(criterion="flops"), errors, lambda *_: None).values()
    assert not choice.order.merges
    assert "cannot be computed before a step" in choice.why


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_merging_loses_is_measured_outside_the_callers_autocast(dtype: torch.dtype) -> None:
    model = zoo.Adapted().to(dtype)
    graph, tensors = capture(model, (torch.randn(5, 4, dtype=dtype),)), dict(model.named_parameters())
    expected = merge_errors(graph, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert merge_errors(graph, tensors) == expected


def test_all_legal_orders_keep_to_what_the_layer_needs() -> None:
    graph: TrainingGraph = GRAPH
    assert graph.symbolic
    layer = SITES.layers[0]
    assert all(order == order.for_layer(layer.shape) for order in legal_orders(layer))
    assert saved_bytes(Order(save="none"), layer.shape) == 0


def test_times_are_measured_once_and_kept(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "deep" / "times.json"
    first = ProductTimes(torch.device("cpu"), torch.float32, path)
    seconds = first.product(16, 8, 4)
    assert seconds > 0
    assert first.bandwidth > 1e6
    assert first.peak > 1e6
    monkeypatch.setattr(torch, "mm", None)
    assert ProductTimes(torch.device("cpu"), torch.float32, path).product(16, 8, 4) == seconds
    with pytest.raises(TypeError):
        ProductTimes(torch.device("cpu"), torch.float64, path).product(16, 8, 4)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1}', "{"])
def test_a_spoilt_file_of_times_is_measured_again(text: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    assert ProductTimes(torch.device("cpu"), torch.float32, path).product(4, 4, 4) > 0
    assert ProductTimes(torch.device("cpu"), torch.float32, path)._known


def test_a_place_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert ProductTimes(torch.device("cpu"), torch.float32, tmp_path / "file" / "times.json").product(4, 4, 4) > 0


def test_measuring_leaves_the_random_numbers_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    ProductTimes(torch.device("cpu"), torch.float32, tmp_path / "times.json").product(4, 4, 4)
    assert torch.equal(torch.rand(3), expected)


def test_nothing_is_measured_on_the_meta_device() -> None:
    assert product_times(torch.device("meta"), torch.float32) is None
