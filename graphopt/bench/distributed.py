"""`graphopt bench distributed`: what each rank of data parallel training sends per step, and how long that would take.

Bytes are counted on the graphs that `optimize(mesh=...)` would run; for FSDP by the rules of `fully_shard` of every repeated
block; for tensor parallelism on the divided model's graph, as the first of ranks that are pretended. There all ranks compute the
same samples, and models are left out whose heads they cannot divide.

On a ring of n ranks, an all-reduce of b bytes goes round twice in parts of b / n, a reduce-scatter once. An all-gather, to which
each rank gives b bytes, goes round once in parts of b. Times come from a model and are not measured: every part takes alpha +
bytes / beta, for a latency alpha in seconds and a bandwidth beta in bytes per second and direction. Nothing is taken to overlap,
so that computing may hide some of it. With `--gloo`, what two processes here take for the same all-reduces stands beside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphopt
from graphopt.analysis.communication import Collective, communication
from graphopt.analysis.flops import flop_profile
from graphopt.bench.cases import chosen
from graphopt.bench.gloo import all_reduce_seconds
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.lsp import Linears
from graphopt.bench.predicted_traffic import predicted_collectives, predicted_parts
from graphopt.budget import Budget
from graphopt.compat.distributed import pretended_ranks
from graphopt.distributed.distributing import distribute
from graphopt.distributed.predicted import averaged
from graphopt.errors import InputError
from graphopt.graph import TrainingGraph
from graphopt.passes import GreenTrainer, Lsp, run_pass
from graphopt.passes.distribute.rewrite import in_buckets
from graphopt.planner.capacity import capacity
from graphopt.planner.flops_limit import FlopsLimit
from graphopt.planner.parallel import MemoryPlan
from graphopt.planner.plan import Plan
from graphopt.report.tables import table
from graphopt.report.units import in_bytes, in_seconds


@dataclass(frozen=True)
class Link:
    """Between two ranks: `alpha` in seconds, `beta` in bytes per second and direction."""

    alpha: float
    beta: float

    def seconds(self, collectives: Sequence[Collective], ranks: int) -> float:
        """Of collectives one after another."""
        return sum(rounds(c) * (ranks - 1) * self.alpha + sent(c, ranks) / self.beta for c in collectives)


def rounds(collective: Collective) -> int:
    """How often its parts go round the ring."""
    return 2 if collective.kind == "all_reduce" else 1


def sent(collective: Collective, ranks: int) -> float:
    """Bytes that leave a rank."""
    part = collective.bytes if collective.kind == "all_gather" else collective.bytes / ranks
    return rounds(collective) * (ranks - 1) * part


LINKS = {"NVLink": Link(5e-6, 450e9), "PCIe 4.0": Link(10e-6, 25e9), "10 Gb/s": Link(50e-6, 1.25e9)}
"""Round figures of vendors: NVLink 4 of an H100, 16 lanes of PCIe 4.0 at four fifths, Ethernet."""

Inputs = dict[str, Tensor] | tuple[Tensor, ...]
Case = tuple[nn.Module, Inputs]


def _minilm() -> Case:
    batch = {
        "input_ids": torch.randint(0, 30_000, (16, 32), generator=torch.Generator().manual_seed(0)),
        "attention_mask": torch.ones(16, 32, dtype=torch.long),
        "labels": torch.arange(16),
    }
    return pretrained_minilm(26), batch


def _linears() -> Case:
    torch.manual_seed(0)
    return Linears(1024, 6), (torch.randn(64, 1024),)


CASES: dict[str, tuple[Callable[[], Case], int]] = {"minilm": (_minilm, 96), "linear": (_linears, 256)}
"""What makes a model, and the subspace of compressed gradients: a quarter of its width."""

TP_PLANS: dict[str, dict[str, str]] = {
    "minilm": {
        "*.attention.self.query": "colwise",
        "*.attention.self.key": "colwise",
        "*.attention.self.value": "colwise",
        "*.output.dense": "rowwise",
        "*.intermediate.dense": "colwise",
    },
    "linear": {"layers.*": "colwise_gather_output"},
}
"""How models are divided; what one layer returns, the next of "linear" needs whole."""


def run(models: list[str] | None, ranks: int, console: Console, gloo: bool = False) -> dict[str, Any]:
    """Count for every model.

    Args:
        models: names in `CASES`; all by default.
        ranks: how many train together.
        gloo: measure all-reduces between two processes here, too.
    Raises:
        InputError: an unknown model.
    """
    rows: list[dict[str, Any]] = []
    reduced: dict[str, list[int]] = {}
    for name in chosen("model", models, list(CASES)):
        make, subspace = CASES[name]
        for kind, (collectives, held) in (_counted(make, subspace, ranks) | _divided(make, TP_PLANS[name], ranks)).items():
            rows.append(
                {
                    "model": name,
                    "kind": kind,
                    "bytes": sum(c.bytes for c in collectives),
                    "sent_bytes": round(sum(sent(c, ranks) for c in collectives)),
                    "collectives": len(collectives),
                    "held_bytes": held,
                    "modelled_seconds": {link: of.seconds(collectives, ranks) for link, of in LINKS.items()},
                    "gloo_seconds": None,
                }
            )
            if {c.kind for c in collectives} == {"all_reduce"}:
                reduced[f"{name} {kind}"] = [c.bytes for c in collectives]
    if gloo:
        seconds = all_reduce_seconds(reduced)
        rows = [{**row, "gloo_seconds": seconds.get(f"{row['model']} {row['kind']}")} for row in rows]
    links = {name: {"alpha": link.alpha, "beta": link.beta} for name, link in LINKS.items()}
    return {"torch": torch.__version__, "ranks": ranks, "links": links, "rows": rows}


def _counted(make: Callable[[], Case], subspace: int, ranks: int) -> dict[str, tuple[list[Collective], int | None]]:
    """The collectives of a step, and bytes of weights, gradients and AdamW's states on a rank, by how the model is trained."""
    found: dict[str, tuple[list[Collective], int | None]] = {}
    lsp = Lsp(subspace, nonzeros=8, criterion="flops")
    kinds: dict[str, dict[str, Any]] = {
        "exact": {},
        "selected, flops=0.5": {"budget": 0.5},
        f"compressed, s={subspace}": {"passes": [lsp]},
    }
    for kind, options in kinds.items():
        model, inputs = make()
        opt = graphopt.optimize(model, inputs, backend="aot_eager", **options)
        if not found:
            every = [(n, p.dtype, p.nbytes) for n, p in model.named_parameters() if p.requires_grad]
            sizes = {name: size for name, _, size in every}
            buckets = [Collective("all_reduce", sum(sizes[name] for name in bucket)) for bucket in in_buckets(every)]
            found["DDP"] = buckets, held_bytes(opt.graph, opt.selected, 1)
        graph = averaged(opt.graph, ranks, opt.plan)
        held = None if graph.compressed else held_bytes(graph, opt.selected, 1)
        found[kind] = list(communication(graph).collectives), held
        if not graph.compressed:
            sharded = kind.replace("exact", "FSDP").replace("selected", "FSDP")
            collectives = predicted_collectives(graph.parameters, ranks, opt.selected)
            found[sharded] = collectives, held_bytes(graph, opt.selected, ranks)
    return found


