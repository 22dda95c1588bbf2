"""Sampled backwards: unbiased, with the FLOPs predicted, on fewer rows everywhere below a boundary."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from graphopt.passes import GreenTrainer, Vcas, run_pass
from graphopt.passes.vcas import ROWS, TOKENS
from graphopt.passes.vcas.boundaries import find_boundaries
from graphopt.passes.vcas.measuring import Measured
from graphopt.passes.vcas.ops import capped_probabilities
from torch import Tensor, nn

import graphopt
from graphopt import PassError, compat
from graphopt.analysis.flops import flop_profile
from graphopt.calls import as_call, flatten_call
from graphopt.capture import capture, capture_to_run, tensors_of
from graphopt.graph import TrainingGraph
from graphopt.lower import lower
from graphopt.report.python_text import readable
from graphopt.runtime.supply import Supply
from graphopt.runtime.uniforms import Uniforms
from graphopt.specialise import specialise
from graphopt.testing import check_pass
from graphopt.transforms.edit import insert_node
from tests import zoo
from tests.draws import drawn_operators, eager_gradients, expectation, made
from tests.long_forms import long


class Two(nn.Module):
    """The smallest chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().sum()


class GoldenDumps(expecttest.TestCase):
    def test_below_the_boundary_everything_has_three_rows(self) -> None:
        graph = capture(Two(), (torch.randn(5, 3),))
        rewritten, _ = run_pass(Vcas(), graph, {ROWS + "first": 0.6, TOKENS + "second.weight": 0.8})
        text = readable(rewritten)
        self.assertExpectedInline(
            text[text.index("    # backward") :],
            """\
    # backward
    expand: "float32[B, 2]" = aten.expand.default(grad_output_0, [B, 2])
    # forward
    pow_2: "float32[B, 2]" = aten.pow.Tensor_Scalar(mm_1, 1.0)
    mul_10: "float32[B, 2]" = aten.mul.Scalar(pow_2, 2.0)
    # backward
    mul_11: "float32[B, 2]" = aten.mul.Tensor(expand, mul_10)
    t_2: "float32[2, B]" = aten.t.default(mul_11)
    mul_tensor: "float32[2, B]" = aten.mul.Tensor(t_2, t_2)
    sum_dim_int_list: "float32[B]" = aten.sum.dim_IntList(mul_tensor, [0])
    sqrt_default: "float32[B]" = aten.sqrt.default(sum_dim_int_list)
    # forward
    mul_tensor_1: "float32[B, 4]" = aten.mul.Tensor(relu, relu)
    sum_dim_int_list_1: "float32[B]" = aten.sum.dim_IntList(mul_tensor_1, [1])
    sqrt_default_1: "float32[B]" = aten.sqrt.default(sum_dim_int_list_1)
    # backward
    mul_tensor_2: "float32[B]" = aten.mul.Tensor(sqrt_default, sqrt_default_1)
    # forward
    slice_tensor: "float64[2]" = aten.slice.Tensor(random_0, 0, 0, 2)
    # backward
    systematic_rows_default: "(int64[4], float64[4], float64[])" = graphopt.systematic_rows.default(mul_tensor_2, slice_tensor, 4)
    getitem: "int64[4]" = operator.getitem(systematic_rows_default, 0)
    getitem_1: "float64[4]" = operator.getitem(systematic_rows_default, 1)
    sqrt_default_2: "float64[4]" = aten.sqrt.default(getitem_1)
    index_select_default: "float32[4, 2]" = aten.index_select.default(mul_11, 0, getitem)
    t_default: "float32[2, 4]" = aten.t.default(index_select_default)
    _to_copy_default: "float32[4]" = aten._to_copy.default(sqrt_default_2, dtype=torch.float32)
    view_default: "float32[4]" = aten.view.default(_to_copy_default, [-1])
    mul_tensor_3: "float32[2, 4]" = aten.mul.Tensor(t_default, view_default)
    index_select_default_1: "float32[4, 4]" = aten.index_select.default(relu, 0, getitem)
    _to_copy_default_1: "float32[4]" = aten._to_copy.default(sqrt_default_2, dtype=torch.float32)
    view_default_1: "float32[4, 1]" = aten.view.default(_to_copy_default_1, [-1, 1])
    mul_tensor_4: "float32[4, 4]" = aten.mul.Tensor(index_select_default_1, view_default_1)
    mm_2: "float32[2, 4]" = aten.mm.default(mul_tensor_3, mul_tensor_4)
    t_3: "float32[4, 2]" = aten.t.default(mm_2)
    # forward
    t_4: "float32[2, 4]" = aten.t.default(t_1)
    # backward
    mm_3: "float32[B, 4]" = aten.mm.default(mul_11, t_4)
    _to_copy_default_2: "float64[B, 4]" = aten._to_copy.default(mm_3, dtype=torch.float64)
    mul_tensor_5: "float64[B, 4]" = aten.mul.Tensor(_to_copy_default_2, _to_copy_default_2)
    sum_dim_int_list_2: "float64[B]" = aten.sum.dim_IntList(mul_tensor_5, [1])
    sqrt_default_3: "float64[B]" = aten.sqrt.default(sum_dim_int_list_2)
    # forward
    slice_tensor_1: "float64[2]" = aten.slice.Tensor(random_0, 0, 2, 4)
    # backward
    systematic_rows_default_1: "(int64[3], float64[3], float64[])" = graphopt.systematic_rows.default(
        sqrt_default_3,
        slice_tensor_1,
        3,
    )
    getitem_2: "int64[3]" = operator.getitem(systematic_rows_default_1, 0)
    getitem_3: "float64[3]" = operator.getitem(systematic_rows_default_1, 1)
    index_select_default_2: "float32[3, 4]" = aten.index_select.default(mm_3, 0, getitem_2)
    _to_copy_default_3: "float32[3]" = aten._to_copy.default(getitem_3, dtype=torch.float32)
    view_default_2: "float32[3, 1]" = aten.view.default(_to_copy_default_3, [-1, 1])
    mul_tensor_6: "float32[3, 4]" = aten.mul.Tensor(index_select_default_2, view_default_2)
    t_5: "float32[2, 4]" = aten.t.default(t_3)
    index_select_default_3: "float32[3, 4]" = aten.index_select.default(relu, 0, getitem_2)
    detach_default: "float32[3, 4]" = aten.detach.default(index_select_default_3)
    detach_default_1: "float32[3, 4]" = aten.detach.default(detach_default)
    threshold_backward: "float32[3, 4]" = aten.threshold_backward.default(mul_tensor_6, detach_default_1, 0)
    t_6: "float32[4, 3]" = aten.t.default(threshold_backward)
    index_select_default_4: "float32[3, 3]" = aten.index_select.default(input_0, 0, getitem_2)
    mm_4: "float32[4, 3]" = aten.mm.default(t_6, index_select_default_4)
    t_7: "float32[3, 4]" = aten.t.default(mm_4)
    t_8: "float32[4, 3]" = aten.t.default(t_7)
    return (
        sum_1,  # output 0
        t_8,  # gradient of parameter first.weight
        t_5,  # gradient of parameter second.weight
        None,
    )
""",
        )


