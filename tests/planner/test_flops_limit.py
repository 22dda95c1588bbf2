"""A limit on FLOPs where other passes make a step cheaper or dearer: exact means first, and never above the limit."""

from __future__ import annotations

import copy

import pytest
import torch
from graphopt.passes import GreenTrainer, Lsp, RunLora
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt import BudgetError
from graphopt.analysis.flops import flop_profile
from graphopt.capture import capture
from graphopt.planner.costs import backward_costs
from graphopt.planner.flops_limit import FlopsLimit
from graphopt.planner.importance import Importance
from graphopt.planner.plan import Plan
from graphopt.planner.selection import select


class Adapted(nn.Module):
    """Layers with adapters that are so wide that merging them is cheaper."""

    def __init__(self, depth: int = 3, width: int = 24, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.ParameterList(nn.Parameter(torch.randn(width, width) / width**0.5, False) for _ in range(depth))
        self.down = nn.ParameterList(torch.randn(width, rank) / width**0.5 for _ in range(depth))
        self.up = nn.ParameterList(torch.randn(rank, width) / 10 for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(x @ base + x @ down @ up)
        return x.square().mean()


def adapted() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Adapted(), torch.randn(96, 24)


PASSES = (GreenTrainer(), RunLora(criterion="flops"))


def counted(opt: graphopt.OptimizedModule, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        opt(x).backward()
    return counter.get_total_flops()


def test_everything_is_trained_where_reordered_products_meet_the_limit_by_themselves() -> None:
    model, x = adapted()
    reference = copy.deepcopy(model)
    reference(x).backward()
    reordered = graphopt.optimize(model, (x,), passes=[PASSES[1]], backend="aot_eager").report.flops_ratio
    assert reordered < 0.95
    opt = graphopt.optimize(model, (x,), (reordered + 1) / 2, PASSES, "aot_eager")
    assert not opt.selects
    assert "greentrainer" in opt.report.plan.not_needed
    opt(x).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_what_reordered_products_save_trains_more_and_no_step_takes_more_than_the_limit() -> None:
    model, x = adapted()
    graph = capture(model, (x,))
    profile = flop_profile(graph)
    importance = Importance(dict.fromkeys(profile.order, 1.0), "given")
    gained = 0
    for percent in range(50, 100, 5):
        budget = graphopt.Budget(flops=percent / 100)
        limit = FlopsLimit(Plan(budget, PASSES), graph, profile)
        if limit.everything_fits:
            gained += 1
            continue
        try:
            alone = len(select(backward_costs(profile), [1.0] * len(profile.order), percent / 100).names)
        except BudgetError:
            alone = 0
        try:
            found = limit.select(importance)
        except BudgetError:
            assert not alone
            continue
        assert limit.step_flops(frozenset(found.names)) <= percent / 100 * profile.step
        assert len(found.names) >= alone
        gained += len(found.names) > alone
    assert gained > 3


@settings(max_examples=8, deadline=None)
@given(st.floats(0.4, 1.0))
def test_the_counted_step_keeps_to_any_limit(flops: float) -> None:
    model, x = adapted()
    full = flop_profile(capture(model, (x,))).step
    try:
        opt = graphopt.optimize(model, (x,), flops, PASSES, "aot_eager")
    except BudgetError as error:
        smallest = float(str(error).split("Smallest feasible: ")[1].rstrip("."))
        assert smallest > flops
        opt = graphopt.optimize(model, (x,), smallest, PASSES, "aot_eager")
        flops = smallest
    assert counted(opt, x) <= flops * full
    assert counted(opt, x) == opt.report.step_flops


class Headed(Adapted):
    """A head, whose gradient alone leaves nothing but the forward of the adapters."""

    def __init__(self, depth: int, width: int, rank: int) -> None:
        super().__init__(depth, width, rank)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(x @ base + x @ down @ up)
        return self.head(x).square().mean()


@pytest.mark.parametrize(("width", "rank"), [(2, 1), (12, 2), (12, 10)])
def test_the_smallest_limit_that_is_stated_is_feasible(width: int, rank: int) -> None:
    model, x = Headed(2, width, rank), torch.randn(30, width)
    full = flop_profile(capture(model, (x,))).step
    with pytest.raises(BudgetError) as error:
        graphopt.optimize(model, (x,), 0.01, PASSES, "aot_eager")
    smallest = float(str(error.value).split("Smallest feasible: ")[1].rstrip("."))
    opt = graphopt.optimize(model, (x,), smallest, PASSES, "aot_eager")
    assert counted(opt, x) <= smallest * full
    with pytest.raises(BudgetError):
        graphopt.optimize(model, (x,), smallest - 2e-4, PASSES, "aot_eager")


def test_gradients_whose_compression_costs_more_leave_fewer_tensors_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(6, 16)

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    wide = Lsp(subspace=16, nonzeros=8, criterion="flops")
    full = flop_profile(capture(model, (x,))).step
    dearer = graphopt.optimize(copy.deepcopy(model), (x,), passes=[wide], backend="aot_eager", loss=loss)
    dearer.make_optimizer(torch.optim.Adam)
    assert dearer.report.step_flops > full
    opt = graphopt.optimize(model, (x,), 0.9, [GreenTrainer(), wide], "aot_eager", loss=loss)
    assert opt.report.step_flops <= 0.9 * full


class Stack(nn.Module):
    """Layers whose gradients are cheaper compressed."""

    def __init__(self, depth: int = 4, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("flops", [0.6, 0.9])
@pytest.mark.parametrize("memory", [None, 0.5])
def test_steps_that_compare_projectors_keep_to_the_limit(flops: float, memory: float | None) -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(16, 128)
    found = graphopt.analyze(model, (x,), backend="aot_eager")
    passes = [GreenTrainer(), Lsp(subspace=12, nonzeros=4, check_every=2, criterion="flops")]
    budget = graphopt.Budget(flops=flops, memory=None if memory is None else int(memory * found.memory.peak_bytes))
    opt = graphopt.optimize(model, (x,), budget, passes, "aot_eager")
    assert "lsp" in [p.name for p in opt.plan.passes]
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(3):
        assert counted(opt, x) <= flops * found.flops.step
        optimizer.step()
        optimizer.zero_grad()
    assert not opt.reselect((x,), tolerance=1.0).changed  # what was planned is still within the limit


def test_tensors_that_are_given_are_counted_with_the_products_that_they_get() -> None:
    model, x = adapted()
    every = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    reordered = graphopt.optimize(model, (x,), passes=[PASSES[1]], backend="aot_eager").report.flops_ratio
    graphopt.optimize(model, (x,), reordered + 1e-3, [GreenTrainer(every), PASSES[1]], "aot_eager")
    with pytest.raises(BudgetError, match="tensors that were given"):
        graphopt.optimize(model, (x,), reordered - 1e-3, [GreenTrainer(every), PASSES[1]], "aot_eager")


def test_limits_on_flops_and_memory_together_count_reordered_products() -> None:
    model, x = adapted()
    reordered = graphopt.optimize(model, (x,), passes=[PASSES[1]], backend="aot_eager").report.flops_ratio
    free = graphopt.optimize(model, (x,), graphopt.Budget(memory="1GiB"), PASSES, "aot_eager")
    used = free.report.plan.remaining["memory"]["used"]
    for part in (1.0, 0.9):
        budget = graphopt.Budget(flops=(reordered + 1) / 2, memory=int(part * used))
        opt = graphopt.optimize(model, (x,), budget, [*PASSES, "recompute"], "aot_eager")
        assert opt.report.flops_ratio <= (reordered + 1) / 2
        assert opt.report.plan.remaining["memory"]["left"] >= 0
        assert part < 1 or not opt.selects


@pytest.mark.parametrize("flops", [0.3, 1.0])
def test_a_model_that_takes_no_flops_is_trained_as_a_whole(flops: float) -> None:
    model, x = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4)), torch.arange(6).view(2, 3)

    def loss(y: Tensor) -> Tensor:
        return (y * torch.arange(4.0)).sin().sum()

    reference = copy.deepcopy(model)
    loss(reference(x)).backward()
    for budget in (graphopt.Budget(flops=flops), graphopt.Budget(flops=flops, memory="1GiB", variance=0.1)):
        opt = graphopt.optimize(model, (x,), budget, backend="aot_eager", loss=loss)
        loss(opt(x)).backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
        assert opt.report.flops_ratio == 0.0
        opt.zero_grad()
    assert graphopt.api.pareto(model, (x,))[0].flops_ratio == 0.0
