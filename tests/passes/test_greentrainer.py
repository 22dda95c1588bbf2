import expecttest
import pytest
import torch
from graphopt.passes import GreenTrainer, run_pass
from torch import nn

from graphopt import PassError
from graphopt.analysis.flops import flop_profile
from graphopt.capture import capture
from graphopt.report.python_text import readable
from graphopt.testing import check_pass
from tests import zoo


class Two(nn.Module):
    """y = W2 relu(W1 x), mean of squares: the smallest graph with a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).square().sum()


class GoldenDumps(expecttest.TestCase):
    def test_cut_below_the_deepest_selected_layer_removes_the_chain(self) -> None:
        graph = capture(Two(), (torch.randn(5, 3),))
        self.assertExpectedInline(
            readable(graph),
            """\
# joint graph; B is the batch size
import torch
aten = torch.ops.aten

def step(
    first_weight: "float32[4, 3]",  # parameter first.weight
    second_weight: "float32[2, 4]",  # parameter second.weight
    input_0: "float32[B, 3]",  # input 0
    grad_output_0: "float32[]",  # gradient of output 0
):
    B = input_0.size(0)
    # forward
    t: "float32[3, 4]" = aten.t.default(first_weight)
    mm: "float32[B, 4]" = aten.mm.default(input_0, t)
    relu: "float32[B, 4]" = aten.relu.default(mm)
    detach: "float32[B, 4]" = aten.detach.default(relu)
    t_1: "float32[4, 2]" = aten.t.default(second_weight)
    mm_1: "float32[B, 2]" = aten.mm.default(relu, t_1)
    pow_1: "float32[B, 2]" = aten.pow.Tensor_Scalar(mm_1, 2)
    sum_1: "float32[]" = aten.sum.default(pow_1)
    # backward
    expand: "float32[B, 2]" = aten.expand.default(grad_output_0, [B, 2])
    # forward
    pow_2: "float32[B, 2]" = aten.pow.Tensor_Scalar(mm_1, 1.0)
    mul_10: "float32[B, 2]" = aten.mul.Scalar(pow_2, 2.0)
    # backward
    mul_11: "float32[B, 2]" = aten.mul.Tensor(expand, mul_10)
    t_2: "float32[2, B]" = aten.t.default(mul_11)
    mm_2: "float32[2, 4]" = aten.mm.default(t_2, relu)
    t_3: "float32[4, 2]" = aten.t.default(mm_2)
    # forward
    t_4: "float32[2, 4]" = aten.t.default(t_1)
    # backward
    mm_3: "float32[B, 4]" = aten.mm.default(mul_11, t_4)
    t_5: "float32[2, 4]" = aten.t.default(t_3)
    # forward
    detach_1: "float32[B, 4]" = aten.detach.default(detach)
    # backward
    threshold_backward: "float32[B, 4]" = aten.threshold_backward.default(mm_3, detach_1, 0)
    t_6: "float32[4, B]" = aten.t.default(threshold_backward)
    mm_4: "float32[4, 3]" = aten.mm.default(t_6, input_0)
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
        rewritten, report = run_pass(GreenTrainer(), graph, {"second.weight"})
        self.assertExpectedInline(
            readable(rewritten),
            """\
# joint graph; B is the batch size
import torch
aten = torch.ops.aten

def step(
    first_weight: "float32[4, 3]",  # parameter first.weight
    second_weight: "float32[2, 4]",  # parameter second.weight
    input_0: "float32[B, 3]",  # input 0
    grad_output_0: "float32[]",  # gradient of output 0
):
    B = input_0.size(0)
    # forward
    t: "float32[3, 4]" = aten.t.default(first_weight)
    mm: "float32[B, 4]" = aten.mm.default(input_0, t)
    relu: "float32[B, 4]" = aten.relu.default(mm)
    t_1: "float32[4, 2]" = aten.t.default(second_weight)
    mm_1: "float32[B, 2]" = aten.mm.default(relu, t_1)
    pow_1: "float32[B, 2]" = aten.pow.Tensor_Scalar(mm_1, 2)
    sum_1: "float32[]" = aten.sum.default(pow_1)
    # backward
    expand: "float32[B, 2]" = aten.expand.default(grad_output_0, [B, 2])
    # forward
    pow_2: "float32[B, 2]" = aten.pow.Tensor_Scalar(mm_1, 1.0)
    mul_10: "float32[B, 2]" = aten.mul.Scalar(pow_2, 2.0)
    # backward
    mul_11: "float32[B, 2]" = aten.mul.Tensor(expand, mul_10)
    t_2: "float32[2, B]" = aten.t.default(mul_11)
    mm_2: "float32[2, 4]" = aten.mm.default(t_2, relu)
    t_3: "float32[4, 2]" = aten.t.default(mm_2)
    t_5: "float32[2, 4]" = aten.t.default(t_3)
    return (
        sum_1,  # output 0
        None,  # gradient of parameter first.weight
        t_5,  # gradient of parameter second.weight
        None,
    )
""",
        )
        self.assertEqual(report.changes.changed, ("first.weight",))

    def test_dropping_only_an_upper_weight_keeps_the_chain(self) -> None:
        graph = capture(Two(), (torch.randn(5, 3),))
        rewritten, _ = run_pass(GreenTrainer(), graph, {"first.weight"})
        self.assertExpectedInline(
            readable(rewritten),
            """\
# joint graph; B is the batch size
import torch
aten = torch.ops.aten

def step(
    first_weight: "float32[4, 3]",  # parameter first.weight
    second_weight: "float32[2, 4]",  # parameter second.weight
    input_0: "float32[B, 3]",  # input 0
    grad_output_0: "float32[]",  # gradient of output 0
):
    B = input_0.size(0)
    # forward
    t: "float32[3, 4]" = aten.t.default(first_weight)
    mm: "float32[B, 4]" = aten.mm.default(input_0, t)
    relu: "float32[B, 4]" = aten.relu.default(mm)
    detach: "float32[B, 4]" = aten.detach.default(relu)
    t_1: "float32[4, 2]" = aten.t.default(second_weight)
    mm_1: "float32[B, 2]" = aten.mm.default(relu, t_1)
    pow_1: "float32[B, 2]" = aten.pow.Tensor_Scalar(mm_1, 2)
    sum_1: "float32[]" = aten.sum.default(pow_1)
    # backward
    expand: "float32[B, 2]" = aten.expand.default(grad_output_0, [B, 2])
    # forward
    pow_2: "float32[B, 2]" = aten.pow.Tensor_Scalar(mm_1, 1.0)
    mul_10: "float32[B, 2]" = aten.mul.Scalar(pow_2, 2.0)
    # backward
    mul_11: "float32[B, 2]" = aten.mul.Tensor(expand, mul_10)
    # forward
    t_4: "float32[2, 4]" = aten.t.default(t_1)
    # backward
    mm_3: "float32[B, 4]" = aten.mm.default(mul_11, t_4)
    # forward
    detach_1: "float32[B, 4]" = aten.detach.default(detach)
    # backward
    threshold_backward: "float32[B, 4]" = aten.threshold_backward.default(mm_3, detach_1, 0)
    t_6: "float32[4, B]" = aten.t.default(threshold_backward)
    mm_4: "float32[4, 3]" = aten.mm.default(t_6, input_0)
    t_7: "float32[3, 4]" = aten.t.default(mm_4)
    t_8: "float32[4, 3]" = aten.t.default(t_7)
    return (
        sum_1,  # output 0
        t_8,  # gradient of parameter first.weight
        None,  # gradient of parameter second.weight
        None,
    )
""",
        )


