"""Several passes on one graph: every combination keeps the weakest of their contracts, and costs what was predicted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from graphopt.passes import (
    BY_NAME,
    DeadRows,
    GreenTrainer,
    LinearCrossEntropy,
    Lsp,
    Pass,
    Preserves,
    Recompute,
    RunLora,
    Vcas,
    in_order,
    run_pass,
)  # fmt: skip
from graphopt.passes.runlora.orders import named_order
from graphopt.passes.vcas import ROWS, TOKENS
from torch import Tensor, nn

from graphopt import PassError
from graphopt.analysis.flops import flop_profile
from graphopt.analysis.step_memory import step_memory
from graphopt.budget import Budget
from graphopt.calls import as_call
from graphopt.capture import capture, capture_to_run
from graphopt.graph import TrainingGraph
from graphopt.planner.plan import resolve_passes
from graphopt.report.python_text import readable
from graphopt.testing import PassCheck, check_passes
from tests import zoo
from tests.long_forms import long
from tests.measure import peak_and_rest

MODELS = ["mlp", "llama", "bert", "t5-tied", "lora"]
EXACT, UNBIASED, PROJECTED = Preserves.EXACT, Preserves.UNBIASED, Preserves.PROJECTED

MATRIX = {
    ("greentrainer",): {EXACT},
    ("runlora",): {EXACT},
    ("vcas",): {UNBIASED},
    ("lsp",): {PROJECTED},
    ("greentrainer", "runlora"): {EXACT},
    ("greentrainer", "vcas"): {UNBIASED},
    ("greentrainer", "lsp"): {PROJECTED},
    ("runlora", "vcas"): {UNBIASED},
    ("runlora", "lsp"): {PROJECTED},
    ("vcas", "lsp"): {UNBIASED, PROJECTED},
    ("greentrainer", "runlora", "vcas"): {UNBIASED},
    ("greentrainer", "runlora", "lsp"): {PROJECTED},
    ("greentrainer", "vcas", "lsp"): {UNBIASED, PROJECTED},
    ("runlora", "vcas", "lsp"): {UNBIASED, PROJECTED},
    ("greentrainer", "runlora", "vcas", "lsp"): {UNBIASED, PROJECTED},
}
"""What every combination preserves of autograd's gradients, of those that it still computes."""

OF_CLASSIFIERS = {
    ("dead_rows",): {EXACT},
    ("dead_rows", "greentrainer"): {EXACT},
    ("dead_rows", "vcas"): {UNBIASED},
    ("dead_rows", "lsp"): {PROJECTED},
    ("dead_rows", "greentrainer", "vcas", "lsp"): {UNBIASED, PROJECTED},
}
"""With what finds something in models whose head reads one row."""

OF_LANGUAGE_MODELS = {
    ("linear_cross_entropy",): {EXACT},
    ("greentrainer", "linear_cross_entropy"): {EXACT},
    ("linear_cross_entropy", "lsp"): {PROJECTED},
    ("greentrainer", "linear_cross_entropy", "lsp"): {PROJECTED},
}
"""With what finds something in models that return a loss of logits; a sampler needs a symbolic batch, which it leaves alone."""

DRAWS = 100
"""A bias of 0.6 of a gradient's standard deviation is found; see `test_a_bias_under_compression_is_found`."""

SAMPLER = Vcas(keep_rows=0.5, keep_tokens=0.6)
COMPRESSION = Lsp(subspace=3, nonzeros=2, criterion="flops")
ORDERS = (named_order("forward2", "backward5"), named_order("forward1", "backward2"))