def assert_unbiased(name: str, batch: int, pick: Callable[[list[str]], dict[str, float]]) -> None:
    model, inputs = made(name, batch)
    graph = capture_to_run(model, *as_call(inputs))
    decisions = pick([site.name for site in Vcas().applicable(graph)])
    rewritten, report = run_pass(Vcas(), graph, decisions)
    assert set(report.changes.changed) == set(decisions)
    exact, mean = eager_gradients(model, inputs), expectation(rewritten, model, inputs)
    assert mean.keys() == exact.keys()
    largest = max(float(g.abs().max()) for g in exact.values())
    single = 1e4 if name == "llama" else 1.0  # its norms compute in float32 whatever the model's type
    for key, gradient in exact.items():
        rtol, atol = 1e-9 * single, 1e-10 * single * largest
        torch.testing.assert_close(mean[key], gradient, rtol=rtol, atol=atol, msg=lambda m, key=key: f"{key}: {m}")


MODELS = ["mlp", "bert", "llama", "group norm", *long("t5-untied", "vit", "gpt2")]


@pytest.mark.parametrize("name", MODELS)
def test_kept_samples_are_unbiased_over_all_draws(name: str) -> None:
    assert_unbiased(name, 6, lambda sites: {next(s for s in sites if s.startswith(ROWS)): 0.5})