def test_flops_of_the_cut_are_forward_own_gradient_and_chain() -> None:
    graph = capture(Two(), (torch.randn(5, 3),))
    first, second = 2 * 5 * 3 * 4, 2 * 5 * 4 * 2
    for train, expected in (({"second.weight"}, second), ({"first.weight"}, second + first)):
        rewritten, report = run_pass(GreenTrainer(), graph, train)
        assert flop_profile(rewritten).backward == expected == flop_profile(graph).cost(train)
        assert report.step_flops_before == (first + second) * 2 + second
        assert report.step_flops_after == first + second + expected


def test_activations_that_only_the_cut_read_are_no_longer_saved() -> None:
    model, inputs = zoo.make("mlp", 4)
    graph = capture(model, inputs)
    _, report = run_pass(GreenTrainer(), graph, {"third.weight"})
    assert report.saved_bytes_after < report.saved_bytes_before


def test_caller_graph_is_left_alone_and_reasons_are_given() -> None:
    model, inputs = zoo.make("mlp", 4)
    graph = capture(model, inputs)
    before = readable(graph)
    _, report = run_pass(GreenTrainer(), graph, {"third.bias"})
    assert readable(graph) == before
    assert report.changes.left_alone == {"third.bias": "selected for training"}


@pytest.mark.parametrize("decisions", [set(), {"nonsense"}, {"third.bias", "nonsense"}])
def test_decisions_that_make_no_sense_are_refused(decisions: set[str]) -> None:
    model, inputs = zoo.make("mlp", 4)
    with pytest.raises(PassError):
        run_pass(GreenTrainer(), capture(model, inputs), decisions)


def test_every_subset_of_a_small_model_is_exact() -> None:
    model, inputs = zoo.make("mlp", 3)
    names = [n for n, _ in model.named_parameters()]
    for bits in range(1, 1 << len(names), 3):
        chosen = {n for i, n in enumerate(names) if bits >> i & 1}
        (check,) = check_pass(GreenTrainer(), model, inputs, chosen, dtypes=(torch.float64,))
        assert check.error < 1e-12


class Breaking(GreenTrainer):
    """A pass that scales a gradient: what the harness must catch."""

    def apply(self, graph, decisions):  # type: ignore[no-untyped-def]
        changes = super().apply(graph, decisions)
        output = graph.graph.output_node()
        results = list(graph.results)
        position = next(i for i, d in enumerate(graph.outputs) if d.kind == "gradient" and results[i] is not None)
        with graph.graph.inserting_before(output):
            doubled = graph.graph.call_function(torch.ops.aten.mul.Tensor, (results[position], 2))
            doubled.meta = dict(results[position].meta)
        results[position] = doubled
        output.args = (tuple(results),)
        graph.module.recompile()
        return changes


def test_the_harness_catches_a_wrong_gradient() -> None:
    model, inputs = zoo.make("mlp", 4)
    with pytest.raises(PassError, match="differs from eager"):
        check_pass(Breaking(), model, inputs)
