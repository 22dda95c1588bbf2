"""Compressed gradients: P'GQ of autograd's G, without G where the order allows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import expecttest
import pytest
import torch
from graphopt.passes import GreenTrainer, Lsp, run_pass
from graphopt.passes.lsp.choose import ORDERS, CompressionShape, choose_compressions, order_flops
from graphopt.passes.lsp.weight_gradients import find_weight_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt import PassError
from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.analysis.flops import flop_profile
from graphopt.analysis.step_memory import step_memory
from graphopt.calls import as_call
from graphopt.capture import capture, capture_to_run
from graphopt.report.python_text import readable
from graphopt.specialise import specialise, symbolic
from graphopt.testing import check_pass
from graphopt.transforms.partition import split
from tests import zoo
from tests.long_forms import long
from tests.measure import peak_and_rest

MODELS = ["bert", "lstm", "cnn", *long("llama", "opt", "t5-tied", "gpt2", "vit")]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.second = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().sum()


class GoldenDumps(expecttest.TestCase):
    def test_no_matrix_of_the_weights_shape_is_left(self) -> None:
        graph = capture(Two(), (torch.randn(5, 6),))
        rewritten, _ = run_pass(Lsp(subspace=3, nonzeros=1), graph, {"first.weight": "activations"})
        text = readable(rewritten)
        self.assertExpectedInline(
            text[text.index("    # backward") :],
            """\
    # backward
    expand: "float32[B, 4]" = aten.expand.default(grad_output_0, [B, 4])
    # forward
    pow_2: "float32[B, 4]" = aten.pow.Tensor_Scalar(mm_1, 1.0)
    mul_6: "float32[B, 4]" = aten.mul.Scalar(pow_2, 2.0)
    # backward
    mul_7: "float32[B, 4]" = aten.mul.Tensor(expand, mul_6)
    t_2: "float32[4, B]" = aten.t.default(mul_7)
    mm_2: "float32[4, 8]" = aten.mm.default(t_2, mm)
    t_3: "float32[8, 4]" = aten.t.default(mm_2)
    # forward
    t_4: "float32[4, 8]" = aten.t.default(t_1)
    # backward
    mm_3: "float32[B, 8]" = aten.mm.default(mul_7, t_4)
    t_5: "float32[4, 8]" = aten.t.default(t_3)
    t_6: "float32[8, B]" = aten.t.default(mm_3)
    # forward
    t_default: "float32[6, B]" = aten.t.default(input_0)
    # backward
    clone_default: "float32[8, B]" = aten.clone.default(t_6, memory_format=torch.contiguous_format)
    # forward
    clone_default_1: "float32[6, B]" = aten.clone.default(t_default, memory_format=torch.contiguous_format)
    # backward
    combine_rows_default: "float32[3, B]" = graphopt.combine_rows.default(
        clone_default,
        given_left_rows_of_first_weight,
        given_left_values_of_first_weight,
    )
    # forward
    combine_rows_default_1: "float32[3, B]" = graphopt.combine_rows.default(
        clone_default_1,
        given_right_rows_of_first_weight,
        given_right_values_of_first_weight,
    )
    t_default_1: "float32[B, 3]" = aten.t.default(combine_rows_default_1)
    # backward
    mm_default: "float32[3, 3]" = aten.mm.default(combine_rows_default, t_default_1)
    return (
        sum_1,  # output 0
        mm_default,  # gradient of compressed first.weight
        t_5,  # gradient of parameter second.weight
        None,
    )
""",
        )


@pytest.mark.parametrize("name", MODELS)
def test_the_compressed_gradient_is_the_image_of_autograds(name: str) -> None:
    model, inputs = zoo.make(name, 4)
    for check in check_pass(Lsp(subspace=3, nonzeros=2), model, inputs, captured=zoo.in_both_precisions(name)):
        assert check.report.changes.changed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("nonzeros", [3, 5])
@pytest.mark.parametrize("name", ["mlp"])
def test_every_order_gives_the_same(name: str, nonzeros: int, order: str) -> None:
    model, inputs = zoo.make(name, 4)
    rewrite = Lsp(subspace=5, nonzeros=nonzeros, order=order)
    decisions = [site.name for site in rewrite.applicable(capture_to_run(model, *as_call(inputs), 0))]
    check_pass(rewrite, model, inputs, decisions)


class Odd(nn.Module):
    """Weights used twice, transposed, summed with themselves, and in a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.mixed = nn.Parameter(torch.randn(8, 8) / 3)
        self.inside = nn.Linear(8, 8)
        self.summed = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = x @ self.mixed + 0.5 * (x @ self.mixed.t())
        x = checkpoint(lambda y: torch.tanh(self.inside(y)), x, use_reentrant=False)
        x = x @ self.summed - x @ (2 * self.summed)
        return x.square().mean()


