"""Values that passes have a running graph take and return: inputs and slots of a user's own pass, the sampler's draws."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp, Vcas
from graphopt.passes.base import Changes, Preserves, Site
from torch import Tensor, nn

import graphopt
from graphopt.compat import InputDesc, OutputDesc, fake_like
from graphopt.graph import TrainingGraph
from graphopt.transforms.edit import insert_node
from tests import zoo
from tests.long_forms import long
from tests.messages import warnings_of

aten = torch.ops.aten

BACKENDS = ("aot_eager", "inductor")


class Scaled:
    """A user's pass: gradients of matrices are multiplied by a number that it supplies, and their sums are passed to it."""

    name = "scaled"
    preserves = Preserves.EXACT
    serves = ()

    def __init__(self) -> None:
        self.factor = 1.0
        self.sums: dict[str, float] = {}

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        return [Site(p.name) for p in graph.trainable if len(p.shape) == 2]

    def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
        factor = graph.add_input(InputDesc("given", "factor"), fake_like(graph.example, (1,), torch.float32))
        noise = graph.add_input(InputDesc("random", 3), fake_like(graph.example, (1,), torch.float64))
        results = list(graph.results)
        for name, gradient in graph.gradients().items():
            if name in decisions:
                anchor = gradient.next
                scaled = insert_node(graph.graph, aten.mul.Tensor, (gradient, factor), anchor)
                results[results.index(gradient)] = scaled
                total = insert_node(graph.graph, aten.sum.default, (gradient,), anchor)
                graph.graph.output_node().args = (tuple(results),)
                graph.add_backward_output(f"sum of {name}", total)
                results = list(graph.results)
        graph.add_backward_output("noise", noise)
        graph.module.recompile()
        return Changes(tuple(decisions))

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor:
        assert desc == InputDesc("given", "factor")
        return torch.full(size, self.factor, device=like.device)

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> None:
        self.sums[desc.target] = float(value)


class Broken(nn.Module):
    """Two graphs, and one weight in both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.second(self.first(hidden)), labels)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_users_pass_is_given_what_it_supplies_and_gets_its_slots(backend: str) -> None:
    model, inputs = zoo.make("mlp", 4)
    own = Scaled()
    opt = graphopt.optimize(model, inputs, passes=[own], backend=backend)
    reference = copy.deepcopy(model)
    reference(*inputs).backward()
    draws = []
    for factor in (1.0, 3.0, -0.5):
        own.factor = factor
        model.zero_grad()
        opt(*inputs).backward()
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert theirs.grad is not None
            scale = factor if theirs.dim() == 2 else 1.0
            torch.testing.assert_close(ours.grad, scale * theirs.grad)
            if theirs.dim() == 2:
                assert own.sums[f"sum of {name}"] == pytest.approx(float(theirs.grad.sum()), abs=1e-5)
        draws.append(own.sums["noise"])
    assert len(set(draws)) == 3
    assert all(0 <= draw < 1 for draw in draws)
    assert (opt.counters.compilations, opt.model_runs, opt.report.notes) == (1, 0, [])


def test_a_pass_that_does_not_say_what_its_input_is_names_it() -> None:
    class Nameless:
        name, preserves, serves = "nameless", Preserves.EXACT, ()
        applicable, apply = Scaled.applicable, Scaled.apply

    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, passes=[Nameless()], backend="aot_eager")
    with pytest.raises(graphopt.PassError, match="'factor'"):
        opt(*inputs).backward()


def test_each_of_several_passes_gets_what_it_added_alone() -> None:
    class Other(Scaled):
        name = "other"

        def apply(self, graph: TrainingGraph, decisions: Any) -> Changes:
            graph.add_backward_output("bias", graph.gradients()["0.bias"])
            graph.add_backward_output("sum of 0.weight", graph.gradients()["0.bias"])  # as another pass calls its own
            return Changes(tuple(decisions))

        def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> None:
            self.sums[desc.target] = float(value.sum())

    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(4, 8),)
    scaled, other = Scaled(), Other()
    lsp = Lsp(subspace=4, nonzeros=2, criterion="flops")
    opt = graphopt.optimize(model, inputs, passes=[scaled, other, lsp], loss=lambda y: y.square().sum(), backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        opt(*inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(scaled.sums) == {"sum of 0.weight", "sum of 1.weight", "noise"}
    assert set(other.sums) == {"bias", "sum of 0.weight"}
    assert other.sums["bias"] == other.sums["sum of 0.weight"] != scaled.sums["sum of 0.weight"]
    assert not any(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_graphs_share_a_parameter(backend: str) -> None:
    model = Broken()
    inputs = torch.randn(5, 6), torch.randint(0, 3, (5,))
    reference = copy.deepcopy(model)
    reference(*inputs).backward()
    opt = graphopt.optimize(model, inputs, budget=1.0, backend=backend)
    opt(*inputs).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("name", "backend"), [("bert", "aot_eager"), ("mlp", "inductor"), *long(("bert", "inductor"))])
def test_rows_are_left_out_at_every_batch_size_and_length(name: str, backend: str) -> None:
    """The partition function is shown the batch as a symbol, and then fixes it: another size is another graph."""
    model, inputs = zoo.make(name, 8)
    model = zoo.in_one_block(model)
    opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5)], backend=backend)
    parts = []
    with warnings_of() as texts:
        for size in (8, 5, 8, 5):
            batch = zoo.rows(inputs, size)
            zoo.loss_of(zoo.call(opt, batch)).backward()
            assert opt.last_step is not None
            parts.append(opt.last_step.sampled_part)
            tensors = batch.values() if isinstance(batch, dict) else batch
            assert not any(hasattr(t, "_dynamo_weak_dynamic_indices") for t in tensors)
    assert texts == []
    assert max(parts) < 0.9
    assert parts[:2] == parts[2:]
    assert opt.counters.compilations <= 2  # one for each size


def test_a_batch_of_one_is_not_sampled_and_says_so() -> None:
    model, inputs = zoo.make("bert", 8, layers=1)
    opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    one = zoo.rows(inputs, 1)
    zoo.call(opt, one).loss.backward()
    ours = [p.grad for p in model.parameters()]
    assert opt.last_step is not None
    assert opt.last_step.sampled_part == 1
    assert any("not sampled" in note for note in opt.report.notes)
    model.zero_grad()
    zoo.call(model, one).loss.backward()
    torch.testing.assert_close(ours, [p.grad for p in model.parameters()])


def test_draws_repeat_with_the_seed_and_leave_the_global_stream_alone() -> None:
    gradients = []
    for _ in range(2):
        model, inputs = zoo.make("mlp", 8)
        opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5, seed=7)], backend="aot_eager")
        before = torch.get_rng_state()
        for _ in range(2):
            model.zero_grad()
            zoo.call(opt, inputs).backward()
        assert torch.equal(torch.get_rng_state(), before)
        gradients.append([copy.deepcopy(p.grad) for p in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
