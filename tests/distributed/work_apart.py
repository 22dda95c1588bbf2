"""What each rank does for `test_apart`: something happens on one rank, or differs between ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import graphopt
from graphopt.budget import Budget
from graphopt.calls import kind_of
from graphopt.distributed.ranks import Ranks
from graphopt.integrations.asked import Asked, begin
from graphopt.integrations.diverted import Diverted
from graphopt.integrations.training_steps import TrainingSteps
from tests.distributed.work_ddp import error_of, gradients

MESH: dict[str, Any] = {"passes": (), "backend": "aot_eager"}


class Two(nn.Module):
    """Two layers, applied in another order to large batches; `adapted`: with an adapter whose first gradients are zeros."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, n, bias=False) for n in (4, 4, 1))
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)
        self.broken = broken

    def forward(self, x: Tensor, adapted: bool = False) -> Tensor:
        first, second = (self.a, self.b) if len(x) > 4 else (self.b, self.a)
        hidden = torch.tanh(first(x))
        if self.broken:
            torch._dynamo.graph_break()
        if adapted:
            hidden = hidden + self.up(self.down(hidden))
        return self.c(second(hidden)).square().mean()


class Told(nn.Linear):
    """Returns its loss as a Trainer's model does."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x).square().mean()}


def two(broken: bool = False, adapter: bool = False) -> Two:
    torch.manual_seed(0)
    of = Two(broken)
    if not adapter:
        del of.down, of.up
    return of


def batch(rank: int, size: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(10 * seed + rank))


def apart(of: nn.Module) -> float:
    """By what the gradients of ranks differ."""
    own = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in of.parameters()])
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    return float((both[0] - both[1]).abs().max())


def steps_of(
    of: nn.Module, budget: float | None = None, passes: Any = (), every: int | None = None, **options: Any
) -> TrainingSteps:
    asked = Asked(Budget.of(budget), passes, "aot_eager", **options)
    return begin(asked, Diverted.of(of), torch.optim.SGD(of.parameters(), lr=0.1), every, lambda opt, steps: None)


def work(rank: int, folder: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {"refused": refused(rank, mesh, folder)}
    claims = (failed_kind, bucket_views, zeros, orders, failed_backward, not_finite, kinds, gives_up, wrapped, verifying)
    for claim in (*claims, breaks_once, released, unfrozen_uncompiled):
        found[claim.__name__] = claim(rank, mesh)
    return found


class Printing(Two):
    """Breaks its graph between its layers for long batches."""

    def forward(self, x: Tensor, adapted: bool = False) -> Tensor:
        hidden = torch.tanh(self.a(x))
        if len(x) > 6:
            torch._dynamo.graph_break()
        return self.c(self.b(hidden)).square().mean()


def breaks_once(rank: int, mesh: Any) -> list[float]:
    """A long batch on rank 1 breaks the graph there, and later steps are one graph again; by what the ranks' gradients differ."""
    torch.manual_seed(0)
    opt, found = graphopt.optimize(Printing(), (batch(rank),), mesh=mesh, **MESH), []
    for seed, size in enumerate((6, 8 if rank else 6, 6, 6)):
        opt.zero_grad()
        opt(batch(rank, size, seed)).backward()
        found.append(apart(opt))
    return found


def released(rank: int, mesh: Any) -> list[Any]:
    """A DistributedDataParallel averages by itself again, once the model in it is nobody else's."""
    of = two()
    ddp, steps = DistributedDataParallel(of), steps_of(of, mesh=mesh)
    ddp(batch(rank)).backward()
    found = [len(ddp._comm_hooks), apart(of)]
    steps._diverted.remove()
    of.zero_grad()
    ddp(batch(rank)).backward()
    return [*found, apart(of)]


def unfrozen_uncompiled(rank: int, mesh: Any) -> list[float]:
    """A weight that is unfrozen where no step is compiled is averaged, too."""

    def compiler(*_: Any) -> Any:
        raise RuntimeError("there is none")

    of = two()
    of.a.weight.requires_grad_(False)
    opt, found = graphopt.optimize(of, (batch(rank),), passes=(), backend=compiler, mesh=mesh), []
    for seed in range(5):
        of.a.weight.requires_grad_(seed == 4)
        of.zero_grad()
        opt(batch(rank, seed=seed)).backward()
        found.append(apart(of))
    return found


def failed_kind(rank: int, mesh: Any) -> list[float]:
    """A batch that could not be optimised before ends an accumulation, or begins one."""
    of = two()
    ddp, steps, found = DistributedDataParallel(of), steps_of(of, mesh=mesh), []
    ddp(batch(rank)).backward()
    steps._failed.add(kind_of((batch(rank, 8),)))
    for sizes in ((6, 8), (8, 6)):
        of.zero_grad()
        with ddp.no_sync():
            ddp(batch(rank, sizes[0])).backward()
        found.append(apart(of))
        ddp(batch(rank, sizes[1])).backward()
        found.append(apart(of))
    return found


def bucket_views(rank: int, mesh: Any) -> Any:
    """Two backwards with `gradient_as_bucket_view=True` of a model that is not one graph; and as it is in eager mode."""
    ours, plain = two(broken=True), two(broken=True)
    opt = graphopt.optimize(ours, (batch(rank),), mesh=mesh, **MESH)
    for ddp in (DistributedDataParallel(of, gradient_as_bucket_view=True) for of in (opt, plain)):
        for seed in (1, 2):
            ddp(batch(rank, seed=seed)).backward()
    return gradients(ours), gradients(plain)


