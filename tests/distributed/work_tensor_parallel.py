"""What each rank does for `test_tensor_parallel`; everything is returned and judged there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphopt
from tests.distributed.work_ddp import error_of
from tests.distributed.work_sharded import gradients


class Layers(nn.Module):
    """Two layers that are divided among ranks, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x + self.down(torch.tanh(self.up(x))))
        return nn.functional.cross_entropy(logits, labels), logits


def parallel(mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(Layers().double(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def steps(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of some steps."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*batch)[0]
        loss.backward()
        found.append((loss.item(), gradients(model)))
        optimizer.step()
    return found


def work(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)  # the same samples on all ranks
    x, labels = torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (4,), generator=generator)
    opt = graphopt.optimize(parallel(mesh), (x, labels), 0.7, backend="aot_eager")
    return {
        "steps": steps(opt, (x, labels)),
        "eager": steps(parallel(mesh), (x, labels)),
        "notes": opt.report.notes,
        "counted": error_of(lambda: graphopt.analyze(parallel(mesh), (x, labels))),
        "mesh, too": error_of(lambda: graphopt.optimize(parallel(mesh), (x, labels), 0.7, mesh=mesh)),
    }