def _divided(make: Callable[[], Case], ways: dict[str, str], ranks: int) -> dict[str, tuple[list[Collective], int | None]]:
    """The same under tensor parallelism; nothing where ranks cannot divide the heads."""
    model, inputs = make()
    model.tp_plan = ways  # type: ignore[assignment]
    with pretended_ranks(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        try:
            distribute(model, MemoryPlan("TP", 1, (), 0, 0.0, ()), mesh)
        except InputError:
            return {}
        analysis = graphopt.analyze(model, inputs)
    graph, flops = analysis.graph, flop_profile(analysis.graph)
    limit = FlopsLimit(Plan(Budget(flops=0.5), (GreenTrainer(),)), graph, flops)
    selected = limit.select(capacity(graph, flops)).names
    cut, _ = run_pass(GreenTrainer(), graph, set(selected))
    trained = {"TP": (graph, [p.name for p in graph.trainable]), "TP, flops=0.5": (cut, selected)}
    return {kind: (list(communication(of).collectives), held_bytes(of, names, 1)) for kind, (of, names) in trained.items()}


def held_bytes(graph: TrainingGraph, trained: Collection[str], ranks: int) -> int:
    """Of weights, and of gradients and AdamW's two states of what is trained, each divided by its rows among so many ranks."""
    weights = sum(part.gathered_bytes for part in predicted_parts(graph.parameters, ranks))
    own = [p for p in graph.parameters if p.name in trained]
    return weights + 3 * sum(part.gathered_bytes for part in predicted_parts(own, ranks))


def show(results: dict[str, Any], console: Console) -> None:
    """A table."""
    full = {row["model"]: row["sent_bytes"] for row in results["rows"] if row["kind"] == "DDP"}
    console.print(
        table(
            ["model", "training", "handed in", "sent", "of DDP", "calls", "held", *results["links"], "gloo, 2 ranks"],
            [
                (
                    row["model"], row["kind"], in_bytes(row["bytes"]), in_bytes(row["sent_bytes"]),
                    f"{row['sent_bytes'] / full[row['model']]:.3f}", row["collectives"],
                    None if row["held_bytes"] is None else in_bytes(row["held_bytes"]),
                    *(in_seconds(s) for s in row["modelled_seconds"].values()),
                    None if row["gloo_seconds"] is None else in_seconds(row["gloo_seconds"]),
                )
                for row in results["rows"]
            ],
            words=2,
            title=f"Each of {results['ranks']} ranks, per step; times of links are modelled, not measured",
        )
    )  # fmt: skip
    console.print(
        "held: weights, gradients and AdamW's states of what is trained. Activations and what is gathered are not counted"
    )
    for name, link in results["links"].items():
        console.print(f"{name}: alpha {link['alpha'] * 1e6:.0f} us, beta {link['beta'] / 1e9:g} GB/s")