def zeros(rank: int, mesh: Any) -> Any:
    """The gradient of `down` is zero on rank 0, and there is none on rank 1."""
    opt = graphopt.optimize(two(adapter=True), (batch(rank), True), mesh=mesh, **MESH)
    opt(batch(rank), rank == 0).backward()
    return opt.down.weight.grad


def orders(rank: int, mesh: Any) -> Any:
    """Selecting anew where gradients become ready in another order on each rank; and ranks with another order."""
    own = batch(rank, 6 if rank == 0 else 3)
    opt = graphopt.optimize(two(), (own,), mesh=mesh, **MESH)
    opt.c.weight.requires_grad_(False)
    changed = opt.reselect((own,)).changed
    plain = copy.deepcopy(opt._graphopt_model)
    for of in (opt, DistributedDataParallel(plain)):
        of(own).backward()
    found = changed, gradients(opt), gradients(plain)
    order = opt.plan.decisions["distribute"].order
    opt.adopt(opt.plan.decided("distribute", type(opt.plan.decisions["distribute"])(order if rank else order[::-1])))
    return *found, error_of(lambda: opt(own))


def failed_backward(rank: int, mesh: Any) -> Any:
    """A backward that fails on all ranks, after one that has not."""
    of = two(broken=True)
    opt = graphopt.optimize(of, (batch(rank),), mesh=mesh, **MESH)
    opt(batch(rank)).backward()
    before = gradients(of)

    def fails(gradient: Tensor) -> None:
        raise MemoryError("no memory for this gradient")

    handle = of.a.weight.register_hook(fails)
    error = error_of(lambda: opt(batch(rank, seed=1)).backward())
    handle.remove()
    after = gradients(of)
    opt(batch(rank, seed=2)).backward()
    return error, before, after, apart(of)


def refused(rank: int, mesh: Any, folder: str) -> Any:
    """Rank 1 cannot read its state file; then the optimizer of rank 1 refuses the state."""
    of = two()
    opt = graphopt.optimize(of, (batch(rank),), mesh=mesh, **MESH)
    trained = torch.optim.AdamW(of.parameters(), lr=0.1)
    opt(batch(rank)).backward()
    trained.step()
    path = Path(folder) / f"state {rank}"
    opt.save_state(path, trained)
    found = []
    for damage in (lambda: None, lambda: path.write_bytes(path.read_bytes()[: 200 if rank else None])):
        optimizer = torch.optim.AdamW(of.parameters(), lr=0.7)
        if not found and rank == 1:
            optimizer.load_state_dict = lambda state: 1 / 0
        damage()
        error = error_of(lambda optimizer=optimizer: opt.load_state(path, optimizer))
        found.append((error, optimizer.param_groups[0]["lr"], len(optimizer.state)))
    return found


def not_finite(rank: int, mesh: Any) -> list[bool]:
    """A loss is NaN on rank 1 alone: under GRAPHOPT_DISABLE, and before there is an optimised model."""
    found = []
    for disabled in (True, False):
        with mock.patch.dict("os.environ", {"GRAPHOPT_DISABLE": str(int(disabled))}):
            of = Told(4, 1)
            steps = steps_of(of)
            steps._gave_up, steps.watches_losses = not disabled, True
            of(batch(rank) * (torch.nan if rank else 1))
            found += [steps.opt is None, steps.all_finite([torch.full((2,), torch.nan if rank else 1.0)])]
    return found


def kinds(rank: int, mesh: Any) -> list[int]:
    """No batch can be optimised; the second is of a kind that rank 1 has seen, and rank 0 has not."""
    of = two()
    ddp, steps, tried = DistributedDataParallel(of), steps_of(of), []

    def make(*given: Any) -> Any:
        tried.append(1)
        return Ranks().together(lambda: 1 / 0, "capturing the model")

    steps._make = make
    for sizes in ((6, 8), (8, 8), (6, 6), (6, 6)):
        ddp(batch(rank, sizes[rank])).backward()
    return tried


def gives_up(rank: int, mesh: Any) -> Any:
    """Rank 1 alone computes every batch by the original forward, from the first or the second on; tensors are selected anew."""
    found = []
    for at in (0, 1):
        of = two()
        ddp = DistributedDataParallel(of, find_unused_parameters=True)
        steps = steps_of(of, 0.9, "auto", every=2)
        for i in range(3):
            if rank == 1 and i == at:
                steps.opt = steps.opt or steps._make(steps, (batch(rank),))
                steps._gave_up = True
            ddp(batch(rank, seed=i)).backward()
            steps.after_step()
        found.append((steps.due.steps, sorted(steps.opt.selected), apart(of)))
    return found


def wrapped(rank: int, mesh: Any) -> str:
    """DistributedDataParallel waits for the gradients of tensors that are not selected."""
    of = two()
    ddp = DistributedDataParallel(of)
    graphopt.prepare(of, torch.optim.SGD(of.parameters(), lr=0.1), [batch(rank)], 0.9, backend="aot_eager")
    return error_of(lambda: ddp(batch(rank)))


def verifying(rank: int, mesh: Any) -> str:
    """Rank 1 cannot compare its step with eager autograd."""

    def compare(*_: Any) -> str:
        return "" if rank == 0 else str(1 / 0)

    with mock.patch("graphopt.api.first_difference", compare):
        return error_of(lambda: graphopt.optimize(two(), (batch(rank),), verify=True, mesh=mesh, **MESH))
