"""`graphopt bench distributed`: what each rank of data parallel training sends per step, and how long that would take.

Bytes are counted on the graphs that `optimize(mesh=...)` would run. Times come from a model and are not measured: a ring
all-reduce of b bytes over n ranks takes 2 (n - 1) (alpha + b / (n beta)), for a latency alpha in seconds and a bandwidth beta in
bytes per second and direction. Nothing is taken to overlap, so that the backward may hide some of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import graphopt
from graphopt.analysis.communication import communication
from graphopt.bench.cases import chosen
from graphopt.bench.glosses import pretrained_minilm
from graphopt.bench.lsp import Linears
from graphopt.bench.tables import table
from graphopt.graph import TrainingGraph
from graphopt.passes import Lsp
from graphopt.passes.distribute import Distribute, Reduced
from graphopt.passes.distribute.buckets import in_buckets
from graphopt.passes.distribute.technique import ready_order
from graphopt.report.units import in_bytes, in_seconds


@dataclass(frozen=True)
class Link:
    """Between two ranks: `alpha` in seconds, `beta` in bytes per second and direction."""

    alpha: float
    beta: float

    def seconds(self, collectives: list[int], ranks: int) -> float:
        """Of all-reduces of so many bytes each, one after another."""
        return sum(2 * (ranks - 1) * (self.alpha + size / (ranks * self.beta)) for size in collectives)


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


def run(models: list[str] | None, ranks: int, console: Console) -> dict[str, Any]:
    """Count for every model.

    Args:
        models: names in `CASES`; all by default.
        ranks: how many train together.
    Raises:
        InputError: an unknown model.
    """
    rows = []
    for name in chosen("model", models, list(CASES)):
        make, subspace = CASES[name]
        for kind, sizes in _sent(make, subspace, ranks).items():
            seconds = {link: of.seconds(sizes, ranks) for link, of in LINKS.items()}
            rows.append(
                {"model": name, "kind": kind, "bytes": sum(sizes), "collectives": len(sizes), "modelled_seconds": seconds}
            )
    links = {name: {"alpha": link.alpha, "beta": link.beta} for name, link in LINKS.items()}
    return {"torch": torch.__version__, "ranks": ranks, "links": links, "rows": rows}


def _sent(make: Callable[[], Case], subspace: int, ranks: int) -> dict[str, list[int]]:
    """Bytes of every all-reduce of a step, by how the model is trained."""
    found: dict[str, list[int]] = {}
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
            found["DDP"] = [sum(sizes[name] for name in bucket) for bucket in in_buckets(every)]
        found[kind] = [collective.bytes for collective in communication(distributed(opt, ranks)).collectives]
    return found


def distributed(opt: graphopt.OptimizedModule, ranks: int) -> TrainingGraph:
    """The graph that a step of `opt` would run on each of several ranks."""
    last = Distribute("counted only", ranks)
    plan = opt.plan.with_passes([*opt.plan.passes, last]).decided(last.name, Reduced(ready_order(opt.graph)))
    return plan.rewrite(opt.graph)[0]


def show(results: dict[str, Any], console: Console) -> None:
    """A table."""
    full = {row["model"]: row["bytes"] for row in results["rows"] if row["kind"] == "DDP"}
    console.print(
        table(
            ["model", "gradients", "per step and rank", "of DDP", "all-reduces", *results["links"]],
            [
                (
                    row["model"], row["kind"], in_bytes(row["bytes"]), f"{row['bytes'] / full[row['model']]:.3f}",
                    row["collectives"], *(in_seconds(s) for s in row["modelled_seconds"].values()),
                )
                for row in results["rows"]
            ],
            words=2,
            title=f"Data parallel training on {results['ranks']} ranks; times are modelled, not measured",
        )
    )  # fmt: skip
    for name, link in results["links"].items():
        console.print(f"{name}: alpha {link['alpha'] * 1e6:.0f} us, beta {link['beta'] / 1e9:g} GB/s")