@pytest.mark.parametrize(("order", "nonzeros"), [(None, 3), (None, 4), *((order, 3) for order in ORDERS)])
def test_odd_uses_of_weights(order: str | None, nonzeros: int) -> None:
    torch.manual_seed(0)
    rewrite = Lsp(subspace=4, nonzeros=nonzeros, order=order)
    names = ["twice.weight", "mixed", "inside.weight", "summed"]
    dtypes = [torch.float64] if order else [torch.float64, torch.float32]
    check_pass(rewrite, Odd(), (torch.randn(3, 2, 8),), names, dtypes=dtypes)


@pytest.mark.parametrize("name", ["gpt2", *long("llama", "bert")])
def test_with_the_activations_order_no_gradient_of_a_weight_is_ever_formed(name: str) -> None:
    model, inputs = zoo.make(name, 4)
    graph = capture_to_run(model, *as_call(inputs), 0)
    rewrite = Lsp(subspace=3, nonzeros=2, order="activations")
    names = [site.name for site in rewrite.applicable(graph)]
    rewritten, _ = run_pass(rewrite, graph, names)
    assert rewritten.compressed == set(names)
    halves = split(symbolic(specialise(rewritten, 4), decompose=True), inductor=True)
    products = {gradient.node.meta["val"].shape for gradient in find_weight_gradients(graph) if gradient.name in names}
    tokens = 4 * 12
    for node in halves.backward.graph.nodes:
        value = node.meta.get("val")
        if node.target is torch.ops.aten.mm.default and isinstance(value, Tensor) and value.shape in products:
            assert tokens in value.shape, node.name


@pytest.mark.parametrize("nonzeros", [4, 6])
@pytest.mark.parametrize("order", ORDERS)
def test_flops_of_an_order_are_those_that_run(order: str, nonzeros: int) -> None:
    shape = CompressionShape(m=16, n=12, rows=20, size=6, nonzeros=nonzeros)
    model = nn.Sequential(nn.Linear(12, 16, bias=False))
    graph = capture(model, (torch.randn(20, 12),))
    rewritten, _ = run_pass(Lsp(subspace=6, nonzeros=nonzeros), graph, {"0.weight": order})
    removed = 2 * 16 * 12 * 20
    assert flop_profile(rewritten).step == flop_profile(graph).step - removed + order_flops(order, shape)


def test_the_planner_takes_what_costs_least_at_the_batch_at_hand() -> None:
    model = nn.Linear(64, 64, bias=False)
    graphs = {b: replace(capture(model, (torch.randn(4, 64),)), batch_size=b) for b in (2, 4096)}
    rewrite = Lsp(subspace=16, nonzeros=4, criterion="flops")
    chosen = {b: choose_compressions(graph, rewrite, ["weight"], lambda *_: None)["weight"] for b, graph in graphs.items()}
    assert chosen[2].order in ORDERS
    assert chosen[4096].order == "activations"
    assert chosen[4096].flops < chosen[4096].formed_flops == 2 * 64 * 64 * 4096
    timed = choose_compressions(graphs[4096], Lsp(subspace=16, nonzeros=4), ["weight"], _Times)["weight"]
    assert timed.order == "formed"
    assert timed.seconds == (1.0 + 2 * 50.0, 1.0 + 2 * 50.0)
    assert "formed" in str(timed)


class _Times:
    """A machine on which sums of rows are slow but for narrow ones."""

    def __init__(self, *_: Any) -> None:
        pass

    def product(self, m: int, k: int, n: int) -> float:
        return 1.0

    def combined(self, rows: int, entries: int, table: int, width: int) -> float:
        return 50.0 if width <= 64 else 1000.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"subspace": 0}, "subspace=0 must be a whole number"),
        ({"subspace": 1.5}, "subspace=1.5"),
        ({"subspace": 4, "nonzeros": 5}, "nonzeros=5 is more than subspace=4"),
        ({"threshold": 0}, "threshold=0 must be a number above 0"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"check_every": 0}, "check_every=0"),
        ({"batches": 0}, "batches=0"),
        ({"order": "sideways"}, "order='sideways' is unknown. Use one of activations"),
        ({"criterion": "luck"}, "criterion='luck'"),
    ],
)
def test_bad_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError, match=message):
        Lsp(**arguments)


