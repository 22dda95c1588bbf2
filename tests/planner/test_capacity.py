"""What a tensor is worth by place, size and gradient, and that the plan then keeps to its budget."""

from __future__ import annotations

import functools
import math
import statistics
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from graphopt.passes import GreenTrainer
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import graphopt
from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.planner.capacity import MOST, OUTPUT, REACH, STEEP, VECTOR, VECTOR_OF_STEEP, capacity
from graphopt.planner.flops_limit import FlopsLimit, default_limit
from graphopt.planner.importance import Importance
from graphopt.planner.simple_rules import is_vector
from tests import zoo


def with_numbers(model: nn.Module, inputs: Any, norms: dict[str, float] | None = None, **numbers: float) -> Importance:
    """The rating, with other numbers in the rule."""
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    with mock.patch.multiple("graphopt.planner.capacity", **{"VECTOR": VECTOR, **numbers}):
        return capacity(analysis.graph, analysis.flops, norms)


def rated(model: nn.Module, inputs: Any, **numbers: float) -> dict[str, float]:
    return with_numbers(model, inputs, **numbers).values  # type: ignore[arg-type]


def head_of(name: str) -> set[str]:
    return {
        "mlp": {"third.weight", "third.bias"},
        "bert": {"classifier.weight", "classifier.bias"},
        "vit": {"classifier.weight", "classifier.bias"},
        "llama": {"lm_head.weight"},
    }[name]


@pytest.mark.parametrize("name", ["mlp", "bert", "vit", "llama"])
@pytest.mark.parametrize("size", [0.0, 0.4, 1.0])
def test_a_value_depends_on_the_size_of_a_matrix_and_on_being_the_output_layer(name: str, size: float) -> None:
    model, inputs = zoo.make(name)
    matrices = {n: p.numel() for n, p in model.named_parameters() if not is_vector(tuple(p.shape))}
    sizes = {n: elements for n, elements in matrices.items() if n not in head_of(name) and "embed" not in n}
    usual = statistics.median(sizes.values())
    power = size if name in ("mlp", "llama") else 0.0  # the loss of the others reads one row of each sample
    values = rated(model, inputs, VECTOR=0.5, SIZE=size, OUTPUT=7.0)
    kinds = {n: (sizes.get(n, usual) / usual) ** power if n in matrices else 0.5 for n in values}
    expected = {n: kind * (7.0 if n in head_of(name) else 1.0) for n, kind in kinds.items()}
    largest = max(expected.values())
    assert values == pytest.approx({n: value / largest for n, value in expected.items()})
    assert max(values.values()) == 1.0


def test_the_output_layer_counts_so_many_times_and_nothing_else_changes() -> None:
    model, inputs = zoo.make("bert")
    plain, more = (rated(model, inputs, OUTPUT=output) for output in (1.0, 3.0))
    scale = min(more[n] / plain[n] for n in plain)
    factors = {n: more[n] / plain[n] / scale for n in plain}
    assert factors == pytest.approx({n: 3.0 if n in head_of("bert") else 1.0 for n in plain})


def test_with_no_regard_to_kind_all_tensors_but_the_outputs_are_alike() -> None:
    model, inputs = zoo.make("vit")
    values = rated(model, inputs, VECTOR=1.0, SIZE=0.0, OUTPUT=4.0)
    assert {n for n, value in values.items() if value == 1.0} == head_of("vit")
    assert {value for n, value in values.items() if n not in head_of("vit")} == {0.25}


def test_where_size_does_not_count_matrices_count_alike_and_vectors_less() -> None:
    values = rated(*zoo.make("llama"), VECTOR=0.5, SIZE=0.0, OUTPUT=1.0)
    assert {values[n] for n in values if "norm" not in n} == {1.0}
    assert {values[n] for n in values if "norm" in n} == {0.5}


