import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Recompute, run_pass
from hypothesis import given, settings, strategies as st
from torch import Tensor, _higher_order_ops as control_flow, fx, nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt import InputError
from graphopt.analysis.flop_formulas import ADDED_FORMULAS, node_flops
from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.analysis.segments import find_segments
from graphopt.bench.cpu_formulas import cpu_formulas
from graphopt.capture import capture, capture_to_run
from graphopt.graph import BATCH, TrainingGraph
from graphopt.testing import check_passes
from tests import zoo
from tests.passes.dead_rows.test_technique import WIDTH, Classifier, first_row


def mlp_profile(batch: int = 4) -> FlopProfile:
    model, inputs = zoo.make("mlp", batch)
    return graphopt.analyze(model, inputs).flops  # type: ignore[return-value]


def test_rows_of_a_toy_are_what_the_paper_says() -> None:
    rows = {t.name: (t.shape, t.weight_grad_flops, t.input_grad_flops) for t in mlp_profile().tensors}
    first, second, third = 2 * 4 * 5 * 8, 2 * 4 * 8 * 8, 2 * 4 * 8 * 3
    assert rows == {
        "first.weight": ((8, 5), first, 0),  # nothing below it needs the gradient
        "first.bias": ((8,), 0, 0),
        "second.weight": ((8, 8), second, second),
        "second.bias": ((8,), 0, 0),
        "third.weight": ((3, 8), third, third),
        "third.bias": ((3,), 0, 0),
    }


def test_formulas_are_linear_in_the_batch_and_evaluate_to_integers() -> None:
    profile = mlp_profile()
    assert profile.formulas["step"] == profile.step // 4 * BATCH
    assert profile.at(64).step == 16 * profile.step
    assert isinstance(profile.at(64).step, int)
    assert profile.order[0].startswith("third")
    assert profile.order[-1].startswith("first")
    with pytest.raises(InputError, match="at least 1"):
        profile.at(0)


def test_cost_of_nothing_everything_and_nonsense() -> None:
    profile = mlp_profile()
    assert profile.cost([]) == 0
    assert profile.cost(profile.order) == profile.backward
    with pytest.raises(InputError, match="nonsense"):
        profile.cost(["nonsense"])


@functools.cache
def classifier_graph() -> TrainingGraph:
    """Of embedded tokens, a transformer's block, and a head that reads the first of its rows."""
    return capture(nn.Sequential(nn.Embedding(zoo.VOCABULARY, WIDTH), Classifier(first_row)), (zoo.tokens(4),))


@given(st.sets(st.integers(0, 18), min_size=1))
@settings(deadline=None, max_examples=12)
def test_cost_of_a_selection_is_the_flops_of_the_cut_graph(chosen: set[int]) -> None:
    graph = classifier_graph()
    profile = flop_profile(graph)
    names = {profile.order[i] for i in chosen}
    rewritten, _ = run_pass(GreenTrainer(), graph, names)
    assert flop_profile(rewritten).backward == profile.cost(names)


def test_one_convolution_gradient_can_be_dropped_without_the_other() -> None:
    model, inputs = zoo.make("cnn", 4)
    profile = graphopt.analyze(model, inputs).flops
    rows = {t.name: t for t in profile.tensors}
    assert rows["features.4.weight"].weight_grad_flops > 0
    assert rows["features.4.weight"].input_grad_flops > 0
    assert rows["features.0.weight"].input_grad_flops == 0
    assert profile.cost(["features.1.weight"]) < profile.cost(["features.1.weight", "features.4.weight"])


def test_parallel_projections_do_not_pay_for_each_other() -> None:
    profile = flop_profile(classifier_graph())
    q, k = (f"1.blocks.0.{name}.weight" for name in ("query", "key"))
    rows = {t.name: t for t in profile.tensors}
    assert profile.cost([q, k]) - profile.cost([q]) == rows[k].weight_grad_flops


