"""A budget holds in what Inductor's partitioner makes of checkpointed regions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.analysis.flops import flop_profile
from tests.measure import partitioned_flops

BATCH = torch.randn(8, 16), torch.randint(4, (8,))


class Checkpointed(nn.Module):
    """Two checkpointed blocks that end in products, and what follows them."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        if ending == "next to each other":
            self.blocks[1] = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)
        self.ending = ending

    def part(self, block: nn.Module, x: Tensor) -> Tensor:
        result = block(x)
        return torch.zeros_like(x).copy_(result) if self.ending == "copy" else result

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = checkpoint(self.part, self.blocks[0], x, use_reentrant=False)
        if self.ending != "next to each other":
            hidden = x + hidden.tanh()
        result = checkpoint(self.part, self.blocks[1], hidden, use_reentrant=False)
        if self.ending == "cast":
            result = result.double().square().mean(-1, keepdim=True).rsqrt().float() * result
        elif self.ending == "clamp":
            result = result.view(4, 2, 16).clamp(-1, 1).flatten(0, 1)
        elif self.ending == "gate":
            result = result * (1 + result.tanh())
        elif self.ending != "none":
            result = result + 1
        return nn.functional.cross_entropy(self.last(result), y)


@pytest.mark.parametrize("ending", ["none", "cast", "clamp", "gate", "copy", "next to each other"])
def test_no_region_runs_again_for_what_follows_it(ending: str) -> None:
    opt = graphopt.optimize(Checkpointed(ending), BATCH, backend="aot_eager", budget=0.6)
    graph, _ = opt.plan.rewrite(opt.graph)
    assert partitioned_flops(graph) <= flop_profile(graph).step <= 0.6 * opt.flops.step


def test_without_a_budget_the_step_keeps_no_more_than_under_torch_compile() -> None:
    opt = graphopt.optimize(Checkpointed("cast"), BATCH, backend="aot_eager")
    graph, _ = opt.plan.rewrite(opt.graph)
    assert partitioned_flops(graph) > flop_profile(graph).step


def test_a_result_that_a_later_region_starts_with_is_still_kept() -> None:
    """The later region's product is not run again any more, but its weight's gradient reads the result."""
    model = Checkpointed("next to each other")
    graph = graphopt.analyze(model, BATCH).graph
    train = GreenTrainer(train=("last.weight", "blocks.1.weight"))
    plan = graphopt.optimize(model, BATCH, graphopt.Budget(flops=1.0), [train], "aot_eager").plan
    planned = flop_profile(replace(plan, budget=graphopt.Budget()).rewrite(graph)[0]).step
    assert partitioned_flops(plan.rewrite(graph)[0]) == flop_profile(plan.rewrite(graph)[0]).step == planned
