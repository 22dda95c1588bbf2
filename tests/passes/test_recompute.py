"""Computing segments of the forward again: the same gradients, fewer bytes kept, FLOPs counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graphopt.passes import Recompute, run_pass
from torch import Tensor, nn

import graphopt
from graphopt import PassError
from graphopt.analysis.segments import find_segments, segments_named
from graphopt.analysis.step_memory import step_memory
from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.graph import TrainingGraph
from graphopt.testing import check_pass
from tests import zoo
from tests.long_forms import long
from tests.messages import warnings_of


class Tower(nn.Module):
    """Blocks that widen by eight and narrow again, with dropout."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Dropout(dropout), nn.Linear(128, 16))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def captured(model: nn.Module, inputs: object) -> TrainingGraph:
    args, kwargs = as_call(inputs)
    return capture_to_run(model.train(), args, kwargs, 0)


def test_segments_lie_between_the_blocks_of_a_tower() -> None:
    segments = [s for s in find_segments(captured(Tower(), (torch.randn(64, 16),))) if s.flops]
    assert len(segments) == 4
    assert [set(s.parameters) for s in segments] == [
        {f"blocks.{i}.{j}.{kind}" for j in (0, 3) for kind in ("weight", "bias")} for i in range(4)
    ]
    assert all(s.flops >= 2 * 64 * 16 * 128 for s in segments)