@pytest.mark.parametrize("name", ["mlp", "bert", *long("llama", "vit")])
def test_kept_terms_of_a_weight_are_unbiased_over_all_draws(name: str) -> None:
    assert_unbiased(name, 3, lambda sites: {[s for s in sites if s.startswith(TOKENS)][1]: 0.4})


@pytest.mark.parametrize("name", ["mlp", "group norm", "bert"])
def test_nested_boundaries_are_unbiased_over_all_draws(name: str) -> None:
    def pick(sites: list[str]) -> dict[str, float]:
        first, second = [s for s in sites if s.startswith(ROWS)][:2]
        return {first: 5 / 6, second: 0.5}

    assert_unbiased(name, 6, pick)


@pytest.mark.parametrize(
    ("name", "weights"), [("mlp", {"second.weight": 0.4, "third.weight": 0.5}), ("tokens first", {"inner.weight": 0.5})]
)
def test_samples_and_terms_together_are_unbiased_over_all_draws(name: str, weights: dict[str, float]) -> None:
    assert_unbiased(name, 6, lambda sites: {sites[0]: 0.7, **{TOKENS + weight: part for weight, part in weights.items()}})


@pytest.mark.parametrize("name", ["mlp", "group norm", *long("lora", "bert")])
def test_the_harness_finds_no_bias_and_the_flops_predicted(name: str) -> None:
    model, inputs = made(name, 6, torch.float32)
    if name in ("bert", "llama", "t5-tied", "vit", "lora"):
        model = LossAlone(model)
    rewrite = Vcas(keep_rows=0.5, keep_tokens=0.6)
    graph = capture_to_run(model, *as_call(inputs))
    (check,) = check_pass(rewrite, model, inputs, rewrite.ratios(graph), dtypes=[torch.float64])
    assert check.report.step_flops_after < check.report.step_flops_before