def upper_part(graph: TrainingGraph) -> set[str]:
    """Two thirds of the parameters: the cut is in the middle of a block."""
    sites = GreenTrainer().applicable(graph)
    return {site.name for site in sites[len(sites) // 3 :]}


def merged_and_not(graph: TrainingGraph) -> dict[str, Any]:
    """Every other layer computed as X(W + cAB)."""
    return {site.name: ORDERS[i % 2] for i, site in enumerate(RunLora().applicable(graph))}


def all_sites(rewrite: Pass) -> Callable[[TrainingGraph], set[str]]:
    return lambda graph: {site.name for site in rewrite.applicable(graph)}


PASSES: dict[str, tuple[Pass, Any]] = {
    "greentrainer": (GreenTrainer(), upper_part),
    "dead_rows": (DeadRows(), all_sites(DeadRows())),
    "linear_cross_entropy": (LinearCrossEntropy(chunks=3), all_sites(LinearCrossEntropy())),
    "runlora": (RunLora(), merged_and_not),
    "vcas": (SAMPLER, SAMPLER.ratios),
    "lsp": (COMPRESSION, all_sites(COMPRESSION)),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """A model of the zoo.

    The MLP is wide enough for 1 % of its peak to be more than the numbers that a sampler draws with; the model with adapters has
    one block, because it takes longest.
    """
    model, inputs = zoo.make(name, 6, dtype)
    if name == "mlp":
        torch.manual_seed(0)
        model = zoo.MLP(width=64).to(dtype)
    return zoo.in_one_block(model) if name == "lora" else model, inputs


@functools.cache
def captured(name: str, dtype: torch.dtype, symbolic: bool = True) -> TrainingGraph:
    model, inputs = made(name, dtype)
    return capture_to_run(model, *as_call(inputs), symbolic=symbolic)


def checked(name: str, combination: tuple[str, ...]) -> list[PassCheck]:
    model, inputs = made(name)
    dtypes = [torch.float64] if "vcas" in combination else [torch.float64, torch.float32]
    if name == "llama" and "linear_cross_entropy" in combination:
        dtypes = [torch.float32]  # in which its loss is computed whatever its weights are
    graphs = {d: captured(name, d, "linear_cross_entropy" not in combination and d is torch.float64) for d in dtypes}
    return check_passes([PASSES[n] for n in combination], model, inputs, dtypes=dtypes, captured=graphs, draws=DRAWS)


def assert_peak_is_predicted(check: PassCheck) -> None:
    """Within 1 % of what the allocator says."""
    check.step()  # .grad is None from here on
    memory = step_memory(check.graph, "aot_eager", None)
    assert memory.peak_bytes - memory.static_bytes == pytest.approx(peak_and_rest(check.step)[0], rel=0.01)


def test_the_matrix_is_complete() -> None:
    apart = {"recompute"}.union(*OF_CLASSIFIERS, *OF_LANGUAGE_MODELS).difference(*MATRIX)  # recompute: see the last test
    names = [name for name in BY_NAME if name not in apart]
    assert set(MATRIX) == {c for size in range(1, 5) for c in itertools.combinations(names, size)}


ON_EVERY_MODEL = [("greentrainer", "lsp"), ("vcas",), ("greentrainer", "vcas", "lsp")]
"""The others repeat on larger models what the smallest shows, and the one with adapters, where every pass finds something."""


@pytest.mark.parametrize(
    ("name", "combination"),
    [
        case if name in ("mlp", "lora") or combination in ON_EVERY_MODEL else long(case)[0]
        for name in MODELS
        for combination in MATRIX
        for case in [(name, combination)]
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_every_combination_keeps_its_contract(name: str, combination: tuple[str, ...]) -> None:
    if "runlora" in combination and name != "lora":
        assert_nothing_to_reorder(name, combination)
        return
    assert_contract(name, combination, MATRIX[combination])


@pytest.mark.parametrize(
    ("name", "combination", "preserves"),
    [
        *(("bert", combination, preserves) for combination, preserves in OF_CLASSIFIERS.items()),
        *(("llama", combination, preserves) for combination, preserves in OF_LANGUAGE_MODELS.items()),
        *long(*(("t5-tied", combination, preserves) for combination, preserves in OF_LANGUAGE_MODELS.items())),
    ],
)
def test_rows_and_logits_with_everything_else(name: str, combination: tuple[str, ...], preserves: set[Preserves]) -> None:
    assert_contract(name, combination, preserves)


def assert_contract(name: str, combination: tuple[str, ...], preserves: set[Preserves]) -> None:
    for check in checked(name, combination):
        assert check.preserves == preserves
        assert [report.name for report in check.reports] == list(combination)
        assert all(report.changes.changed for report in check.reports)
        assert check.counted_flops == check.report.step_flops_after == flop_profile(check.graph).step
    assert_peak_is_predicted(check)


def assert_nothing_to_reorder(name: str, combination: tuple[str, ...]) -> None:
    """Without adapters, runlora hands the very same graph on: the row is that without it, which is checked in its own place."""
    graph = captured(name, torch.float64)
    if "greentrainer" in combination:
        graph, _ = run_pass(GreenTrainer(), graph, upper_part(graph))
    rewritten, report = run_pass(RunLora(), graph, merged_and_not(graph))
    assert report.changes.changed == ()
    assert readable(rewritten) == readable(graph)
    rest = tuple(n for n in combination if n != "runlora")
    assert MATRIX[combination] == (MATRIX[rest] if rest else {EXACT})


class Adapted(nn.Module):
    """A layer with an adapter between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(3, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.randn(6, 2))
        self.above = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.below(x))
        hidden = torch.relu(hidden @ self.weight.t() + 2.0 * (hidden @ self.down.t()) @ self.up.t())
        return self.above(hidden).square().sum()


def adapted(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Adapted().to(dtype), (torch.randn(5, 3, dtype=dtype),)


class GoldenDumps(expecttest.TestCase):
    def test_a_merged_layer_on_three_rows_with_a_compressed_gradient_above_a_cut(self) -> None:
        graph = capture(*adapted(torch.float32))
        graph, _ = run_pass(GreenTrainer(), graph, {"weight", "down", "up", "above.weight"})
        graph, _ = run_pass(RunLora(), graph, {"weight": named_order("forward2", "backward5")})
        graph, _ = run_pass(Vcas(), graph, {ROWS + "weight": 0.6, TOKENS + "above.weight": 0.8})
        graph, _ = run_pass(Lsp(subspace=2, nonzeros=1), graph, {"weight": "activations"})
        text = readable(graph)
        self.assertExpectedInline(
            text[text.index("    # forward") :],
            """\
    # forward
    t: "float32[3, 4]" = aten.t.default(below_weight)
    mm: "float32[B, 4]" = aten.mm.default(input_0, t)
    relu: "float32[B, 4]" = aten.relu.default(mm)
    addmm_default: "float32[6, 4]" = aten.addmm.default(weight, up, down, alpha=2.0)
    t_default: "float32[4, 6]" = aten.t.default(addmm_default)
    mm_1: "float32[B, 6]" = aten.mm.default(relu, t_default)
    t_2: "float32[4, 2]" = aten.t.default(down)
    mm_2: "float32[B, 2]" = aten.mm.default(relu, t_2)
    mul_10: "float32[B, 2]" = aten.mul.Tensor(mm_2, 2.0)
    t_3: "float32[2, 6]" = aten.t.default(up)
    relu_1: "float32[B, 6]" = aten.relu.default(mm_1)
    t_4: "float32[6, 3]" = aten.t.default(above_weight)
    mm_4: "float32[B, 3]" = aten.mm.default(relu_1, t_4)
    pow_1: "float32[B, 3]" = aten.pow.Tensor_Scalar(mm_4, 2)
    sum_1: "float32[]" = aten.sum.default(pow_1)
    # backward
    expand: "float32[B, 3]" = aten.expand.default(grad_output_0, [B, 3])
    # forward
    pow_2: "float32[B, 3]" = aten.pow.Tensor_Scalar(mm_4, 1.0)
    mul_25: "float32[B, 3]" = aten.mul.Scalar(pow_2, 2.0)
    # backward
    mul_26: "float32[B, 3]" = aten.mul.Tensor(expand, mul_25)
    t_5: "float32[3, B]" = aten.t.default(mul_26)
    mul_tensor: "float32[3, B]" = aten.mul.Tensor(t_5, t_5)
    sum_dim_int_list: "float32[B]" = aten.sum.dim_IntList(mul_tensor, [0])
    sqrt_default: "float32[B]" = aten.sqrt.default(sum_dim_int_list)
    # forward
    mul_tensor_1: "float32[B, 6]" = aten.mul.Tensor(relu_1, relu_1)
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
    index_select_default: "float32[4, 3]" = aten.index_select.default(mul_26, 0, getitem)
    t_default_1: "float32[3, 4]" = aten.t.default(index_select_default)
    _to_copy_default: "float32[4]" = aten._to_copy.default(sqrt_default_2, dtype=torch.float32)
    view_default: "float32[4]" = aten.view.default(_to_copy_default, [-1])
    mul_tensor_3: "float32[3, 4]" = aten.mul.Tensor(t_default_1, view_default)
    index_select_default_1: "float32[4, 6]" = aten.index_select.default(relu_1, 0, getitem)
    _to_copy_default_1: "float32[4]" = aten._to_copy.default(sqrt_default_2, dtype=torch.float32)
    view_default_1: "float32[4, 1]" = aten.view.default(_to_copy_default_1, [-1, 1])
    mul_tensor_4: "float32[4, 6]" = aten.mul.Tensor(index_select_default_1, view_default_1)
    mm_5: "float32[3, 6]" = aten.mm.default(mul_tensor_3, mul_tensor_4)
    t_6: "float32[6, 3]" = aten.t.default(mm_5)
    # forward
    t_7: "float32[3, 6]" = aten.t.default(t_4)
    # backward
    mm_6: "float32[B, 6]" = aten.mm.default(mul_26, t_7)
    _to_copy_default_2: "float64[B, 6]" = aten._to_copy.default(mm_6, dtype=torch.float64)
    mul_tensor_5: "float64[B, 6]" = aten.mul.Tensor(_to_copy_default_2, _to_copy_default_2)
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
    index_select_default_2: "float32[3, 6]" = aten.index_select.default(mm_6, 0, getitem_2)
    _to_copy_default_3: "float32[3]" = aten._to_copy.default(getitem_3, dtype=torch.float32)
    view_default_2: "float32[3, 1]" = aten.view.default(_to_copy_default_3, [-1, 1])
    mul_tensor_6: "float32[3, 6]" = aten.mul.Tensor(index_select_default_2, view_default_2)
    t_8: "float32[3, 6]" = aten.t.default(t_6)
    index_select_default_3: "float32[3, 6]" = aten.index_select.default(relu_1, 0, getitem_2)
    detach_default: "float32[3, 6]" = aten.detach.default(index_select_default_3)
    detach_default_1: "float32[3, 6]" = aten.detach.default(detach_default)
    threshold_backward: "float32[3, 6]" = aten.threshold_backward.default(mul_tensor_6, detach_default_1, 0)
    t_9: "float32[6, 3]" = aten.t.default(threshold_backward)
    index_select_default_4: "float32[3, 2]" = aten.index_select.default(mul_10, 0, getitem_2)
    mm_7: "float32[6, 2]" = aten.mm.default(t_9, index_select_default_4)
    t_10: "float32[2, 6]" = aten.t.default(mm_7)
    # forward
    t_11: "float32[6, 2]" = aten.t.default(t_3)
    # backward
    mm_8: "float32[3, 2]" = aten.mm.default(threshold_backward, t_11)
    t_12: "float32[6, 2]" = aten.t.default(t_10)
    mul_27: "float32[3, 2]" = aten.mul.Tensor(mm_8, 2.0)
    t_13: "float32[2, 3]" = aten.t.default(mul_27)
    index_select_default_5: "float32[3, 4]" = aten.index_select.default(relu, 0, getitem_2)
    mm_9: "float32[2, 4]" = aten.mm.default(t_13, index_select_default_5)
    t_14: "float32[4, 2]" = aten.t.default(mm_9)
    t_16: "float32[2, 4]" = aten.t.default(t_14)
    t_17: "float32[6, 3]" = aten.t.default(threshold_backward)
    t_default_2: "float32[4, 3]" = aten.t.default(index_select_default_5)
    clone_default: "float32[6, 3]" = aten.clone.default(t_17, memory_format=torch.contiguous_format)
    clone_default_1: "float32[4, 3]" = aten.clone.default(t_default_2, memory_format=torch.contiguous_format)
    combine_rows_default: "float32[2, 3]" = graphopt.combine_rows.default(
        clone_default,
        given_left_rows_of_weight,
        given_left_values_of_weight,
    )
    combine_rows_default_1: "float32[2, 3]" = graphopt.combine_rows.default(
        clone_default_1,
        given_right_rows_of_weight,
        given_right_values_of_weight,
    )
    t_default_3: "float32[3, 2]" = aten.t.default(combine_rows_default_1)
    mm_default: "float32[2, 2]" = aten.mm.default(combine_rows_default, t_default_3)
    return (
        sum_1,  # output 0
        mm_default,  # gradient of compressed weight
        t_16,  # gradient of parameter down
        t_12,  # gradient of parameter up
        None,  # gradient of parameter below.weight
        t_8,  # gradient of parameter above.weight
        None,
    )
""",
        )


def test_the_order_of_the_pipeline_is_fixed() -> None:
    class Own(GreenTrainer):
        name = "own"

    class Noisy(Vcas):
        name = "noisy"

    class Image(Lsp):
        name = "image"

    known = [GreenTrainer(), RunLora(), Vcas(keep_rows=0.5), Lsp()]
    for listed in itertools.permutations(known):
        assert list(in_order(listed)) == known
        assert list(resolve_passes(listed, Budget())) == known
    listed = [Image(), Lsp(), Vcas(keep_rows=0.5), Noisy(keep_rows=0.5), Own(), RunLora(), GreenTrainer()]
    names = [rewrite.name for rewrite in in_order(listed)]
    assert names == ["greentrainer", "runlora", "own", "noisy", "vcas", "lsp", "image"]


class Skewed(Lsp):
    """Compresses to a little too much."""

    def apply(self, graph: TrainingGraph, decisions: Any) -> Any:
        changes = super().apply(graph, decisions)
        for desc, node in zip(graph.outputs, graph.results, strict=True):
            if desc.kind == "gradient" and desc.target.kind == "compressed" and node is not None:
                with graph.graph.inserting_after(node):
                    scaled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.5))
                scaled.meta = dict(node.meta)
                node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        return changes


def test_a_bias_under_compression_is_found() -> None:
    model, inputs = zoo.make("mlp", 6)
    skewed = Skewed(subspace=3, nonzeros=2)
    passes: list[tuple[Pass, Any]] = [PASSES["vcas"], (skewed, all_sites(skewed))]
    with pytest.raises(PassError, match=r"vcas \+ lsp: the mean of the compressed gradient.* standard errors"):
        check_passes(passes, model, inputs, dtypes=[torch.float64], draws=4 * DRAWS)
    with pytest.raises(PassError, match=r"greentrainer \+ lsp: the compressed gradient of .* differs"):
        check_passes([PASSES["greentrainer"], (skewed, all_sites(skewed))], model, inputs, dtypes=[torch.float64])


class Forgetful(Vcas):
    """Loses a gradient."""

    def apply(self, graph: TrainingGraph, decisions: Any) -> Any:
        changes = super().apply(graph, decisions)
        graph.drop_gradient(graph.trainable[0].name)
        return changes


def test_only_an_exact_pass_may_drop_a_gradient() -> None:
    model, inputs = zoo.make("mlp", 6)
    with pytest.raises(PassError, match=r"vcas is UNBIASED, but the gradient of first\.weight is gone"):
        check_passes([(Forgetful(keep_rows=0.5), None)], model, inputs, dtypes=[torch.float64])


def test_two_projections_are_refused() -> None:
    model, inputs = zoo.make("mlp", 6)
    with pytest.raises(PassError, match="one at a time"):
        check_passes([PASSES["lsp"], PASSES["lsp"]], model, inputs)


@pytest.mark.parametrize("order", ["activations", "left", "right", "formed"])
def test_every_order_of_compression_sums_over_the_rows_that_are_left(order: str) -> None:
    model, inputs = zoo.make("mlp", 6)
    rewrite = Lsp(subspace=3, nonzeros=2, order=order)
    passes: list[tuple[Pass, Any]] = [PASSES["vcas"], (rewrite, all_sites(rewrite))]
    check_passes(passes, model, inputs, dtypes=[torch.float64], draws=DRAWS)


@pytest.mark.parametrize("name", ["bert", "lora"])
def test_all_passes_keep_their_contracts_on_a_forward_that_is_computed_again(name: str) -> None:
    only = {"runlora": "lora", "dead_rows": "bert", "linear_cross_entropy": "none whose batch is a symbol"}
    others = [n for n in BY_NAME if n in PASSES and only.get(n, name) == name]
    model, inputs = made(name)
    sequence = [(Recompute(), all_sites(Recompute())), *(PASSES[n] for n in others)]
    (check,) = check_passes(
        sequence, model, inputs, dtypes=[torch.float64], captured={torch.float64: captured(name, torch.float64)}, draws=DRAWS
    )
    assert check.preserves == {UNBIASED, PROJECTED}
    assert all(report.changes.changed for report in check.reports)
    assert check.reports[0].saved_bytes_after < check.reports[0].saved_bytes_before
    assert check.counted_flops == check.report.step_flops_after == flop_profile(check.graph).step
