"""What each rank does for `test_mesh_models`: models and loops that are out of the ordinary."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from graphopt.passes import Vcas
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphopt
from tests import zoo
from tests.distributed.work_ddp import BUDGET, error_of, model, own_batch
from tests.distributed.work_mesh import loss_of, optimised
from tests.runtime.uneven import batches


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embedding(ids)))
        return nn.functional.cross_entropy(self.head(hidden).mean(1), labels)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16, sparse=True), nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids).mean(1)), labels)


class Mixed(nn.Module):
    """Two dtypes in turn, another layout, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.wide, self.layer, self.head = nn.Linear(16, 16).double(), nn.Linear(16, 16), nn.Linear(16, 4).double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.conv(x).relu().mean((2, 3))
        hidden = torch.tanh(self.wide(hidden.double())).float()
        hidden = torch.tanh(self.layer(torch.tanh(self.layer(hidden))))
        return nn.functional.cross_entropy(self.head(hidden.double()), labels)


class Branch(nn.Module):
    """Large batches take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.large, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.always(x)
        if x.shape[0] > 6:
            hidden = hidden + self.large(x)
        return nn.functional.cross_entropy(self.head(hidden.tanh()), labels)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch_of(kind: type[nn.Module], rank: int, size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    labels = torch.randint(0, 4, (size,), generator=generator)
    if kind in (Tied, Sparse):
        return torch.randint(0, 20, (size, 5), generator=generator), labels
    return torch.randn(*((size, 3, 8, 8) if kind is Mixed else (size, 8)), generator=generator), labels


def wanted(of: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The ranks' mean of eager autograd's gradients."""
    loss(of).backward()
    found = {}
    for name, p in of.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        dist.all_reduce(gradient)
        found[name] = gradient / dist.get_world_size()
    return found


def difference(opt: nn.Module, means: dict[str, Tensor]) -> float:
    """The largest, relative to the largest entry; a gradient that is missing is zeros."""
    worst = 0.0
    for name, p in opt.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
        worst = max(worst, float((gradient - means[name]).abs().max() / means[name].abs().max().clamp(min=1e-12)))
    return worst


def work(rank: int, folder: str) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for kind in (Tied, Sparse, Mixed):
        batch = batch_of(kind, rank)
        means = wanted(made(kind), lambda of, batch=batch: of(*batch))
        opt = optimised(mesh, batch, of=made(kind))
        for _ in range(2):
            opt.zero_grad()
            opt(*batch).backward()
        found[kind.__name__] = difference(opt, means), opt.report.sections["distribute"]["in_graph"]
    found["ways"] = other_ways(rank, mesh)
    found["orders"] = orders(rank, mesh)
    found["logits"] = other_output(rank, mesh)
    found["sampled"] = samples(rank, mesh)
    found["state"] = goes_on(rank, mesh, Path(folder))
    found["copies"] = copies(rank, mesh)
    found["verified"] = type(optimised(mesh, own_batch(rank % 2), BUDGET, of=model(), verify=True)).__name__
    return found


def other_ways(rank: int, mesh: Any) -> list[float]:
    """A batch that takes another way on the last rank alone, between two that take the same."""
    last = rank == dist.get_world_size() - 1
    opt = optimised(mesh, batch_of(Branch, rank), of=made(Branch))
    found = []
    for seed, size in enumerate((6, 8 if last else 6, 6)):
        batch = batch_of(Branch, rank, size, seed)
        means = wanted(made(Branch), lambda of, batch=batch: of(*batch))
        opt.zero_grad()
        opt(*batch).backward()
        found.append(difference(opt, means))
    return found


def orders(rank: int, mesh: Any) -> list[float]:
    """Two forwards before their backwards, joint or one after the other, one of them without averaging."""
    one, two = batch_of(Branch, rank, 8), batch_of(Branch, rank, 8, 1)
    means = wanted(made(Branch), lambda of: of(*one) + of(*two))
    opt, found = optimised(mesh, one, of=made(Branch)), []
    for gathers in (False, True):
        for joint in (False, True):
            opt.zero_grad()
            if gathers:
                with opt.no_sync():
                    losses = [opt(*one)]
            else:
                losses = [opt(*one)]
            losses.append(opt(*two))
            for loss in [losses[0] + losses[1]] if joint else losses:
                loss.backward()
            found.append(difference(opt, means))
    return found


def other_output(rank: int, mesh: Any) -> list[float]:
    """A loss from the logits, which step after step had not expected."""
    batch, found = own_batch(rank % 2), []
    means = wanted(model(), lambda of: of(*batch)[1].square().mean())
    opt = optimised(mesh, batch, of=model())
    for _ in range(2):
        opt.zero_grad()
        opt(*batch)[1].square().mean().backward()
        found.append(difference(opt, means))
    return found


def samples(rank: int, mesh: Any) -> float:
    """Weights after some steps with a sampler."""
    data = batches(16)
    torch.manual_seed(0)
    passes = [Vcas(every=4, alpha=0.04, beta=0.8)]
    opt = graphopt.optimize(zoo.MLP(width=32), data[0], graphopt.Budget(variance=0.5), passes, "aot_eager", mesh=mesh)
    optimizer = torch.optim.SGD(opt.parameters(), lr=0.05)
    each = len(data) // dist.get_world_size()  # all ranks make as many steps
    for batch in data[rank * each : (rank + 1) * each] * 2:
        loss_of(opt(*batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        opt.controller.after_step(batch)
    return float(sum(p.detach().double().sum() for p in opt.parameters()))


def goes_on(rank: int, mesh: Any, folder: Path) -> tuple[list[str], str]:
    """A state that one rank has written is read by all, and by one process without a mesh."""
    batch, alone = own_batch(rank % 2), [dist.new_group([r]) for r in range(dist.get_world_size())]
    opt = optimised(mesh, batch, BUDGET, of=model())
    if rank == 0:
        opt.save_state(folder / "state")
    dist.barrier()
    again = optimised(mesh, batch, BUDGET, of=model())
    again.load_state(folder / "state")
    one = optimised(None, batch, BUDGET, of=model(), group=alone[rank])
    return sorted(again.selected), error_of(lambda: one.load_state(folder / "state")) or sorted(one.selected)


def copies(rank: int, mesh: Any) -> list[float]:
    batch = batch_of(Branch, rank)
    means = wanted(made(Branch), lambda of: of(*batch))
    opt = optimised(mesh, batch, of=made(Branch))
    found = []
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        other(*batch).backward()
        found.append(difference(other, means))
    return found