class LossAlone(nn.Module):
    """A model that returns nothing but its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).loss


class Heavier(Vcas):
    """Scales every kept row by too much."""

    def apply(self, graph: TrainingGraph, decisions: Any) -> Any:
        changes = super().apply(graph, decisions)
        for node in list(graph.graph.nodes):
            if any(drawn_operators(n) for n in node.all_input_nodes) and node.args[1] == 1:
                with graph.graph.inserting_after(node):
                    scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
                scaled.meta = dict(node.meta)
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        return changes


def test_a_biased_sampler_is_found() -> None:
    model, inputs = made("mlp", 6, torch.float32)
    with pytest.raises(PassError, match="standard errors"):
        check_pass(Heavier(), model, inputs, {ROWS + "second": 0.5}, dtypes=[torch.float64])


def test_terms_are_drawn_by_the_weights_of_which_the_variance_is_stated() -> None:
    """By |dZ_i| |Z_i|, with the variance of independent draws: the sum of (1 / p - 1) times their squares."""
    model, inputs = made("mlp", 6)
    graph = capture_to_run(model, *as_call(inputs))
    rewritten, _ = run_pass(Vcas(), graph, {TOKENS + "second.weight": 0.5})
    (drawn,) = filter(drawn_operators, rewritten.graph.nodes)
    rewritten.add_backward_output("variance", insert_node(rewritten.graph, operator.getitem, (drawn, 2), drawn.next))
    measured = Measured()
    run = lower(specialise(rewritten, 6), "aot_eager", Supply(Uniforms(), {"measured": measured}))
    run(flatten_call(*as_call(inputs)), tensors_of(model))[0].backward()
    hidden = torch.relu(model.first(inputs[0]))  # type: ignore[operator]
    above = model.second(hidden)  # type: ignore[operator]
    loss = nn.functional.cross_entropy(model.third(torch.relu(above)), inputs[1])  # type: ignore[operator]
    (dz,) = torch.autograd.grad(loss, above)
    weights = (dz.norm(dim=1) * hidden.norm(dim=1)).detach()
    p = capped_probabilities(weights, 3)
    assert float(measured.slots["variance"]) == pytest.approx(float(((1 / p - 1) * weights.square()).sum()), rel=1e-9)


@pytest.mark.parametrize("name", ["mlp", *long("bert", "vit")])
def test_kept_in_full_the_graph_is_untouched(name: str) -> None:
    model, inputs = made(name, 6, torch.float32)
    graph = capture_to_run(model, *as_call(inputs))
    rewrite = Vcas(keep_rows=1.0, keep_tokens=1.0)
    rewritten, report = run_pass(rewrite, graph, rewrite.ratios(graph))
    assert readable(rewritten).count("systematic_rows") == 0
    assert report.step_flops_after == report.step_flops_before
    assert not report.changes.changed
    twin = copy.deepcopy(model)
    ours = graphopt.optimize(model, inputs, passes=[rewrite], backend="aot_eager")
    theirs = graphopt.optimize(twin, inputs, passes=[], backend="aot_eager")
    for opt in (ours, theirs):
        zoo.loss_of(zoo.call(opt, inputs)).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


def test_attention_and_norms_below_a_boundary_run_on_the_kept_samples() -> None:
    model, inputs = zoo.make("bert", 6)
    graph = capture_to_run(model, *as_call(inputs))
    boundary = find_boundaries(graph)[0]
    rewritten, _ = run_pass(Vcas(), graph, {ROWS + boundary.name: 0.5})
    kept = 0
    for node in rewritten.graph.nodes:
        name = str(node.target)
        if "native_layer_norm_backward" in name or ("attention" in name and "backward" in name):
            assert node.args[0].meta["val"].shape[0] == 3, name
            kept += 1
    assert kept >= 5


def test_ratios_per_block_nest_and_flops_fall() -> None:
    model, inputs = zoo.make("bert", 8)
    graph = capture_to_run(model, *as_call(inputs))
    flops = []
    for rows in (1.0, (1.0, 0.5), 0.5, (0.5, 0.25)):
        rewrite = Vcas(keep_rows=rows)
        flops.append(run_pass(rewrite, graph, rewrite.ratios(graph))[1].step_flops_after)
    assert flops == sorted(flops, reverse=True)
    assert len(set(flops)) == 4


def test_sampling_composes_with_a_cut() -> None:
    model, inputs = made("mlp", 6)
    graph = capture_to_run(model, *as_call(inputs))
    cut, _ = run_pass(GreenTrainer(), graph, ["second.weight", "third.bias"])
    sites = [site.name for site in Vcas().applicable(cut)]
    rewritten, _ = run_pass(Vcas(), cut, {next(s for s in sites if s.startswith(ROWS)): 0.5})
    exact, mean = eager_gradients(model, inputs), expectation(rewritten, model, inputs)
    assert set(mean) == {"second.weight", "third.bias"}
    for name, value in mean.items():
        torch.testing.assert_close(value, exact[name])


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_a_scaled_loss_keeps_the_same_rows(scale: float) -> None:
    """Loss scaling changes nothing but the scale: no threshold is absolute."""
    gradients = []
    for factor in (1.0, scale):
        model, inputs = zoo.make("mlp", 8)
        opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5, keep_tokens=0.5)], backend="aot_eager")
        (opt(*inputs) * factor).backward()
        gradients.append([p.grad / factor for p in model.parameters()])  # type: ignore[operator]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_seed_repeats_a_run_and_the_global_stream_stays() -> None:
    found = []
    for seed in (1, 1, 2):
        model, inputs = zoo.make("mlp", 8)
        opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.4, seed=seed)], backend="aot_eager")
        before = torch.get_rng_state()
        for _ in range(3):
            opt(*inputs).backward()
        assert torch.equal(before, torch.get_rng_state())
        found.append(model.first.weight.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_another_batch_size_keeps_the_same_part() -> None:
    model, inputs = zoo.make("mlp", 8)
    opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    for size in (8, 6, 3):
        opt(*zoo.rows(inputs, size)).backward()
        assert opt.last_step is not None
        kept = {node.meta["val"][0].shape[0] for node in opt.last_step.graph.graph.nodes if drawn_operators(node)}
        assert kept == {max(2, size // 2)}
        assert flop_profile(opt.last_step.graph).step == opt.last_step.reports[-1].step_flops_after


class WithLogits(zoo.MLP):
    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        return nn.functional.cross_entropy(logits, labels), logits


def test_steps_in_which_another_output_is_differentiated_are_computed_exactly() -> None:
    model, inputs = WithLogits(), zoo.make("mlp", 6)[1]
    reference = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    opt(*inputs)[0].backward()
    assert opt.last_step is not None
    assert opt.last_step.sampled_part < 1
    for run in (reference, opt, opt, opt):  # the first such steps are run again for the other output alone, which may be sampled
        model.zero_grad()
        loss, logits = run(*inputs)
        (loss + logits.sum()).backward()
    assert opt.last_step.sampled_part == 1
    assert any("not sampled: the step has gradients of outputs beside the loss" in note for note in opt.report.notes)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Bad(nn.Module):
    """Each sample sees the others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.kind = kind
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.kind == "mean":
            hidden = torch.tanh(hidden - hidden.mean(0))
        elif self.kind == "softmax":
            hidden = hidden.softmax(0)
        elif self.kind == "pairs":
            hidden = (hidden @ hidden.T) @ hidden
        elif self.kind == "batch norm":
            hidden = self.norm(hidden)
        elif self.kind == "roll":
            hidden = hidden + hidden.roll(1, 0)
        return torch.tanh(self.second(torch.tanh(hidden))).square().mean()