class Heads(nn.Module):
    """Layers over rows, a head that reads one row of each sample, and on request one that reads all."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Linear(6, 6), nn.Linear(6, 24), nn.Linear(24, 6)
        self.few, self.every = nn.Linear(6, 3), nn.Linear(6, 3) if both else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.narrow(torch.relu(self.wide(torch.relu(self.first(x)))))
        few: Tensor = self.few(x[:, 0]).square().mean()
        return few if self.every is None else self.every(x).square().mean() + few


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_size_counts_where_a_head_reads_every_row_whether_it_is_trained_or_not(both: bool, frozen: bool) -> None:
    model = Heads(both)
    for head in (model.few, model.every):
        if frozen and head is not None:
            head.requires_grad_(False)
    values = rated(model, (torch.randn(4, 8, 6),))
    assert (values["wide.weight"] > values["first.weight"]) == both
    if not frozen:
        assert values["few.weight"] == 10 / 1.2 * values["first.bias"]


@pytest.mark.parametrize("model", [nn.Embedding(5, 3), nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3)), nn.LayerNorm(3)])
def test_models_without_products_are_rated(model: nn.Module) -> None:
    inputs = torch.randn(2, 3) if isinstance(model, nn.LayerNorm) else torch.randint(0, 5, (2, 4))
    assert max(rated(model, (inputs,)).values()) == 1.0


def test_the_source_names_the_numbers() -> None:
    model, inputs = zoo.make("mlp")
    found = with_numbers(model, inputs, VECTOR=0.375, SIZE=0.25, OUTPUT=7.0)
    assert set(found.values) == {name for name, _ in model.named_parameters()}
    first, second = (model.get_parameter(f"{layer}.weight").numel() for layer in ("first", "second"))
    value = (second / ((first + second) / 2)) ** 0.25
    assert found.values["second.weight"] == pytest.approx(found.values["first.bias"] / 0.375 * value)
    assert all(number in found.source for number in ("0.375", "^0.25", "7"))


def test_weights_need_not_exist() -> None:
    real = rated(*zoo.make("bert"))
    model, inputs = zoo.make("bert")
    assert rated(model.to("meta"), {name: tensor.to("meta") for name, tensor in inputs.items()}) == real


def with_norms(norms: dict[str, float], output: float = 10.0, steep: float = 0.75) -> dict[str, float]:
    """Values of the perceptron's tensors, with no regard to kind, where a gradient of 0.75 x the median adds a matrix's value."""
    numbers = {"VECTOR": 1.0, "VECTOR_OF_STEEP": 1.0, "SIZE": 0.0, "OUTPUT": output, "STEEP": steep}
    return with_numbers(*zoo.make("mlp"), norms, **numbers).values


def test_a_steep_tensor_is_worth_more_by_the_sixth_power_of_its_gradient_over_the_median_matrixs() -> None:
    norms = {"first.weight": 1.1, "second.weight": 0.9, "first.bias": 0.8, "third.weight": 1e6}  # the output's is no measure
    added = {name: (norm / 0.75) ** 6 for name, norm in norms.items()}
    expected = {**{n: 1 + added[n] for n in ("first.weight", "second.weight", "first.bias")}, "third.weight": 10 + 20}
    values = with_norms(norms)
    assert {n: values[n] / values["second.bias"] for n in expected} == pytest.approx(expected, rel=2e-3)
    assert with_norms({n: 1e-6 * norm for n, norm in norms.items()}) == pytest.approx(values)
    far = with_norms({**norms, "first.bias": 1e200})
    assert far == pytest.approx({**values, "first.bias": 21 * values["second.bias"]}, rel=2e-3)


def test_steepness_counts_no_more_than_a_matrix_where_it_is_greatest_near_the_output() -> None:
    values = with_norms({"first.weight": 0.9, "second.weight": 1.1, "first.bias": 1e6})
    expected = {"first.weight": 2.0, "second.weight": 2.0, "first.bias": 2.0, "third.weight": 10.0}
    assert {n: values[n] / values["second.bias"] for n in expected} == pytest.approx(expected)


def test_of_equals_the_one_nearer_to_the_input_is_worth_more_where_the_loss_is_steep_there() -> None:
    for norms, deeper in (({"first.weight": 1.1, "second.weight": 0.9}, True), ({"second.weight": 1.0}, False)):
        values = with_norms(norms)
        assert (values["first.bias"] > values["second.bias"]) == deeper


def test_two_tensors_far_steeper_than_all_others_outweigh_many_matrices() -> None:
    matrices = 22  # of median size
    model, inputs = zoo.make("vit")
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    dims = {p.name: len(p.shape) for p in analysis.graph.parameters if ".layers.0." in p.name}
    first, second, ordinary = [n for n in dims if dims[n] == 2][:3]
    norms = {p.name: 1.0 for p in analysis.graph.parameters} | {first: 10.6, second: 7.7}
    values = capacity(analysis.graph, analysis.flops, norms=norms).values
    assert values[first] + values[second] > matrices * values[ordinary]


def test_vectors_count_less_where_the_loss_is_steep_in_a_matrix_but_the_outputs() -> None:
    model, inputs = zoo.make("vit")
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    dims = {p.name: len(p.shape) for p in analysis.graph.parameters if ".layers.0." in p.name}
    matrix, other = [n for n in dims if dims[n] == 2][:2]
    bias, another = [n for n in dims if dims[n] == 1][:2]
    even = {p.name: 1.0 for p in analysis.graph.parameters}
    head_alone, at_the_input = {"classifier.weight": 7.0, bias: 7.0}, {matrix: STEEP}
    for steep, vector in (({}, VECTOR), (head_alone, VECTOR), ({matrix: 0.9 * STEEP}, VECTOR), (at_the_input, VECTOR_OF_STEEP)):
        values = capacity(analysis.graph, analysis.flops, norms={**even, **steep}).values
        assert values[another] / values[other] == pytest.approx(vector, rel=1e-3), steep


@pytest.mark.parametrize(("steepest", "reached", "share"), [(7.0, True, 0.2), (7.0, False, 1.0), (1.0, True, 1.0)])
def test_matrices_with_small_gradients_make_room_for_a_steep_layer_that_the_budget_reaches(
    steepest: float, reached: bool, share: float
) -> None:
    model, inputs = zoo.make("vit")
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    names = [p.name for p in analysis.graph.parameters if ".layers." in p.name and "attention" in p.name and len(p.shape) == 2]
    first, ordinary, flat, unknown = names[:4]
    norms = {p.name: 1.0 for p in analysis.graph.parameters} | {first: steepest, flat: 0.1, unknown: 0.0}
    reachable = norms.keys() if reached else set(norms) - {first}
    values = capacity(analysis.graph, analysis.flops, norms=norms, reachable=reachable).values
    assert values[flat] / values[ordinary] == pytest.approx(share, rel=1e-3)
    assert values[unknown] / values[ordinary] == pytest.approx(1.0, rel=1e-3)


def test_the_matrix_for_which_a_budget_reaches_the_input_is_worth_it() -> None:
    model, inputs = zoo.make("vit")
    analysis = graphopt.analyze(model, inputs)
    assert isinstance(analysis.flops, FlopProfile)
    names = [p.name for p in analysis.graph.parameters if ".layers.0." in p.name and len(p.shape) == 2]
    even, others = {p.name: 1.0 for p in analysis.graph.parameters}, [p.name for p in analysis.graph.parameters][-1:]
    for times, reachable, worth, missed in (
        (REACH, even.keys(), MOST, ""), (REACH, others, 1.0, names[0]), (0.9 * REACH, even.keys(), 1.0, ""),
    ):  # fmt: skip
        found = capacity(analysis.graph, analysis.flops, norms={**even, names[0]: times}, reachable=reachable)
        assert found.values[names[0]] / found.values[names[1]] == pytest.approx(worth, rel=0.02)
        assert found.missed == missed


@pytest.mark.parametrize("norms", [{}, {"first.weight": 0.0, "first.bias": 2.0}])
def test_without_the_gradient_of_a_matrix_place_and_size_alone_count(norms: dict[str, float]) -> None:
    assert set(with_norms(norms, 1.0).values()) == {1.0}


def limited(model: nn.Module, inputs: Any) -> FlopsLimit:
    graph = graphopt.analyze(model, inputs).graph
    return default_limit(graph, flop_profile(graph), 0.6)


def worthless(limit: FlopsLimit, profile: FlopProfile, norms: dict[str, float]) -> set[str]:
    return {name for name, value in capacity(limit.graph, profile, norms=norms).values.items() if not value}


def test_matrices_that_learn_from_one_row_of_each_sample_count_nothing_unless_the_loss_is_steep_below_them() -> None:
    model, inputs = zoo.make("bert")
    limit = limited(model, inputs)
    last = f"bert.encoder.layer.{model.config.num_hidden_layers - 1}."  # type: ignore[union-attr]
    parts = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
    even = dict.fromkeys(limit.costs.names, 1.0)
    for norms in ({}, even, {**even, "bert.pooler.dense.weight": 100.0}):
        assert worthless(limit, limit.profile, norms) == {f"{last}{part}.weight" for part in parts}
    assert not worthless(limit, limit.profile, {**even, "bert.encoder.layer.0.attention.self.value.weight": 7.0})
    assert not worthless(limit, limit.captured, even)


def test_the_loss_is_seen_to_be_steep_in_the_first_layer_when_the_budget_does_not_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = "bert.embeddings.word_embeddings.weight"
    trained, missed = {}, {}
    for steepness in (1.0, 7.0):

        def norms(model: Any, args: Any, kwargs: Any, names: Any, *_: Any, steepness: float = steepness) -> dict[str, float]:
            return {name: steepness if name == first else 1.0 for name in names}

        monkeypatch.setattr("graphopt.planner.rating.gradient_norms", norms)
        opt = graphopt.optimize(*zoo.make("bert"), 0.4, backend="aot_eager")
        trained[steepness], missed[steepness] = opt.selected, opt.report.selection.missed
    assert missed[1.0] is None
    name, flops = missed[7.0]
    assert name == first
    assert f"steepest in {first}: try flops={flops:.2f} or more" in " ".join(str(opt.report).split())
    for budget, told in ((flops, None), (flops - 0.02, (first, flops))):
        assert graphopt.optimize(*zoo.make("bert"), budget, backend="aot_eager").report.selection.missed == told, budget
    assert not any("embeddings" in name for names in trained.values() for name in names)
    query = "bert.encoder.layer.1.attention.self.query.weight"
    assert query in trained[7.0]
    assert query not in trained[1.0]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_a_budget_that_may_be_raised_reaches_the_matrix_in_which_the_loss_is_steepest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, batch = "layers.0.weight", (torch.ones(4, 8),)

    def norms(model: Any, args: Any, kwargs: Any, names: Any, *_: Any, steepness: float) -> dict[str, float]:
        return {name: steepness if name == first else 1.0 for name in names}

    def optimized(budget: Any, steepness: float) -> Any:
        monkeypatch.setattr("graphopt.planner.rating.gradient_norms", functools.partial(norms, steepness=steepness))
        return graphopt.optimize(Deep(), batch, budget, backend="aot_eager")

    flat = optimized("auto", 1.0)
    least = flat.report.budget["flops"]
    assert 0.5 <= least < 0.52  # the forward is a little over a third, and a quarter of the rest is added
    assert flat.selected == optimized(least, 1.0).selected
    _, reaching = optimized(least, 7.0).report.selection.missed
    opt = optimized("auto", 7.0)
    assert opt.report.budget == {"flops": pytest.approx(min(1.0, reaching + 0.1))}
    assert first in opt.selected
    assert opt.report.selection.missed is None
    assert opt.report.selection.raised == (first, 0.5)
    assert f"from flops=0.50: does not reach {first}" in " ".join(str(opt.report).split())
    assert not opt.reselect(batch, tolerance=0.0).changed
    opt.save_state(tmp_path / "state")
    flat.load_state(tmp_path / "state")  # nothing is steep there: what was saved counts
    assert (flat.selected, flat.report.budget) == (opt.selected, opt.report.budget)
    stated = optimized(opt.report.budget["flops"], 7.0)
    with pytest.raises(graphopt.InputError, match="another budget .*or_more=True; this"):
        stated.load_state(tmp_path / "state")


@pytest.mark.parametrize(("steepness", "worth"), [(4.0, MOST), (7.0, 1 + (7 / STEEP) ** 6)])
def test_the_steepest_matrix_is_worth_its_gradient_where_that_says_enough(steepness: float, worth: float) -> None:
    analysis = graphopt.analyze(Deep(), (torch.ones(4, 8),))
    first, other, output = (f"layers.{k}.weight" for k in (0, 3, 7))
    norms = {name: steepness if name == first else 1.0 for name in analysis.flops.order}
    values = capacity(analysis.graph, analysis.flops, norms=norms, reachable=analysis.flops.order).values
    assert values[first] / values[output] == pytest.approx(worth / OUTPUT, rel=0.01)
    assert (values[first] > values[output]) == (steepness < STEEP)


@pytest.mark.parametrize("frozen", ["", "layer.0"])
def test_a_budget_that_may_be_raised_is_at_least_a_quarter_of_the_backward(frozen: str) -> None:
    model, inputs = zoo.make("bert")
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or (frozen not in name and "embeddings" not in name))
    with pytest.raises(graphopt.BudgetError, match="Smallest feasible"):
        graphopt.optimize(model, inputs, 0.01, backend="aot_eager")
    opt = graphopt.optimize(model, inputs, graphopt.Budget(flops=0.01, or_more=True), backend="aot_eager")
    forward = opt.flops.forward / opt.flops.step
    assert opt.report.budget["flops"] == pytest.approx(forward + (1 - forward) / 4, abs=0.01)
    assert 0.01 < opt.report.flops_ratio <= opt.report.budget["flops"]
    assert (opt.report.budget["flops"] > 0.5) == bool(frozen)
    if frozen:  # then all of what is left fits
        assert opt.report.selection is None
    else:
        assert opt.report.selection.raised == ("", 0.01)
        assert "raised from flops=0.01" in " ".join(str(opt.report).split())


def test_selecting_anew_counts_rows_as_selecting_does() -> None:
    model, inputs = zoo.make("bert")
    opt = graphopt.optimize(model, inputs, 0.45, backend="aot_eager")
    assert isinstance(opt, graphopt.OptimizedModule)
    assert not opt.reselect(inputs, tolerance=0.0).changed


def test_where_all_layers_learn_from_few_rows_all_count() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 3)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.layers(x)[:, 0]), labels)

    limit = limited(First(), (torch.randn(4, 16, 6), torch.randint(0, 3, (4,))))
    assert limit.profile.step < 0.2 * limit.captured.step
    assert not worthless(limit, limit.profile, {})


# What the plan makes of it.


def chosen(model: nn.Module, inputs: Any, flops: float) -> graphopt.OptimizedModule:
    opt = graphopt.optimize(model, inputs, flops, [GreenTrainer(rule="capacity")], backend="aot_eager")
    assert isinstance(opt, graphopt.OptimizedModule)
    return opt


@given(st.floats(0.7, 0.8))
@settings(max_examples=5)
def test_where_the_loss_is_steepest_at_the_input_the_first_layer_is_trained_instead_of_many_others(flops: float) -> None:
    torch.manual_seed(0)
    model, inputs = Blocks(list("abcdefgh")), (torch.randn(16, 6), torch.randint(0, 3, (16,)))
    for part in model.parts.values():
        part.bias = None  # biases alone would be worth reaching down for
    with torch.no_grad():
        model.parts["a"].weight.mul_(0.01)
    steep = (inputs[0] * 100, inputs[1])
    trained = {
        rule: graphopt.optimize(model, steep, flops, [GreenTrainer(rule=rule)], "aot_eager") for rule in ("steepness", "capacity")
    }
    assert all(opt.report.flops_ratio <= flops for opt in trained.values())
    assert "parts.a.weight" in trained["steepness"].selected
    assert "parts.a.weight" not in trained["capacity"].selected


@given(st.floats(0.45, 0.99), st.integers(0, 100))
@settings(max_examples=10)
def test_the_budget_is_kept_and_the_values_of_the_example_do_not_matter(flops: float, seed: int) -> None:
    model, (x, labels) = zoo.make("mlp")
    torch.manual_seed(seed)
    first, *others = (
        chosen(model, batch, flops) for batch in ((x, labels), (torch.randn_like(x) * 100, 2 - labels), (x * math.nan, labels))
    )
    assert first.report.flops_ratio <= flops
    assert first.selected
    assert {frozenset(opt.selected) for opt in others} == {frozenset(first.selected)}


def test_a_transformer_keeps_to_its_budget_whatever_is_in_the_batch() -> None:
    model, inputs = zoo.make("bert")
    other = {**inputs, "input_ids": zoo.tokens(4), "labels": 1 - inputs["labels"]}
    one, two = chosen(model, inputs, 0.6), chosen(model, other, 0.6)
    assert set(one.selected) == set(two.selected) >= {"classifier.weight", "classifier.bias"}
    assert one.report.flops_ratio <= 0.6


class Blocks(nn.Module):
    """Residual blocks of two layers under names of one's choice."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        layers = [nn.Linear(6, 6), *(nn.Linear(6, 12) if k % 2 else nn.Linear(12, 6) for k in range(1, 7)), nn.Linear(6, 3)]
        self.parts = nn.ModuleDict(OrderedDict(zip(names, layers, strict=True)))
        self.order = names

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first, *inner, last = (self.parts[name] for name in self.order)
        x = torch.tanh(first(x))
        for wide, narrow in zip(inner[::2], inner[1::2], strict=True):
            x = x + narrow(torch.relu(wide(x)))
        return nn.functional.cross_entropy(last(x), labels)


@given(
    st.permutations(["a", "head", "classifier", "z", "bias", "layer10", "layer9", "attention"]), st.sampled_from([0.45, 0.6, 0.8])
)
@settings(max_examples=8)
def test_names_are_not_looked_at(names: list[str], flops: float) -> None:
    inputs = (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    found = []
    for each in (sorted(names), names):
        model = Blocks(each)
        selected = chosen(model, inputs, flops).selected
        found.append([name in selected for name, _ in model.named_parameters()])
    assert found[0] == found[1]