class Products(nn.Module):
    """Matrix-vector products and an inner product, which torch's registry does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        products = torch.addbmm(x.new_ones(2, 2), x.view(4, 2, 3), self.weight.view(1, 3, 2).expand(4, 3, 2))
        return (torch.mv(x, self.weight) * 2).sum() + torch.dot(self.weight, self.weight) + products.sum()


def test_operators_that_torch_does_not_count_are_counted() -> None:
    flops = graphopt.analyze(Products(), (torch.randn(4, 6),), backend="aot_eager").flops
    assert flops.forward == 2 * 4 * 6 + 2 * 6 + 2 * 4 * 2 * 3 * 2
    assert flops.backward == 2 * 4 * 6 + 2 * 4 * 2 * 3 * 2


class Branches(nn.Module):
    """One product in one branch, two in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.below(x)
        once, twice = lambda h: self.inner(h).relu(), lambda h: self.inner(self.inner(h)).sin()
        return torch.cond(h.sum() > 0, once, twice, (h,)).square().mean()


def test_a_condition_costs_what_its_dearest_branch_does() -> None:
    flops = graphopt.analyze(Branches(), (torch.randn(4, 8),), backend="aot_eager").flops
    product = 2 * 4 * 8 * 8
    assert flops.forward == 3 * product
    # The branch computes both products again, then two gradients of each; the weight below has its own alone.
    assert flops.backward == (2 + 4 + 1) * product
    assert flops.formulas["forward"] == 3 * product // 4 * BATCH


class Slices(nn.Module):
    """A product for each of four rows."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.below, self.inner, self.run = nn.Linear(8, 8), nn.Linear(8, 8), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.inner, self.below(x)).square().mean()


def _mapped(layer: nn.Module, h: Tensor) -> Tensor:
    return control_flow.map(lambda row: layer(row), h)


def _scanned(layer: nn.Module, h: Tensor) -> Tensor:
    return control_flow.scan(lambda carried, row: ((carried + layer(row)).tanh(), row.clone()), torch.zeros(3, 8), h)[0]


@pytest.mark.parametrize("run", [_mapped, _scanned])
def test_a_loop_costs_what_all_its_slices_do(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    flops = flop_profile(capture(Slices(run), (torch.randn(4, 3, 8),), symbolic=False))
    product = 2 * 4 * 3 * 8 * 8
    assert flops.forward == 2 * product
    assert flops.backward == 3 * product  # two gradients within the loop, and the weight's below


def test_flex_attention_is_counted_as_torch_counts_it() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    for node in nodes:
        node.meta["val"] = torch.empty(2, 3, 16, 8)
    block = graph.get_attr("sdpa_score")
    node = graph.call_function(flex_attention, (*nodes, block))
    node.meta["val"] = (torch.empty(2, 3, 16, 8),)
    assert node_flops(node) == 2 * (2 * 2 * 3 * 16 * 16 * 8)
    node.target = torch.ops.higher_order.cond  # without a module, its branches are unknown
    assert node_flops(node) == 0


@pytest.mark.parametrize(
    ("layer", "forward"),
    [(lambda h: nn.functional.bilinear(h, h, torch.ones(3, 8, 8)), 2 * 30 * 3 * 8 * 8),
     (lambda h: torch.cdist(h, h), 2 * 30 * 30 * (8 + 2))],
)  # fmt: skip
def test_products_within_one_operator_are_counted(layer: Callable[[Tensor], Tensor], forward: int) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return layer(self.below(x)).mean()

    model, x = Layers(), torch.randn(30, 8)
    flops = graphopt.analyze(model, (x,), backend="aot_eager").flops
    assert flops.forward == 2 * 30 * 8 * 8 + forward
    with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
        model(x).backward()
    assert flops.step == counter.get_total_flops()


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_convolutions_are_counted_once_whatever_their_groups(kind: Any, groups: int) -> None:
    """A place of the kernel multiplies each input with the outputs of its group; FlopCounterMode is right for one group."""
    layer, x = kind(4, 8, 3, stride=2, groups=groups), torch.randn(2, 4, *[9] * (1 if kind is nn.Conv1d else 2))
    x.requires_grad_()
    places = x if kind is nn.ConvTranspose2d else layer(x)
    once = 2 * 2 * places[0, 0].numel() * 3 ** (x.dim() - 2) * 4 * 8 // groups
    with (
        FlopCounterMode(display=False) as plain,
        FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as ours,
        FlopCounterMode(display=False, custom_mapping=cpu_formulas()) as apart,
    ):
        layer(x).square().sum().backward()
    assert ours.get_total_flops() == apart.get_total_flops() == 3 * once
    assert plain.get_total_flops() == (2 + groups) * once
    model = nn.Sequential(layer, nn.Flatten(), Summed())
    flops = flop_profile(capture(model, (x,), symbolic=False))
    assert (flops.forward, flops.backward) == (once, 2 * once)
    assert flops.cost(["0.bias"]) == once  # the gradient of the input
    x.requires_grad_(False)
    flops = flop_profile(capture(model, (x,), symbolic=False))
    assert (flops.forward, flops.backward) == (once, once)


class Summed(nn.Module):
    """A loss of any output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