@pytest.mark.parametrize(("kind", "operator"), [("softmax", "softmax"), ("pairs", ""),
                                                 ("batch norm", "batch_norm"), ("roll", "")])  # fmt: skip
def test_operators_that_mix_samples_are_refused(kind: str, operator: str) -> None:
    torch.manual_seed(0)
    model, x = Bad(kind), torch.randn(8, 4)
    with pytest.raises(PassError, match=f"cannot be sampled.*{operator}"):
        graphopt.optimize(model, (x,), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    opt = graphopt.optimize(model, (x,), budget=graphopt.Budget(variance=0.1), backend="aot_eager")
    assert opt.controller is not None
    assert opt.controller.after_step((x,)) is None
    assert any("not sampled" in note for note in opt.report.notes)
    twin = copy.deepcopy(model)
    opt(x).backward()
    twin(x).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_mean_over_the_batch_is_put_back_on_all_samples() -> None:
    torch.manual_seed(0)
    model, x = Bad("mean").double(), (torch.randn(6, 4, dtype=torch.float64),)
    graph = capture(model, x)
    sites = [site.name for site in Vcas().applicable(graph) if site.name.startswith(ROWS)]
    rewritten, _ = run_pass(Vcas(), graph, {sites[0]: 0.5})
    exact, mean = eager_gradients(model, x), expectation(rewritten, model, x)
    for name, value in mean.items():
        torch.testing.assert_close(value, exact[name])


@pytest.mark.parametrize(("rows", "tokens"), [(0.5, 0.5), (0.25, 1.0), (0.75, 0.25)])
def test_flops_of_bert_base_are_the_papers(rows: float, tokens: float) -> None:
    """Section 6.1: what is saved is 1 - (1 + rho + rho nu) / 3. Products of attention have no weight, and keep their terms."""
    from transformers import BertConfig, BertForSequenceClassification

    ids = torch.zeros((32, 128), dtype=torch.long)
    with compat.new_fake_mode():
        model = BertForSequenceClassification(BertConfig(num_hidden_layers=3))
        graph = capture(model.train(), (), {"input_ids": ids, "labels": torch.zeros(32, dtype=torch.long)})
    rewrite = Vcas(keep_rows=rows, keep_tokens=tokens)
    _, report = run_pass(rewrite, graph, rewrite.ratios(graph))
    saved = 1 - report.step_flops_after / report.step_flops_before
    assert saved == pytest.approx(1 - (1 + rows + rows * tokens) / 3, abs=0.006)
