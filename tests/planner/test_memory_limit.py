"""A limit on memory: met by computing again what costs least, or refused with the smallest that is feasible."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from graphopt.passes import RunLora
from graphopt.passes.runlora.choose import Choice
from graphopt.passes.runlora.orders import Order
from graphopt.passes.runlora.within_memory import orders_within
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import graphopt
from graphopt import BudgetError
from graphopt.capture import capture_to_run
from graphopt.planner.memory_limit import MemoryLimit


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
    budget = graphopt.Budget(memory=memory)
    opt = graphopt.optimize(model, (BATCH,), budget, passes=[RunLora(criterion="flops")], backend="aot_eager")
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


def test_the_cheapest_bytes_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers: one would compute 10 bytes again for 100 FLOPs, one 10 bytes for 1,000."""

    def choose(price: float) -> dict[str, Choice]:
        def choice(name: str, flops: int) -> Choice:
            recomputes = price * 10 > flops
            saved, cost = (0, 5000 + flops) if recomputes else (10, 5000)
            return Choice(name, Order(merged_forward=recomputes), Order(), 5000, cost, 10, saved, None, None, None, "")

        return {"cheap": choice("cheap", 100), "dear": choice("dear", 1000)}

    limit = MemoryLimit(110, "aot_eager")
    monkeypatch.setattr("graphopt.passes.runlora.within_memory._rewritten", lambda _, choices: choices)
    monkeypatch.setattr(MemoryLimit, "peak_of", lambda _, choices, __: 100 + sum(c.saved_after for c in choices.values()))
    graph = capture_to_run(nn.Linear(2, 2), (torch.randn(2, 2),), {}, None)
    found = orders_within(limit, graph, 1, choose)
    assert {name: c.saved_after for name, c in found.items()} == {"cheap": 0, "dear": 10}


def test_a_peak_is_predicted_anew_for_another_graph() -> None:
    limit = MemoryLimit(0, "aot_eager", "sgd")
    model = nn.Linear(64, 8)
    graphs = [capture_to_run(model, (torch.randn(n, 64),), {}, None) for n in (4, 400)]
    first = limit.peak_once(graphs[0], "same", lambda: graphs[0], 1)
    second = limit.peak_once(graphs[1], "same", lambda: graphs[1], 1)
    assert first < second
    assert limit.peak_once(graphs[1], "same", lambda: graphs[0], 1) == second