def test_neighbouring_segments_can_be_merged() -> None:
    graph = captured(Tower(depth=5), (torch.randn(64, 16),))
    finest = find_segments(graph)
    for merged in (2, 4):
        segments = find_segments(graph, merged)
        assert len(segments) == -(-len(finest) // merged)
        groups = [finest[i : i + merged] for i in range(0, len(finest), merged)]
        for segment, group in zip(segments, groups, strict=True):
            assert segment.name.split()[0] == "-".join(dict.fromkeys(s.name.split()[0] for s in (group[0], group[-1])))
            assert set(segment.nodes) >= {node for s in group for node in s.nodes}
            assert segment.parameters == tuple(name for s in group for name in s.parameters)
        assert segments_named(graph, [s.name for s in segments]) == segments
    assert segments_named(graph, [s.name for s in finest]) == finest


@pytest.mark.parametrize("merged", [2, 8])
def test_merged_segments_keep_gradients_exact(merged: int) -> None:
    def names(graph: TrainingGraph) -> tuple[str, ...]:
        return tuple(segment.name for segment in find_segments(graph, merged) if segment.saved_bytes)

    model, x = Tower(depth=5), torch.randn(8, 16)
    graphs = {dtype: captured(copy.deepcopy(model).to(dtype), (x.to(dtype),)) for dtype in (torch.float64, torch.float32)}
    for graph, check in zip(graphs.values(), check_pass(Recompute(), model, (x,), names, captured=graphs), strict=True):
        assert len(names(graph)) == -(-5 // merged)
        assert check.report.changes.changed == names(graph)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_recomputed_tower_keeps_one_block_at_a_time(backend: str) -> None:
    graph = captured(Tower(depth=5), (torch.randn(2048, 16),))
    sites = [site.name for site in Recompute().applicable(graph)]
    rewritten, report = run_pass(Recompute(), graph, sites)
    before, after = (step_memory(g.clone(), backend, "sgd").peak_bytes for g in (graph, rewritten))
    assert after < 0.6 * before
    assert report.saved_bytes_after < 0.3 * report.saved_bytes_before
    assert report.step_flops_after > report.step_flops_before


@pytest.mark.parametrize("name", ["bert", "cnn", "lstm", *long("llama", "lora", "t5-tied")])
def test_gradients_stay_exact_and_flops_are_those_that_run(name: str) -> None:
    model, inputs = zoo.make(name, batch=4)
    for check in check_pass(Recompute(), model, inputs, captured=zoo.in_both_precisions(name)):
        assert check.report.changes.changed


def test_dropout_is_drawn_once() -> None:
    torch.manual_seed(0)
    model, x = Tower(dropout=0.5), torch.randn(8, 16)
    graph = captured(model, (x,))
    rewritten, _ = run_pass(Recompute(), graph, [s.name for s in Recompute().applicable(graph)])
    again = [n for n in rewritten.graph.nodes if n.meta.get("recompute") is not None]
    assert again
    assert not any("dropout" in str(n.target) or "bernoulli" in str(n.target) or "rand" in str(n.target) for n in again)


@torch.library.custom_op("graphopt_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape[-1])


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output / inputs[0]),
)


class Noisy(nn.Module):
    """A random operator that does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(noisy(torch.exp(self.first(x)))).sum()


def test_what_a_custom_operator_returned_is_kept() -> None:
    graph = captured(Noisy(), (torch.randn(6, 4),))
    again = {n.target for segment in find_segments(graph) for n in segment.nodes}
    assert torch.ops.graphopt_tests.noisy.default not in again
    assert torch.ops.aten.addmm.default in again


def test_an_unknown_segment_is_refused() -> None:
    with pytest.raises(PassError, match="no segment '99'"):
        run_pass(Recompute(), captured(Tower(), (torch.randn(4, 16),)), ["99"])


@pytest.mark.parametrize(
    ("segments", "message"), [(("1 blocks.0.3", "99"), "has no segment .99.: it has 1 blocks.0.3, 2"), ("99", "'99' is one name")]
)
def test_segments_that_the_example_has_not_are_refused_at_once(segments: Any, message: str) -> None:
    with pytest.raises(PassError, match=message):
        graphopt.optimize(Tower(), (torch.randn(4, 16),), passes=[Recompute(segments)], backend="aot_eager")


class AsLong(Tower):
    """As many blocks as the input is long."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: x.shape[1]]:
            x = x + block(x)
        return x.square().mean()


def test_inputs_whose_graph_has_other_segments_have_all_of_theirs_computed_again() -> None:
    torch.manual_seed(0)
    model, long, short = AsLong(depth=6).double(), torch.randn(8, 6, 16).double(), torch.randn(8, 2, 16).double()
    names = [site.name for site in Recompute().applicable(captured(model, (long,)))]
    opt = graphopt.optimize(model, (long,), passes=[Recompute(tuple(names[-2:]))], backend="aot_eager")
    for x in (long, short):
        with warnings_of() as warned:
            opt(x).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        model(x).backward()
        torch.testing.assert_close(found, [p.grad for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        assert not warned
        assert opt.report.passes == ["recompute"]


class Around(nn.Module):
    """A model with a child that is called "model", as those of Hugging Face have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("around", [0, 1, 2])
def test_the_segments_that_were_named_are_those_that_run(around: int) -> None:
    model: nn.Module = Tower()
    for _ in range(around):
        model = Around(model)
    x = torch.randn(64, 16)
    named = Recompute().applicable(captured(model, (x,)))[1].name
    opt = graphopt.optimize(model, (x,), passes=[Recompute((named,))], backend="aot_eager")
    opt(x).backward()
    assert opt.last_step is not None
    assert [report.changes.changed for report in opt.last_step.reports] == [(named,)]


class Normed(nn.Module):
    """Operators of several results, whose statistics are kept or whose values pass a cut, partly frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 1, stride=2, padding=1, bias=False)
        self.batch, self.group, self.head = nn.BatchNorm2d(2), nn.GroupNorm(2, 2), nn.Linear(16, 3)
        for frozen in (self.batch.bias, *self.group.parameters(), self.head.weight):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.softplus(self.group(nn.functional.silu(self.batch(self.first(x)))))
        return self.head(x.flatten(1)).square().mean()


def test_operators_of_several_results_are_computed_again_as_a_whole_or_not_at_all() -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(6, 2, 5, 1)
    graph = captured(model, (x,))
    for chosen in ([s.name for s in Recompute().applicable(graph)], *([s.name] for s in Recompute().applicable(graph))):
        rewritten, _ = run_pass(Recompute(), graph, chosen)
        for backend in ("aot_eager", "inductor"):
            assert step_memory(rewritten, backend).peak_bytes > 0
    for check in check_pass(Recompute(), model, (x,), [s.name for s in Recompute().applicable(graph)]):
        assert check.report.changes.changed


class Attention(nn.Module):
    """Written out, so that Inductor fuses it into an operator that could draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (f(x).view(*x.shape[:2], 4, 4).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = torch.softmax(query @ key.transpose(-2, -1) / 2.0, -1)
        return self.out((weights @ value).transpose(1, 2).reshape(x.shape)).square().mean()


def test_attention_that_inductor_fuses_is_computed_again() -> None:
    graph = capture_to_run(Attention(), (torch.randn(3, 5, 16),), {})
    rewritten, _ = run_pass(Recompute(), graph, {site.name for site in Recompute().applicable(graph)})
    assert step_memory(rewritten, "inductor", None).peak_bytes > 0
