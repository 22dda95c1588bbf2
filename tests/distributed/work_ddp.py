"""What each rank does for `test_ddp`; everything is returned and judged there."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from graphopt.passes import GreenTrainer, Lsp, Vcas
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphopt
from tests import zoo
from tests.runtime.uneven import batches

SIZE = 8
BUDGET = 0.85
PUBLISHED = [GreenTrainer(rule="greentrainer")]


class Layers(nn.Module):
    """Linear layers under a loss; returns logits, too, and has a parameter that nothing uses."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())))
        self.head = nn.Linear(width, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        return nn.functional.cross_entropy(logits, labels), logits


def model(depth: int = 6) -> Layers:
    torch.manual_seed(0)
    return Layers(depth)


def joint_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Of both ranks; the second's half is quite another."""
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(2 * SIZE, 32, generator=generator), torch.randint(0, 4, (2 * SIZE,), generator=generator)
    x[SIZE:] *= 0.02
    labels[SIZE:] = 3
    return x, labels


def own_batch(rank: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    x, labels = joint_batch(seed)
    return x[rank * SIZE : (rank + 1) * SIZE], labels[rank * SIZE : (rank + 1) * SIZE]


def gradients(of: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in of.named_parameters()}


def error_of(make: Any) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step(ddp: nn.Module, batch: Any, times: int = 1) -> dict[str, Tensor | None]:
    """Gradients of the last of some equal steps."""
    for _ in range(times):
        ddp.zero_grad()
        ddp(*batch)[0].backward()
    return gradients(ddp)


def optimised(batch: Any, budget: Any = BUDGET, **options: Any) -> Any:
    options = {"passes": PUBLISHED, "backend": "aot_eager", **options}
    return graphopt.optimize(model(), batch, budget, **options)


def work(rank: int) -> dict[str, Any]:
    batch, found = own_batch(rank), {}
    alone = dist.new_group([0]), dist.new_group([1])
    by_itself = optimised(batch, group=alone[rank])
    found["selected alone"] = sorted(by_itself.selected)
    found["another group"] = error_of(lambda: DistributedDataParallel(by_itself, find_unused_parameters=True)(*batch))

    found["no batch"] = [error_of(lambda: optimised(batch if rank else 7))]
    opt = optimised(batch)
    found["selected"] = sorted(opt.selected)
    found["importance"] = opt.plan.importance.values
    found["steepness"] = optimised(batch, passes="auto").plan.importance.norms
    for name, options in (("by default", {}), ("static", {"static_graph": True, "find_unused_parameters": True})):
        found[name] = error_of(lambda options=options: DistributedDataParallel(opt, **options)(*batch))

    ddp = DistributedDataParallel(opt, find_unused_parameters=True, bucket_cap_mb=0.005)
    found["buckets"] = len(ddp.reducer._get_zeros_like_grad_buckets())
    found["gradients"] = without_prefix(step(ddp, batch, 3))
    found["regions"] = len(opt.last_step.regions)
    with ddp.no_sync():
        ddp.zero_grad()
        ddp(*own_batch(rank, 2))[0].backward()
    ddp(*batch)[0].backward()
    found["accumulated"] = without_prefix(gradients(ddp))

    reselects(rank, opt, ddp, found)
    disagrees(rank, opt, found)
    falls_back(rank, batch, found)
    samples(rank, found)
    found["lsp"] = error_of(lambda: optimised(batch, None, passes=[Lsp(subspace=4, nonzeros=2)]))
    found["exact"] = without_prefix(step(DistributedDataParallel(optimised(batch, None, passes=[]), **UNUSED), batch, 2))
    compiled = torch.compile(model(), backend="graphopt", options={"budget": BUDGET})
    found["backend"] = error_of(lambda: compiled(*batch))
    found["bad batch"] = error_of(lambda: optimised((batch[0], batch[1][: SIZE - rank])))
    found["after that"] = sorted(optimised(batch).selected)
    found["memory alone"] = memory_alone(rank, alone[rank])
    return found


def memory_alone(rank: int, itself: dist.ProcessGroup) -> tuple[int, list[str]]:
    """Within what rank 1's small batch needs: how many tensors are trained there by itself, and which beside rank 0."""
    x, labels = joint_batch()
    small, mine = (x[:2], labels[:2]), (x[: 16 - 14 * rank], labels[: 16 - 14 * rank])
    limit = graphopt.Budget(memory=graphopt.analyze(model(), small, backend="aot_eager").memory.peak_bytes)
    alone = optimised(small, limit, group=itself)
    return len(alone.selected), sorted(optimised(mine, limit).selected)


UNUSED = {"find_unused_parameters": True}


def without_prefix(named: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("module."): value for name, value in named.items()}


def reselects(rank: int, opt: Any, ddp: nn.Module, found: dict[str, Any]) -> None:
    """Other data, and a layer that is frozen: another selection."""
    batch = own_batch(rank, 5)
    opt.get_parameter("head.weight").requires_grad_(False)
    outcome = opt.reselect(batch)
    opt.get_parameter("head.weight").requires_grad_(True)
    found["reselected"] = outcome.changed, outcome.gain, sorted(opt.selected)
    with torch.no_grad():
        opt.head.weight.mul_(2)
    found["no batch"].append(error_of(lambda: opt.reselect(batch if rank else 7)))
    found["reselected anew"] = opt.reselect(batch).changed, sorted(opt.selected)
    found["after reselecting"] = without_prefix(step(ddp, batch, 2))


def disagrees(rank: int, opt: Any, found: dict[str, Any]) -> None:
    """A plan that one rank alone changes."""
    before = opt.plan
    names = sorted(opt.selected)
    other = dataclasses.replace(before, train=frozenset(names[rank:]))
    found["mismatch"] = error_of(lambda: opt.adopt(other))
    found["mismatch changed"] = opt.plan is not before


def falls_back(rank: int, batch: Any, found: dict[str, Any]) -> None:
    """One rank cannot compile."""

    def compiler(graph: Any, inputs: Any) -> Any:
        if rank == 1:
            raise RuntimeError("no compiler here")
        return graph

    opt = optimised(batch, backend=compiler)
    found["fell back"] = without_prefix(step(DistributedDataParallel(opt, **UNUSED), batch, 2))
    found["fell back notes"] = opt.report.notes


def samples(rank: int, found: dict[str, Any]) -> None:
    """The sampler's draws and ratios."""
    data = batches(16)
    torch.manual_seed(0)
    passes = [Vcas(every=4, alpha=0.04, beta=0.8)]
    opt = graphopt.optimize(zoo.MLP(width=32), data[0], graphopt.Budget(variance=0.5), passes, "aot_eager")
    ddp = DistributedDataParallel(opt)
    optimizer = torch.optim.SGD(opt.parameters(), lr=0.05)
    for batch in data[rank::2] * 2:
        ddp(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        opt.controller.after_step(batch)
    found["ratios"] = opt.controller.ratios
    found["variances"] = [(a.rows_variance, a.tokens_variance) for a in opt.controller.history]
    uniforms = opt.captures.uniforms
    found["draws"] = uniforms.draw(7, 3, torch.device("cpu")).tolist()
    found["weights"] = float(sum(p.detach().double().sum() for p in opt.parameters()))
    found["copied"] = copy.deepcopy(opt).ranks.size
