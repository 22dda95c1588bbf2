"""What each rank does for `test_mesh`; everything is returned and judged there."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from graphopt.passes import GreenTrainer, Lsp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphopt
from tests.distributed import work_ddp
from tests.distributed.work_ddp import BUDGET, PUBLISHED, Layers, error_of, gradients, own_batch


class Counting(TorchDispatchMode):
    """Bytes of every collective that is dispatched, by a graph or by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func._opname:
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.bytes.append(sum(t.numel() * t.element_size() for t in leaves))
        return func(*args, **(kwargs or {}))


class Sequences(nn.Module):
    """Reads sequences of any length; `mark` is used where one is long, and no gradient reaches `unused`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden.mean(1)), labels)


def model(depth: int = 3) -> Layers:
    return work_ddp.model(depth)


def used(of: nn.Module) -> nn.Module:
    """The model without the parameter that nothing uses, which DistributedDataParallel would wait for."""
    del of.unused
    return of


def optimised(mesh: Any, batch: Any, budget: float | None = None, of: nn.Module | None = None, **options: Any) -> Any:
    options = {"passes": PUBLISHED if budget else [], "backend": "aot_eager", **options}
    return graphopt.optimize(of or used(model()), batch, budget, mesh=mesh, **options)


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def step(opt: nn.Module, batch: Any) -> tuple[dict[str, Tensor | None], list[int]]:
    """Gradients, and bytes of the collectives that were dispatched."""
    opt.zero_grad()
    with Counting() as counting:
        loss_of(opt(*batch)).backward()
    return gradients(opt), counting.bytes


def work(rank: int) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    batch = own_batch(rank)
    plain = DistributedDataParallel(used(model()))
    loss_of(plain(*batch)).backward()
    found["ddp"] = {name.removeprefix("module."): g for name, g in gradients(plain).items()}

    opt = optimised(mesh, batch)
    found["exact"] = step(opt, batch)
    found["report"] = str(opt.report), opt.report.to_dict()["communication"], opt.report.communication.bytes
    selected = optimised(mesh, batch, BUDGET)
    found["planned bytes"] = selected.report.communication.bytes
    found["selected"] = sorted(selected.selected), step(selected, batch), selected.report.communication.bytes
    with torch.no_grad(), Counting() as counting:
        selected(*batch)
    selected.eval()
    with torch.no_grad(), counting:
        selected(*batch)
    found["no grad"] = counting.bytes
    accumulates(rank, mesh, found)
    interleaved(rank, mesh, found)
    lengths(rank, mesh, found)
    falls_back(rank, mesh, batch, found)
    in_parts(rank, mesh, found)
    freezes(rank, mesh, batch, found)
    compresses(rank, mesh, found)
    found["compressed curve"] = compressed_curve(optimised(mesh, batch, passes=[LSP]), lambda seed: own_batch(rank, seed))
    found["memory"] = within_memory(mesh, batch)
    found["curve"] = curve(optimised(mesh, batch, BUDGET), lambda seed: own_batch(rank, seed))
    refuses(rank, mesh, batch, found)
    return found


LSP = Lsp(subspace=8, nonzeros=2, check_every=2, batches=2)


def compressed_curve(opt: Any, batch_of: Any) -> list[float]:
    """Losses of some steps of two batches each, by compressed gradients, whose projectors are learned from two."""
    optimizer, losses = opt.make_optimizer(torch.optim.AdamW, lr=1e-2), []
    for seed in range(1, 6):
        with opt.no_sync():
            loss_of(opt(*batch_of(10 + seed))).backward()
        losses.append(stepped(opt, optimizer, batch_of(seed)))
    return losses


def stepped(opt: Any, optimizer: Any, batch: Any) -> float:
    """The loss of one step."""
    loss = loss_of(opt(*batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def within_memory(mesh: Any, batch: Any) -> list[dict[str, float]]:
    """What is left of a limit that is ample, of one that the buckets make too small, and that one without ranks."""
    ample = optimised(mesh, batch, graphopt.Budget(memory="1GiB"), passes=[GreenTrainer()]).report.plan
    limit = graphopt.Budget(memory=ample.predicted["peak_bytes"] - 4000)
    alone = graphopt.optimize(used(model()), batch, limit, [GreenTrainer()], "aot_eager")
    return [ample.remaining["memory"], optimised(mesh, batch, limit, passes=[GreenTrainer()]).report.plan.remaining["memory"],
            {"trained": len(alone.selected)}]  # fmt: skip


def curve(opt: Any, batch_of: Any) -> list[float]:
    """Losses of some steps."""
    optimizer = torch.optim.AdamW(opt.parameters(), lr=1e-2)
    return [stepped(opt, optimizer, batch_of(seed)) for seed in range(1, 9)]


def bare(wrapped: nn.Module) -> dict[str, Tensor | None]:
    return {name.removeprefix("module."): gradient for name, gradient in gradients(wrapped).items()}


def accumulates(rank: int, mesh: Any, found: dict[str, Any]) -> None:
    """Two steps that gather, one that averages; then two more that each average."""
    for name, opt in (("ddp", DistributedDataParallel(used(model()))), ("mesh", optimised(mesh, own_batch(rank)))):
        with Counting() as counting:
            with opt.no_sync():
                for seed in (2, 3):
                    loss_of(opt(*own_batch(rank, seed))).backward()
            found[f"inside no_sync, {name}"] = list(counting.bytes)
            loss_of(opt(*own_batch(rank))).backward()
        found[f"after no_sync, {name}"] = bare(opt), sum(counting.bytes)
        if name == "mesh":
            found["after no_sync, report"] = str(opt.report), opt.report.communication.bytes
        for seed in (4, 5):
            with Counting() as counting:
                loss_of(opt(*own_batch(rank, seed))).backward()
        found[f"accumulated, {name}"] = bare(opt), sum(counting.bytes)
    found["in the graph again"] = opt.report.sections["distribute"]["in_graph"]


def interleaved(rank: int, mesh: Any, found: dict[str, Any]) -> None:
    """Gradients that gather after others have been averaged, of a forward before that."""
    ddp, opt = DistributedDataParallel(used(model())), optimised(mesh, own_batch(rank))
    with ddp.no_sync():
        for seed in (2, 3, 4):
            loss_of(ddp(*own_batch(rank, seed))).backward()
    with opt.no_sync():
        loss_of(opt(*own_batch(rank, 2))).backward()
    averaged = loss_of(opt(*own_batch(rank, 3)))
    with opt.no_sync():
        gathering = loss_of(opt(*own_batch(rank, 4)))
    averaged.backward()
    gathering.backward()
    for wrapped in (ddp, opt):
        loss_of(wrapped(*own_batch(rank, 5))).backward()
    found["interleaved"] = bare(opt), bare(ddp)


def lengths(rank: int, mesh: Any, found: dict[str, Any]) -> None:
    """Sequences of other lengths on the ranks: other graphs."""

    def batch(length: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank + length)
        return torch.randint(0, 11, (4, length), generator=generator), torch.randint(0, 4, (4,), generator=generator)

    batches = [batch(length) for length in ((5, 8, 6), (9, 5, 6))[rank]]
    torch.manual_seed(0)
    plain = DistributedDataParallel(Sequences())
    torch.manual_seed(0)
    opt = optimised(mesh, batches[0], of=Sequences())
    found["lengths"] = []
    for own in batches:
        plain.zero_grad()
        plain(*own).backward()
        found["lengths"].append((step(opt, own)[0], bare(plain), opt.report.sections["distribute"]["in_graph"]))


def falls_back(rank: int, mesh: Any, batch: Any, found: dict[str, Any]) -> None:
    """One rank cannot compile."""

    def compiler(graph: Any, inputs: Any) -> Any:
        if rank == 1:
            raise RuntimeError("no compiler here")
        return graph

    opt = optimised(mesh, batch, BUDGET, backend=compiler)
    step(opt, batch)
    in_graph = opt.report.sections.get("distribute", {}).get("in_graph", False)
    found["fell back"] = step(opt, batch)[0], sorted(opt.selected), in_graph
    loss_of(opt(*batch)).backward()
    found["fell back twice"] = gradients(opt)


class Parts(nn.Module):
    """A graph break, a parameter that eager mode alone reads, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = eagerly(torch.tanh(self.before(x)), self.scale)
        return nn.functional.cross_entropy(self.after(hidden), labels)


