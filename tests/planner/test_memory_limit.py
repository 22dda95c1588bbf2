"""A limit on memory: met by computing again what costs least, or refused with the smallest that is feasible."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from graphopt.passes import RunLora
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import graphopt
from graphopt import BudgetError
from graphopt.capture import capture_to_run
from graphopt.planner.memory_limit import MemoryLimit
from tests.messages import warnings_of


class Net(nn.Module):
    """Layers of several widths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 32), nn.Linear(32, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(Net(), LoraConfig(r=16, target_modules=["first", "second", "third"], init_lora_weights=False))
    return model.train()


BATCH = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))


def peak(opt: graphopt.OptimizedModule) -> int:
    step = opt.last_step
    assert step is not None
    return MemoryLimit(0, "aot_eager").peak_of(step.graph, 24)


def optimized(model: nn.Module, memory: int | None) -> graphopt.OptimizedModule:
    passes = [RunLora(criterion="flops"), *([] if memory is None else ["recompute"])]
    opt = graphopt.optimize(model, (BATCH,), graphopt.Budget(memory=memory), passes=passes, backend="aot_eager")
    opt(BATCH).backward()
    return opt


def test_a_limit_is_met_with_the_same_gradients() -> None:
    model = adapted()
    reference = copy.deepcopy(model)
    reference(BATCH).backward()
    free = optimized(copy.deepcopy(model), None)
    with pytest.raises(BudgetError, match="Smallest feasible") as error:
        optimized(copy.deepcopy(model), 1)
    smallest = int(re.search(r"passes: ([\d,]+)", str(error.value)).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert smallest < peak(free)
    flops = []
    for memory in (smallest, (smallest + peak(free)) // 2, peak(free)):
        ours = copy.deepcopy(model)
        opt = optimized(ours, memory)
        assert peak(opt) <= memory
        flops.append(opt.report.step_flops)
        for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > flops[-1]
    assert flops[-1] == free.report.step_flops


def test_a_model_that_fits_needs_no_pass() -> None:
    opt = graphopt.optimize(nn.Sequential(nn.Linear(64, 8)), (BATCH,), graphopt.Budget(memory="1GiB"), backend="aot_eager")
    opt(BATCH).sum().backward()
    assert opt.report.budget == {"memory": 2**30}
    with pytest.raises(BudgetError, match="Smallest feasible"):
        graphopt.optimize(nn.Sequential(nn.Linear(64, 8)), (BATCH,), graphopt.Budget(memory=100), backend="aot_eager")


def test_a_peak_is_predicted_anew_for_another_graph() -> None:
    limit = MemoryLimit(0, "aot_eager", "sgd")
    model = nn.Linear(64, 8)
    graphs = [capture_to_run(model, (torch.randn(n, 64),), {}, None) for n in (4, 400)]
    first = limit.peak_once(graphs[0], "same", lambda: graphs[0], 1)
    second = limit.peak_once(graphs[1], "same", lambda: graphs[1], 1)
    assert first < second
    assert limit.peak_once(graphs[1], "same", lambda: graphs[0], 1) == second


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups


def test_a_limit_takes_every_optimizer_and_counts_adamws_memory_where_a_trial_fails() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    sgd, reads_values = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adafactor(model.parameters())
    of_matrices = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    for optimizer, counted, told in ((Wrapped(sgd), sgd, 0), (reads_values, "adamw", 1), (of_matrices, "adamw", 1)):
        with warnings_of() as warned:
            opt = graphopt.optimize(model, (BATCH,), graphopt.Budget(memory="1GiB"), backend="aot_eager", optimizer=optimizer)
        assert opt.plan.memory is not None
        assert opt.plan.memory.optimizer is counted or opt.plan.memory.optimizer == counted
        assert [f"{type(optimizer).__name__} cannot be predicted" in text for text in warned] == [True] * told
