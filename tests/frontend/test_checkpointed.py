"""Checkpointed regions under "aot_eager": what they keep of themselves is kept, and a plan stays in force."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import graphopt

BATCH = torch.randn(8, 16, dtype=torch.float64), torch.randint(4, (8,))


def products_again(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    again = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.PREFER_SAVE


class Checkpointed(nn.Module):
    """Two blocks, one after the other."""

    def __init__(self, norm: Any, **options: Any) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 32), norm(32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)]
        self.blocks, self.last, self.options = nn.ModuleList(blocks), nn.Linear(16, 4), options
        self.again = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False, **self.options) if self.again else block(x))
        return nn.functional.cross_entropy(self.last(x), y)


SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, products_again)}


@pytest.mark.parametrize("budget", [None, 0.6])
@pytest.mark.parametrize(("norm", "options"), [(nn.BatchNorm1d, {}), (nn.LayerNorm, SELECTIVE), (nn.BatchNorm1d, SELECTIVE)])
def test_a_region_keeps_what_it_does_not_compute_again(norm: Any, options: dict[str, Any], budget: float | None) -> None:
    model = Checkpointed(norm, **options).double()
    reference = copy.deepcopy(model)
    reference.again = False  # in eager mode a region that runs again changes its buffers again
    opt = graphopt.optimize(model, BATCH, budget=budget, backend="aot_eager")
    for step in (1, 2):
        opt(*BATCH).backward()
        reference(*BATCH).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is not None) == (name in opt.selected)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=f"step {step}")
    assert not [line for line in str(opt.report).splitlines() if "could not be compiled" in line]
    with FlopCounterMode(display=False) as counter:
        opt(*BATCH).backward()
    assert counter.get_total_flops() <= (budget or 1.0) * opt.flops.step
