"""What each rank does for `test_tensor_parallel`; everything is returned and judged there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import graphopt
from graphopt.analysis.communication import communication
from graphopt.analysis.step_memory import step_memory
from graphopt.planner.gradient_norms import gradient_norms
from graphopt.planner.importance import measure_importance
from graphopt.planner.parallel import MemoryPlan, StrategyRow
from tests.distributed.work_ddp import error_of
from tests.distributed.work_memory import peak_of_steps
from tests.distributed.work_mesh import Counting
from tests.distributed.work_sharded import flops_of, gradients, optimised

VOCABULARY, LENGTH, SIZE = 37, 6, 8
BUDGET = 0.7


class Layers(nn.Module):
    """Two layers that are divided among ranks, and one that is not."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(x + self.down(hidden))
        return nn.functional.cross_entropy(logits, labels), logits


def layers(mesh: Any, breaks: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(Layers(breaks).double(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def broken(mesh: Any) -> nn.Module:
    """With a graph break."""
    return layers(mesh, breaks=True)


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (4,), generator=generator)


class Block(nn.Module):
    """A norm and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + hidden


class Sequences(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, depth: int, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def sequences(mesh: Any, depth: int = 2) -> nn.Module:
    """Every tensor of which is a DTensor, between layers in parts of the sequence.

    Gradients of norms are summands there, that of the embedding is whole on each rank, and ranks cannot divide its rows.
    """
    torch.manual_seed(0)
    model = Sequences(depth).double()
    ways: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return model if mesh is None else parallelize_module(model, mesh, ways)


def ids(seed: int = 1) -> tuple[Tensor, Tensor]:
    own = torch.randint(0, VOCABULARY, (SIZE, LENGTH), generator=torch.Generator().manual_seed(seed))
    return own, own


def llama(mesh: Any, **options: Any) -> nn.Module:
    """Divided as its own `tp_plan` says, but for embeddings that are tied."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, **options}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config).double()
    return model if mesh is None else graphopt.distribute(model, planned("TP"), mesh)


def planned(strategy: str, table: Sequence[StrategyRow] = (), batch: int = 4) -> MemoryPlan:
    """A plan such as `graphopt.plan` makes."""
    return MemoryPlan(strategy, batch, (*table, StrategyRow(strategy, batch, batch, 1.0, 0, "")), 0, 0.0, ())


def tokens(seed: int = 1) -> tuple[Any, ...]:
    own, _ = ids(seed)
    return own, torch.ones_like(own), None, None, None, own  # labels come sixth


def steps(model: nn.Module, batches: Callable[[int], Any], names: Any = None) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of some steps of AdamW, on these parameters alone where they are given."""
    trained = [p for n, p in model.named_parameters() if names is None or n in names]
    optimizer, found = torch.optim.AdamW(trained, lr=0.1), []
    for seed in range(1, 4):
        model.zero_grad()
        loss = model(*batches(seed))[0]
        loss.backward()
        found.append((loss.item(), gradients(model)))
        optimizer.step()
    return found


def work(rank: int) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    cases: dict[str, Any] = {
        "sequences": (sequences, ids, BUDGET),
        "llama": (llama, tokens, BUDGET),
        "in parts": (broken, rows, BUDGET),
        "layers": (layers, rows, BUDGET),
    }
    for name, (make, batches, budget) in cases.items():
        opt = optimised(make(mesh), batches(), budget)
        found[name] = steps(opt, batches), steps(make(mesh), batches, opt.selected), sorted(opt.selected)
        if name == "sequences":
            counts(opt, ids(), found)
            rates(mesh, opt.plan.importance.norms, found)
        if name == "llama":
            counts(opt, tokens(), found)
            cut = opt.plan.rewrite(opt.graph)[0]
            found["memory"] = step_memory(cut, "aot_eager", "adamw").peak_bytes, peak_of_steps(opt, tokens())
    freezes(opt, layers(mesh), found)
    distributes(mesh, found)
    refuses(mesh, found)
    found["alone"] = error_of(lambda: cannot_compile(rank, mesh))
    return found


def counts(opt: Any, batch: Any, found: dict[str, Any]) -> None:
    """FLOPs and bytes, counted on graphs and as they are executed; and the collectives before anything was cut."""
    executed = flops_of(opt, batch)
    with Counting() as counting:
        opt(*batch)[0].backward()
    sent = opt.report.communication.collectives
    found.setdefault("FLOPs", []).append((executed, opt.report.step_flops, opt.report.full_step_flops))
    planned = communication(opt.plan.rewrite(opt.graph)[0]).collectives
    bytes_of = [sorted(counting.bytes), *(sorted(c.bytes for c in of) for of in (sent, planned))]
    found.setdefault("bytes", []).append((*bytes_of, len(communication(opt.graph).collectives)))


def rates(mesh: Any, norms: dict[str, float], found: dict[str, Any]) -> None:
    """By rules that measure gradients, beside one process."""
    whole, batch = sequences(None), ids()
    names = [name for name, _ in whole.named_parameters()]
    divided = sequences(mesh)
    made = {id(of): torch.optim.AdamW(of.parameters()) for of in (whole, divided)}
    values = [measure_importance(of, batch, {}, names, made[id(of)]).values for of in (divided, whole)]
    found["values"] = values
    found["norms"] = norms, {n: g for n, g in gradient_norms(whole, batch, {}, names).items() if n in norms}


def freezes(opt: Any, fresh: nn.Module, found: dict[str, Any]) -> None:
    """A layer is frozen, and tensors are selected anew."""
    opt.load_state_dict(fresh.state_dict())
    opt.down.requires_grad_(False)
    changed = opt.reselect(rows()).changed
    for model in (fresh, opt):
        model.zero_grad()
        model(*rows())[0].backward()
    found["anew"] = changed, gradients(opt), gradients(fresh), sorted(opt.selected)


def distributes(mesh: Any, found: dict[str, Any]) -> None:
    """What plans make of a model, beside the model as it is; and what cannot be made."""
    runs = {"undivided": llama(None), "CDP": llama(None), "ADP": llama(None), "TP": llama(mesh)}
    for strategy in ("CDP", "ADP"):
        graphopt.distribute(runs[strategy], planned(strategy), mesh)
    for strategy, model in runs.items():
        model(*tokens())[0].backward()
        divided = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
        found[f"distributed, {strategy}"] = gradients(model), divided
    both, odd = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), llama(None)
    odd.tp_plan = {"model.layers.*.self_attn.q_proj": "packed_colwise"}
    wrapped = nn.Sequential(llama(None))
    wrapped.tp_plan = {"model.layers.*.self_attn.q_proj": "colwise"}  # type: ignore[assignment]
    table = [StrategyRow("DP+TP (1 x 2)", 4, 4, 4.0, 0, "")]
    calls = {
        "again": (llama(mesh), planned("CDP"), mesh),
        "nothing": (llama(None), planned("offload", batch=0), mesh),
        "offload": (llama(None), planned("offload"), mesh),
        "dimensions": (llama(None), planned("ADP"), both),
        "no names": (llama(None), planned("DP+TP", table), mesh),
        "other mesh": (llama(None), planned("DP+TP", table), both),
        "no tp_plan": (Layers(False), planned("TP"), mesh),
        "no such names": (wrapped, planned("TP"), mesh),
        "style": (odd, planned("TP"), mesh),
        "heads": (llama(None, num_attention_heads=1), planned("TP"), mesh),
    }
    found["refused"] = {name: error_of(functools.partial(graphopt.distribute, *call)) for name, call in calls.items()}


def refuses(mesh: Any, found: dict[str, Any]) -> None:
    """What is not planned, and runs as torch.compile has it."""
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))["tp"]
    both = parallelize_module(layers(mesh), other, {"head": ColwiseParallel(output_layouts=Replicate())})
    opt = optimised(both, rows(), BUDGET)
    found["several meshes"] = opt.report.notes, steps(opt, rows), steps(layers(mesh), rows)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found["other ranks"] = optimised(layers(mesh), rows(), BUDGET, group=alone).report.notes
    found["plan"] = error_of(lambda: graphopt.plan(layers(mesh), rows(), devices=2, device_memory="1GiB"))


def cannot_compile(rank: int, mesh: Any) -> None:
    """A step that one rank cannot compile: eager mode would send what the other does not expect."""

    def compiler(graph: Any, inputs: Any) -> Any:
        if rank == 1:
            raise RuntimeError("no compiler here")
        return graph

    x, labels = rows()
    batch = x.requires_grad_(), labels  # for a sum in the backward
    opt = graphopt.optimize(layers(mesh), batch, BUDGET, backend=compiler)
    opt(*batch)[0].backward()


def on_mesh(rank: int) -> dict[str, Any]:
    """Two groups of two ranks, each with samples of its own."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {}

    def own(batch: Any) -> Any:
        return tuple(t.chunk(2)[mesh["dp"].get_local_rank()] for t in batch)

    batch, whole = own(ids()), sequences(None, 1)
    whole(*ids())[0].backward()
    found["one process"] = gradients(whole)
    opt = optimised(sequences(mesh["tp"], 1), batch, BUDGET, mesh=mesh["dp"])
    with Counting() as counting:
        opt(*batch)[0].backward()
    sent = [c.bytes for c in opt.report.communication.collectives]
    found["step"] = gradients(opt), sorted(opt.selected), (sorted(counting.bytes), sorted(sent))
    found["norms"] = opt.plan.importance.norms, {name: float(g.norm()) for name, g in found["one process"].items()}
    opt.zero_grad()
    with opt.no_sync():
        opt(*batch)[0].backward()
    for _ in range(2):
        opt(*batch)[0].backward()
        found.setdefault("gathered", []).append((gradients(opt), opt.report.sections["distribute"]["in_graph"]))
    found["no mesh"] = optimised(layers(mesh["tp"]), own(rows()), BUDGET).report.notes
    found["fully_shard, too"] = []
    start = Layers(False).double().state_dict()
    for tensor in start.values():
        dist.broadcast(tensor, 0)
    undivided = Layers(False).double()
    undivided.load_state_dict(start)
    undivided(*rows())[0].backward()
    found["fully_shard, one process"] = gradients(undivided)
    for optimises in (True, False):
        model: Any = Layers(False).double()
        model.load_state_dict(start)
        model.tp_plan = {"up": "colwise", "down": "rowwise"}
        graphopt.distribute(model, planned("DP+TP", [StrategyRow("DP+TP (2 x 2)", 4, 8, 8.0, 0, "")]), mesh)
        if optimises:
            model = optimised(model, own(rows()), BUDGET)
            found["fully_shard, notes"] = model.report.notes
        model(*own(rows()))[0].backward()
        found["fully_shard, too"].append(gradients(model))
    return found
