"""Reordered LoRA layers: found by structure, exact in every order, and left alone where reordering would be wrong."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, RunLora, run_pass
from graphopt.passes.runlora.choose import merge_errors
from graphopt.passes.runlora.orders import AUTOGRAD, all_orders, named_order, order_flops, saved_bytes as kept_bytes
from graphopt.passes.runlora.rewrite import legal_orders, refusal
from graphopt.passes.runlora.sites import find_lora_sites
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import graphopt
from graphopt import PassError
from graphopt.analysis.saved import saved_bytes
from graphopt.capture import capture
from graphopt.graph import TrainingGraph
from graphopt.testing import check_pass, compiled

MERGED = named_order("forward2", "backward5")


class Net(nn.Module):
    """Layers in a chain, and two that share an input, on inputs of two or three dimensions."""

    def __init__(self, bias: bool = True, first: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.below = nn.Linear(6, 8)
        self.left = nn.Linear(8, 5, bias=bias)
        self.right = nn.Linear(8, 5, bias=not bias)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        return self.last(torch.tanh(self.left(x)) * self.right(x)).square().sum()


def adapted(model: nn.Module, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    config.setdefault("target_modules", ["below", "left", "right"])
    model = get_peft_model(model, LoraConfig(**{"r": 2, "lora_alpha": 6, **config}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return model


def joint(model: nn.Module, *args: Tensor) -> TrainingGraph:
    return capture(model, args)


def batch(rows: int = 4, dims: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 7, 6) if dims == 3 else torch.randn(rows, 6)


@functools.cache
def captured(dtype: torch.dtype) -> TrainingGraph:
    return joint(adapted(Net()).to(dtype), batch().to(dtype))


ORDERS = legal_orders(find_lora_sites(captured(torch.float32)).layers[1])


def test_all_orders_are_found() -> None:
    assert len(ORDERS) == 2 * 8 + 4 + 4  # with XA saved where the backward reads it, or W + cAB where both halves do
    assert ORDERS[0] == AUTOGRAD


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order_gives_autograds_gradients_with_the_predicted_flops_and_bytes(order: Any) -> None:
    model, x = adapted(Net()), batch()
    dtypes = [torch.float64, torch.float32] if order in ORDERS[::6] else [torch.float64]  # others would round the same in float32
    graphs = {dtype: captured(dtype) for dtype in dtypes}
    layers = find_lora_sites(graphs[torch.float64]).layers
    assert len(layers) == 3
    for check in check_pass(RunLora(order), model, (x,), [layer.name for layer in layers], captured=graphs, dtypes=dtypes):
        shapes = [layer.shape.at(len(x)) for layer in layers]
        change = sum(order_flops(order.for_layer(s), s) - order_flops(AUTOGRAD.for_layer(s), s) for s in shapes)
        assert check.counted_flops == check.report.step_flops_before + change


@settings(max_examples=8, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    bias=st.booleans(),
    dims=st.sampled_from([2, 3]),
    rank=st.sampled_from([1, 2, 9]),
    trains=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    rows=st.integers(2, 5),
)
def test_orders_are_exact_for_any_shape_and_any_frozen_part(
    order: Any, bias: bool, dims: int, rank: int, trains: tuple[bool, bool, bool], rows: int
) -> None:
    model = adapted(Net(bias), r=rank)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "left.base_layer.weight" in name:
            parameter.requires_grad_(trains[0] if "lora_A" in name else trains[1] if "lora_B" in name else trains[2])
    graph = joint(model.double(), batch(rows, dims).double())
    names = [layer.name for layer in find_lora_sites(graph).layers]
    exact = {"dtypes": [torch.float64], "captured": {torch.float64: graph}}
    check_pass(RunLora(order), model, (batch(rows, dims),), names, **exact)


def test_half_precision_agrees_to_its_rounding() -> None:
    model, x = adapted(Net()).to(torch.bfloat16), batch().to(torch.bfloat16)
    reference = copy.deepcopy(model).double()
    reference(x.double()).backward()
    graph, _ = run_pass(RunLora(MERGED), joint(model, x), ["base_model.model.left.base_layer.weight"])
    compiled(graph, model, (x,), {}, "aot_eager")()[0].backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None
            assert float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < 2e-2


def test_not_saving_xa_saves_exactly_its_bytes() -> None:
    graph = joint(adapted(Net()), batch())
    rewritten, report = run_pass(RunLora(MERGED), graph, [layer.name for layer in find_lora_sites(graph).layers])
    assert report.saved_bytes_before - report.saved_bytes_after == 3 * 4 * 7 * 2 * 4  # three layers, 28 rows, rank 2, float32
    after, before = (saved_bytes(replace(of, batch_size=64)) for of in (rewritten, graph))
    assert after == before - 3 * 64 * 7 * 2 * 4


def test_a_shape_of_the_papers_largest_model_keeps_168_mib_less_per_layer() -> None:
    """Llama-1.3b, one layer, without weights: 7 products, 24 x 1024 tokens, rank 512, bf16."""
    from transformers import LlamaConfig, LlamaModel

    with torch.device("meta"):
        config = LlamaConfig(
            hidden_size=2048, intermediate_size=5461, num_hidden_layers=2, num_attention_heads=32, vocab_size=64, use_cache=False
        )
        model = get_peft_model(LlamaModel(config), LoraConfig(r=512, target_modules="all-linear")).to(torch.bfloat16)
        ids = torch.zeros(24, 1024, dtype=torch.long)
    graph = graphopt.analyze(model, {"input_ids": ids}).graph
    layers = find_lora_sites(graph).layers
    assert len(layers) == 14
    upper = [layer.name for layer in layers if ".layers.1." in layer.name]
    _, report = run_pass(RunLora(MERGED), graph, upper)
    assert report.saved_bytes_before - report.saved_bytes_after == 168 * 2**20


class Conv1d(nn.Module):
    """GPT-2's linear layer: the weight is stored (inputs x outputs)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.below, self.left = nn.Linear(6, 8), Conv1D(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(torch.relu(self.below(x))).square().sum()