@torch.compiler.disable
def eagerly(hidden: Tensor, scale: Tensor) -> Tensor:
    return hidden * scale


def in_parts(rank: int, mesh: Any, found: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    torch.manual_seed(0)
    plain = DistributedDataParallel(Parts(), find_unused_parameters=True)
    torch.manual_seed(0)
    opt = optimised(mesh, batch, of=Parts())
    for of in (plain, opt):
        for _ in range(2):
            loss_of(of(*batch)).backward()
    found["parts"] = gradients(opt), bare(plain)
    with Counting() as counting:
        opt(*batch).backward()
    found["parts, bytes"] = sum(counting.bytes), opt.report.communication.bytes, str(opt.report)
    whole = optimised(mesh, own_batch(rank), of=model())  # nothing reads `unused`
    found["unused"] = step(whole, own_batch(rank)), whole.report.communication.bytes


def freezes(rank: int, mesh: Any, batch: Any, found: dict[str, Any]) -> None:
    opt = optimised(mesh, batch)
    step(opt, batch)
    opt.body[0].weight.requires_grad_(False)
    found["frozen"] = step(opt, batch)
    opt.body[0].weight.requires_grad_(True)
    found["thawed"] = step(opt, batch)
    opt.body[2 * rank].weight.requires_grad_(False)  # of the same shape
    found["frozen apart"] = error_of(lambda: step(opt, batch))


def compresses(rank: int, mesh: Any, found: dict[str, Any]) -> None:
    """Compressed gradients, by projectors that are fitted to the mean."""
    batch = own_batch(rank)
    opt = optimised(mesh, batch, passes=[Lsp(subspace=8, nonzeros=2, check_every=2)])
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.0, weight_decay=0.0)
    found["lsp"] = []
    for seed in (1, 2, 3, 4):
        optimizer.zero_grad()
        with Counting() as counting:
            loss_of(opt(*own_batch(rank, seed))).backward()
        own = opt.states["lsp"].weights
        compressed = {name: weight.variable.grad.clone() for name, weight in own.items()}
        full = DistributedDataParallel(used(model()))
        loss_of(full(*own_batch(rank, seed))).backward()
        images = {name: weight.subspace.compress(bare(full)[name]) for name, weight in own.items()}
        found["lsp"].append((compressed, images, opt.report.communication.bytes, sum(counting.bytes), gradients(opt)))
        optimizer.step()