def test_products_of_experts_are_counted_whoever_multiplies_them() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    ids, found = torch.randint(0, 50, (2, 8)), {}
    for experts in ("grouped_mm", "batched_mm"):
        model = MixtralForCausalLM(config)
        model.set_experts_implementation(experts)
        found[experts] = flop_profile(capture(model, (), {"input_ids": ids, "labels": ids}, symbolic=False)).step
        with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        assert found[experts] == counter.get_total_flops()
    assert found["grouped_mm"] == found["batched_mm"]


def test_unknown_cost_mode() -> None:
    model, inputs = zoo.make("mlp", 4)
    with pytest.raises(InputError, match="paper"):
        graphopt.analyze(model, inputs, cost="guess")  # type: ignore[arg-type]


def test_an_inputs_gradient_is_counted_in_a_batch_that_is_repeated() -> None:
    x = torch.randn(1, 8, requires_grad=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model.forward = lambda x: nn.Sequential.forward(model, x).sum()  # type: ignore[method-assign]
    assert flop_profile(capture(model, (x,))).backward == 2 * flop_profile(capture(model, (x,))).forward


def test_an_inputs_gradient_costs_whatever_is_selected() -> None:
    model, (x, labels) = zoo.make("mlp", 4)
    x.requires_grad_()
    flops = graphopt.analyze(model, (x, labels)).flops
    opt = graphopt.optimize(model, (x, labels), passes=[GreenTrainer(train=("third.bias",))], backend="aot_eager")
    with FlopCounterMode(display=False) as eager:
        model(x, labels).backward()
    with FlopCounterMode(display=False) as cut:
        opt(x, labels).backward()
    assert eager.get_total_flops() == flops.step
    assert cut.get_total_flops() == flops.forward + flops.cost(["third.bias"])
    assert flops.cost(["third.bias"]) == 2 * 4 * (8 * 3 + 8 * 8 + 5 * 8)  # down to the input


class Checkpointed(nn.Module):
    """Attention, and then attention that the model itself checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.between, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 7)

    def attend(self, x: Tensor) -> Tensor:
        return self.between(torch.softmax(x @ x.transpose(1, 2), -1) @ x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        x = torch.tanh(torch.softmax(x @ x.transpose(1, 2), -1) @ x)
        return self.head(checkpoint(self.attend, x, use_reentrant=False)).square().mean()


@pytest.mark.parametrize("train", [{"below.bias"}, {"below.weight", "between.weight", "head.bias"}])
def test_what_regions_keep_for_one_another_is_not_computed_again(train: set[str]) -> None:
    """Segments around a region that the model checkpoints itself, and segments that follow one another."""
    model, x = Checkpointed(), (torch.randn(3, 3, 4),)
    graph = capture_to_run(model, x, {})
    names = [segment.name for segment in find_segments(graph)]
    assert len(names) > 3
    captured = {torch.float32: graph}
    for first in range(len(names) - 2):
        passes = [(Recompute(), set(names[first : first + 3])), (GreenTrainer(), train)]
        check_passes(passes, model, x, dtypes=[torch.float32], captured=captured)  # counts FLOPs, too