def test_weights_stored_the_other_way_round() -> None:
    model = adapted(Conv1d(), target_modules=["left"], fan_in_fan_out=True)
    check_pass(RunLora(MERGED), model, (batch(),), ["base_model.model.left.base_layer.weight"])


def test_rank_stabilised_scaling() -> None:
    model = adapted(Net(), use_rslora=True)
    check_pass(RunLora(MERGED), model, (batch(),), ["base_model.model.left.base_layer.weight"], dtypes=[torch.float64])


class Scaled(nn.Module):
    """An adapter of one's own, scaled before and between its factors, and added from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.base = nn.Linear(6, 8), nn.Linear(8, 5)
        self.down, self.up = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        return (((x * 0.5) @ self.down / 4 @ self.up) + self.base(x)).square().sum()


@pytest.mark.parametrize("order", [MERGED, named_order("forward1", "backward4")], ids=str)
def test_scaling_in_any_position(order: Any) -> None:
    graph = joint(Scaled(), batch())
    (layer,) = find_lora_sites(graph).layers
    assert layer.adapters[0].scale == 0.125
    check_pass(RunLora(order), Scaled(), (batch(),), [layer.name], dtypes=[torch.float64])


def test_several_adapters_on_one_layer() -> None:
    model = adapted(Net())
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=3, target_modules=["left", "right"]))
    model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.5)
            parameter.requires_grad_(True)
    layers = find_lora_sites(joint(model, batch())).layers
    assert [[a.rank for a in layer.shape.adapters] for layer in layers] == [[2], [2, 3], [2, 3]]
    for order in (MERGED, named_order("forward2", "backward4"), named_order("forward1", "backward7")):
        check_pass(RunLora(order), model, (batch(),), [layer.name for layer in layers], dtypes=[torch.float64])


def test_dropout_forbids_merging() -> None:
    graph = joint(adapted(Net(), lora_dropout=0.5), batch())
    layers = find_lora_sites(graph).layers
    assert all("dropout" in layer.unmergeable for layer in layers)
    for layer in layers:
        assert {str(order) for order in legal_orders(layer)} == {"forward1 + backward1, XA saved", "forward1 + backward1"}
    for wrong in (MERGED, named_order("forward1", "backward3")):
        with pytest.raises(PassError, match="dropout"):
            run_pass(RunLora(wrong), graph, [layers[0].name])


class OwnInput(Scaled):
    """The adapter reads something else than the layer, as with dropout, but the same every time; W is trained too."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        return (self.base(x) + torch.relu(x) * 0.5 @ self.down @ self.up).square().sum()


