"""A budget holds in what Inductor's partitioner makes of checkpointed regions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt.analysis.flops import flop_profile
from tests.measure import partitioned_flops

BATCH = torch.randn(8, 16), torch.randint(4, (8,))


class Checkpointed(nn.Module):
    """A checkpointed block that ends in a product, and what follows it."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.last = nn.Linear(16, 4)
        self.ending = ending

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = x + checkpoint(self.block, x, use_reentrant=False)
        if self.ending == "cast":
            hidden = hidden.double().square().mean(-1, keepdim=True).rsqrt().float() * hidden
        elif self.ending == "clamp":
            hidden = hidden.view(4, 2, 16).clamp(-1, 1).flatten(0, 1)
        elif self.ending == "gate":
            hidden = hidden * (1 + hidden.tanh())
        return nn.functional.cross_entropy(self.last(hidden), y)


@pytest.mark.parametrize("ending", ["none", "cast", "clamp", "gate"])
def test_no_region_runs_again_for_what_follows_it(ending: str) -> None:
    opt = graphopt.optimize(Checkpointed(ending), BATCH, backend="aot_eager", budget=0.6)
    graph, _ = opt.plan.rewrite(opt.graph)
    assert partitioned_flops(graph) == flop_profile(graph).step <= 0.6 * opt.flops.step


def test_without_a_budget_the_step_keeps_no_more_than_under_torch_compile() -> None:
    opt = graphopt.optimize(Checkpointed("cast"), BATCH, backend="aot_eager")
    graph, _ = opt.plan.rewrite(opt.graph)
    assert partitioned_flops(graph) > flop_profile(graph).step