def test_a_subspace_that_no_weight_can_have_is_refused_with_the_largest_possible() -> None:
    model, inputs = zoo.make("bert", 4)
    with pytest.raises(
        PassError, match=r"cannot be compressed to 33 x 33|largest subspace that a weight of this model can have is 32"
    ):
        graphopt.optimize(model, inputs, passes=[Lsp(subspace=33, nonzeros=1)], backend="aot_eager")


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("classifier.weight", "2 x 32 is smaller than subspace=8"),
        ("bert.embeddings.word_embeddings.weight", "embedding_dense_backward"),
        ("nothing", "no trained matrix"),
    ],
)
def test_a_weight_that_was_named_and_cannot_be_compressed_is_refused_by_name(weight: str, message: str) -> None:
    model, inputs = zoo.make("bert", 4)
    with pytest.raises(PassError, match=message):
        graphopt.optimize(model, inputs, passes=[Lsp(subspace=8, nonzeros=1, weights=(weight,))], backend="aot_eager")


def test_auto_compresses_nothing_that_nobody_asked_for() -> None:
    model, inputs = zoo.make("bert", 4)
    opt = graphopt.optimize(model, inputs, backend="aot_eager")
    assert "lsp" not in opt.states


def test_a_cut_backward_compresses_what_is_left() -> None:
    model, inputs = zoo.make("bert", 4)
    graph = capture_to_run(model, *as_call(inputs), 0)
    cut, _ = run_pass(GreenTrainer(), graph, {"classifier.weight", "bert.encoder.layer.1.output.dense.weight"})
    sites = [site.name for site in Lsp(subspace=4, nonzeros=2).applicable(cut)]
    assert sites == ["bert.encoder.layer.1.output.dense.weight"]


class Wide(nn.Module):
    """Weights that are large against the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_memory_falls_as_predicted() -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(256, 512),)
    peaks, predicted = [], []
    for passes in ([], [Lsp(subspace=32, nonzeros=2, order="activations", threshold=1e9)]):
        opt = graphopt.optimize(Wide(), inputs, passes=passes, backend="aot_eager")
        optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-4)
        for _ in range(3):  # the first compares projectors with gradients
            opt(*inputs).backward()
            optimizer.step()
            optimizer.zero_grad()

        def step(opt: Any = opt) -> None:
            opt(*inputs).backward()

        peaks.append(peak_and_rest(step)[0])
        graph = opt.last_step.graph
        memory = step_memory(graph, "aot_eager", None)
        standing = sum(int(b.size) for b in memory.blocks if b.category in ("parameter", "buffer", "input"))
        predicted.append(memory.peak_bytes - standing)
    gradients = 6 * 4 * 512 * 512
    assert peaks[0] - peaks[1] > 0.4 * gradients
    assert predicted[0] - predicted[1] == pytest.approx(peaks[0] - peaks[1], rel=0.01)
    for measured, expected in zip(peaks, predicted, strict=True):
        assert measured == pytest.approx(expected, rel=0.01)


class RegionOfProducts(nn.Module):
    """A checkpointed region whose second product's gradient alone reads the result of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(size)) for size in ((5, 7), (7, 4)))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, x + 0.5 * x.flip([0]), use_reentrant=False).sum()

    def region(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, (x @ self.first).view(-1, 7), self.second)


@pytest.mark.parametrize("order", ["activations", "left", "right", "formed"])
def test_what_a_compressed_gradient_reads_of_a_checkpointed_region_is_counted(order: str) -> None:
    torch.manual_seed(0)
    model, x = RegionOfProducts(), torch.randn(6, 2, 5)
    opt = graphopt.optimize(model, (x,), passes=[Lsp(subspace=2, nonzeros=1, order=order)], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.0)
    opt(x).backward()  # looks at full gradients
    optimizer.step()
    with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
        opt(x).backward()
    assert opt.last_step is not None
    assert counter.get_total_flops() == flop_profile(opt.last_step.graph).step == opt.report.step_flops