def test_an_adapter_with_an_input_of_its_own_keeps_its_gradients() -> None:
    model, x = OwnInput(), batch()
    graph = joint(copy.deepcopy(model).double(), x.double())
    (layer,) = find_lora_sites(graph).layers
    assert not layer.shares_input
    for order in legal_orders(layer):
        check_pass(RunLora(order), model, (x,), [layer.name], dtypes=[torch.float64], captured={torch.float64: graph})


@pytest.mark.parametrize("order", ORDERS[1::4], ids=str)
def test_square_layers_are_not_confused(order: Any) -> None:
    """Rows, inputs, outputs and rank are all equal: only what is transposed tells the products apart."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.base = nn.Linear(4, 4), nn.Linear(4, 4)
            self.down, self.up = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.below(x))
            return (self.base(x) + 2 * (x @ self.down @ self.up)).square().sum()

    x = torch.randn(4, 4)
    (layer,) = find_lora_sites(joint(Square(), x)).layers
    check_pass(RunLora(order), Square(), (x,), [layer.name], dtypes=[torch.float64])


class Dora(Scaled):
    """As PEFT's DoRA: the chain and the layer's own product are scaled per output."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        weight = self.base.weight + (self.down @ self.up).t()
        scale = self.base.weight.norm(dim=1) / weight.norm(dim=1).detach()
        base = self.base(x)
        return (base + (scale - 1) * base + scale * (x @ self.down @ self.up)).square().sum()


def test_dora_is_left_alone() -> None:
    sites = find_lora_sites(joint(Dora(), batch()))
    assert not sites.layers
    assert len(sites.left_alone) == 1
    assert all("DoRA" in reason for reason in sites.left_alone.values())


def test_a_bias_in_the_adapter_is_left_alone() -> None:
    sites = find_lora_sites(joint(adapted(Net(), lora_bias=True), batch()))
    assert not sites.layers
    assert set(sites.left_alone.values()) == {"the adapter has a bias of its own"}


class Other(nn.Module):
    """A table and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.filter, self.last = nn.Embedding(9, 6), nn.Conv1d(6, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.filter(self.table(x).transpose(1, 2)).transpose(1, 2)).square().sum()


def test_adapters_of_tables_and_convolutions_are_reported_as_left_alone() -> None:
    model = adapted(Other(), target_modules=["table", "filter"])
    sites = find_lora_sites(joint(model, torch.randint(0, 9, (4, 7))))
    assert not sites.layers
    reasons = " ".join(sites.left_alone.values())
    assert "embeddings" in reasons
    assert "convolutions" in reasons


def test_a_layer_whose_result_is_used_twice_is_not_merged() -> None:
    class Twice(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.below(x))
            base = self.base(x)
            return (base + x @ self.down @ self.up).square().sum() + base.sum()

    sites = find_lora_sites(joint(Twice(), batch()))
    assert not sites.layers
    assert len(sites.left_alone) == 1


def test_merging_in_half_precision_waits_until_the_adapter_is_large_enough() -> None:
    model = adapted(Net()).to(torch.bfloat16)
    x = batch().to(torch.bfloat16)
    opt = graphopt.optimize(model, (x,), passes=[RunLora(criterion="flops")], backend="aot_eager")
    graph = opt.graph
    tensors = dict(model.named_parameters())
    assert all(error < 0.1 for error in merge_errors(graph, tensors).values())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-4)
    assert all(error > 0.1 for error in merge_errors(graph, tensors).values())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert set(merge_errors(graph, tensors).values()) == {1.0}
    opt(x).backward()
    before = [a["order"] for a in opt.report.sections["runlora"]["adapters"]]
    assert opt.recheck_merges()
    opt(x).backward()
    after = [a["order"] for a in opt.report.sections["runlora"]["adapters"]]
    assert any("forward2" in order for order in before)
    assert not any("forward2" in order for order in after)
    assert not opt.recheck_merges()


def test_another_batch_size_picks_anew_without_a_trace() -> None:
    model = adapted(Net())
    opt = graphopt.optimize(model, (batch(4, 2),), passes=[RunLora(criterion="flops")], backend="aot_eager")
    orders = {}
    for rows in (2, 50):
        opt(batch(rows, 2)).backward()
        orders[rows] = [a["order"] for a in opt.report.sections["runlora"]["adapters"]]
    assert opt.report.captures == 1
    assert all("forward1" in order for order in orders[2])
    assert all("forward2" in order for order in orders[50])


def test_with_a_cut_and_with_checkpointing() -> None:
    model = adapted(Net())
    graph = joint(model, batch())
    kept = [p.name for p in graph.trainable if "right" in p.name]
    cut, _ = run_pass(GreenTrainer(), graph, kept)
    layers = find_lora_sites(cut).layers
    trained = [(a.trains_a, a.trains_b) for layer in layers for a in layer.shape.adapters]
    assert trained == [(False, False), (False, False), (True, True)]
    rewritten, _ = run_pass(RunLora(MERGED), cut, [layer.name for layer in layers])
    reference = copy.deepcopy(model)
    reference(batch()).backward()
    compiled(rewritten, model, (batch(),), {}, "aot_eager")()[0].backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name in kept:
            torch.testing.assert_close(ours.grad, theirs.grad)
        else:
            assert ours.grad is None

    names = [layer.name for layer in find_lora_sites(joint(adapted(Checkpointed()), batch())).layers]
    assert len(names) == 3
    check_pass(RunLora(MERGED), adapted(Checkpointed()), (batch(),), names, dtypes=[torch.float64])


class Checkpointed(Net):
    """The net, with all but its input computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        run = super().forward
        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_what_checkpointing_computes_twice_counts_twice() -> None:
    graph = joint(adapted(Checkpointed()), batch())
    layers = find_lora_sites(graph).layers
    assert {layer.shape.recomputed for layer in layers} == {True}
    shapes = [layer.shape.at(graph.batch_size) for layer in layers]
    assert all(kept_bytes(o, shape) == 0 for shape in shapes for o in all_orders(shape))
    autograd = sum(order_flops(AUTOGRAD.for_layer(shape), shape) for shape in shapes)
    for order in all_orders(shapes[0]):
        if all(refusal(layer, order) == "" for layer in layers):
            rewritten, report = run_pass(RunLora(order), graph, [layer.name for layer in layers])
            predicted = sum(order_flops(order.for_layer(shape), shape) for shape in shapes) - autograd
            assert report.step_flops_after - report.step_flops_before == predicted, order