def refuses(rank: int, mesh: Any, batch: Any, found: dict[str, Any]) -> None:
    found["group, too"] = error_of(lambda: optimised(mesh, batch, group=dist.new_group([0, 1])))
    found["two dimensions"] = error_of(lambda: optimised(init_device_mesh("cpu", (2, 1)), batch))
    torch.manual_seed(rank)
    found["other weights"] = error_of(lambda: optimised(mesh, batch, of=used(Layers(3))))
    found["offload"] = error_of(lambda: optimised(mesh, batch, passes=[Lsp(subspace=8, nonzeros=2, schedule="layerwise")]))
    opt = optimised(mesh, batch, BUDGET)
    other = dataclasses.replace(opt.plan, train=frozenset(sorted(opt.selected)[rank:]))
    found["mismatch"] = error_of(lambda: opt.adopt(other))


def stack(width: int = 64, depth: int = 2) -> nn.Module:
    """Linear layers of one width without biases."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.GELU())))


class Squared(nn.Module):
    """The mean square of a model's output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean()


def compiled(rank: int) -> dict[str, Any]:
    """The same with Inductor."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    batch = own_batch(rank)
    plain = DistributedDataParallel(used(model(2)))
    loss_of(plain(*batch)).backward()
    found["ddp"] = bare(plain)
    opt = optimised(mesh, batch, BUDGET, of=used(model(2)), backend="inductor")
    found["selected"] = step(opt, batch), sorted(opt.selected), opt.report.communication.bytes
    found["again"] = step(opt, batch)

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    body = Squared(stack())
    passes = [Lsp(subspace=16, nonzeros=4)]
    opt = optimised(mesh, (x,), of=body, passes=passes, backend="inductor")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        with Counting() as counting:
            opt(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    found["compressed"] = sum(counting.bytes), opt.report.communication.bytes, sum(p.nbytes for p in body.parameters())
    found["weights"] = [float(p.detach().double().sum()) for p in body.parameters()]
    return found