@pytest.mark.parametrize("order", [AUTOGRAD, MERGED, named_order("forward1", "backward1")], ids=str)
def test_adapters_of_one_input_share_a_product(order: Any) -> None:
    model, x = adapted(Net()), batch()
    graph = joint(model, x)
    names = [layer.name for layer in find_lora_sites(graph).layers]
    rewritten, report = run_pass(RunLora(order), graph, names)
    products = [n for n in rewritten.graph.nodes if n.target is torch.ops.aten.mm.default]
    shared = [n for n in products if tuple(n.meta["val"].shape)[1] == 4 and n.args[1].target is torch.ops.aten.cat.default]
    assert len(shared) == 1
    assert {"base_model.model.left.base_layer.weight", "base_model.model.right.base_layer.weight"} <= set(report.changes.changed)
    check_pass(RunLora(order), model, (x,), names)


def test_orders_have_the_papers_names() -> None:
    assert RunLora("forward2 + backward5").fixed_order == MERGED
    for wrong in ("forward3+backward1", "forward1", "forward1+backward9", 5):
        with pytest.raises(PassError, match="forward1 or forward2"):
            RunLora(wrong)  # type: ignore[arg-type]
    with pytest.raises(PassError, match="criterion='speed' is unknown. Use one of time, flops"):
        RunLora(criterion="speed")


def test_an_unknown_layer_is_refused() -> None:
    with pytest.raises(PassError, match="nowhere"):
        run_pass(RunLora(), joint(adapted(Net()), batch()), ["nowhere"])


def test_auto_reorders_and_says_what_it_did() -> None:
    model, x = adapted(Net()), batch(64)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    reference = copy.deepcopy(model)
    opt(x).backward()
    reference(x).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert opt.report.passes == ["runlora"]
    assert len(opt.report.sections["runlora"]["adapters"]) == 3
    assert "adapters" in str(opt.report)
    assert opt.report.to_dict()["sections"]["runlora"]["adapters"][0]["flops_before"] > 0
    assert graphopt.optimize(Net(), (x,), backend="aot_eager").report.passes == []
