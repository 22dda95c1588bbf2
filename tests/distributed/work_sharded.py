"""What each rank does for `test_sharded`; everything is returned and judged there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from graphopt.passes import GreenTrainer
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.bench.predicted_traffic import predicted_collectives
from graphopt.graph import Parameter
from tests.distributed.work_ddp import error_of

VOCABULARY, LENGTH, SIZE = 37, 6, 4


class Block(nn.Module):
    """With odd sizes: a bias of one row, which most ranks have no part of, and a buffer that forward writes to."""

    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.shift = nn.Parameter(torch.zeros(1))
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.norm(x)))) + self.shift
        return x + hidden


class Layers(nn.Module):
    """Blocks between layers that are part of none; `unused` is read by nothing."""

    def __init__(self, width: int = 7, depth: int = 3, batch_norm: bool = True) -> None:
        super().__init__()
        self.into = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width, norm=batch_norm and i == 0) for i in range(depth))
        self.head = nn.Linear(width, 3)
        self.unused = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        hidden = self.into(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits, labels), logits


def layers() -> nn.Module:
    torch.manual_seed(0)
    return Layers().double()


class NormOfTwoRanks(nn.BatchNorm1d):
    """Normalises the samples of each of two ranks by themselves, as the ranks do."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([*map(super().forward, input.chunk(2))])


def layers_of_two_ranks() -> nn.Module:
    """The layers that one process computes on the joint batch as two ranks do on theirs."""
    model = layers()
    model.blocks[0].norm = NormOfTwoRanks(model.into.out_features).double()
    return model


def frozen() -> nn.Module:
    """Whose first layer and second block are not trained."""
    model = layers()
    for part in (model.into, model.blocks[1]):
        part.requires_grad_(False)
    return model


def llama() -> nn.Module:
    """With tied embeddings."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config).double()


def adapted() -> nn.Module:
    """With adapters of two of its layers; all else is frozen, and no layer mixes samples."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    return peft.get_peft_model(Layers(depth=1, batch_norm=False), config).double()


def rows(rank: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64) * (1 + 3 * rank)
    return x, torch.randint(0, 3, (SIZE,), generator=generator)


def tokens(rank: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    ids = torch.randint(0, VOCABULARY, (SIZE, LENGTH), generator=generator)
    return ids, torch.ones_like(ids), None, None, None, ids  # labels come sixth


Case = tuple[Callable[[], nn.Module], Callable[..., Any], float]
LAYERS: Case = (layers, rows, 0.45)
FROZEN: Case = (frozen, rows, 0.75)
LLAMA: Case = (llama, tokens, 0.7)


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """As users do: each block by itself, and what is left."""
    for block in getattr(model, "blocks", None) or model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def step(run: Callable[..., Any], model: nn.Module, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    loss = run(*batch)[0]
    loss.backward()
    return loss.item(), gradients(model)


def flops_of(run: Any, batch: Any) -> int:
    """Of the matrix products that a step executes."""
    with FlopCounterMode(display=False) as executed:
        run(*batch)[0].backward()
    total: int = executed.get_total_flops()
    return total


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


def optimised(model: nn.Module, batch: Any, budget: Any = None, **options: Any) -> Any:
    return graphopt.optimize(model, batch, budget, backend="aot_eager", **options)


def of_model(
    rank: int, mesh: Any, make: Callable[[], nn.Module], batches: Any, budget: float, unlimited: Any = None
) -> tuple[dict[str, Any], Any]:
    """What an optimised model does beside the same one in eager mode, and the optimised model.

    Args:
        unlimited: a budget that limits nothing, to be tried, too.
    """
    found: dict[str, Any] = {}
    eager, model = sharded(make(), mesh), sharded(make(), mesh)
    before = tensors(model)
    opt = optimised(model, batches(rank), budget)
    found["untouched"] = all(torch.equal(t, before[n]) for n, t in tensors(model).items()) and not gradients(model)
    found["calls"] = getattr(model, "calls", 0)
    found["selected"] = sorted(opt.selected)
    found["eager"] = [step(eager, eager, batches(rank, seed)) for seed in (0, 1)]
    runs = {"step": opt}
    if unlimited is not None:
        runs["exact"] = optimised(sharded(make(), mesh), batches(rank), unlimited)
    for name, run in runs.items():
        found[name] = [step(run, run, batches(rank, seed)) for seed in (0, 1)]
        found[f"{name}, buffers"] = {n: b.clone() for n, b in run.named_buffers()}
        found[f"{name}, report"] = run.model_runs, run.report.notes
    found["buffers"] = {n: b.clone() for n, b in eager.named_buffers()}
    counted = opt.report.communication.collectives
    own = [Parameter(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in make().named_parameters()]
    predicted = predicted_collectives(own, dist.get_world_size(), opt.selected)
    found["collectives"] = [sorted((c.kind, c.bytes) for c in of) for of in (counted, predicted)]
    report, executed = opt.report, [flops_of(run, batches(rank)) for run in (opt, eager)]
    found["FLOPs"] = executed[0] / executed[1], report.step_flops / report.full_step_flops
    found["curves"] = trained(opt, batches, rank), trained(only(make, mesh, opt.selected), batches, rank)
    found["weights"] = weights(model)
    return found, opt


def only(make: Callable[[], nn.Module], mesh: Any, names: Any) -> nn.Module:
    """The model in eager mode, which trains these tensors alone; None: all."""
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(names is None or name in names)
    return sharded(model, mesh)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)


def trained(run: Any, batches: Any, rank: int, optimizer: Any = None, seeds: Any = range(4)) -> list[float]:
    """Losses, and norms of gradients, of some steps of AdamW with clipping."""
    run.zero_grad()
    optimizer, found = optimizer or adamw(run), []
    for seed in seeds:
        loss = run(*batches(rank, seed))[0]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(run.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), whole(norm).item()]
    return found


def two(rank: int, folder: str) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    found["llama"], _ = of_model(rank, mesh, *LLAMA)
    found["layers"], opt = of_model(rank, mesh, *LAYERS, graphopt.Budget(memory=1000))
    found["rated"] = {rule: as_rated(rank, mesh, rule) for rule in ("steepness", "greentrainer")}
    dispatched = sent(opt, rows(rank))
    found["sent"] = sorted(dispatched), sorted((c.kind, c.bytes) for c in opt.report.communication.collectives)
    found["sizes"] = [p.numel() for name, p in opt.named_parameters() if name in opt.selected]
    goes_on(rank, opt, folder, found)
    found["accumulated"], found["accumulated, eager"] = accumulated(rank, opt), accumulated(rank, only(layers, mesh, None))
    found["mesh, too"] = error_of(lambda: optimised(opt._graphopt_model, rows(rank), 0.6, mesh=mesh))
    changes(rank, mesh, found)
    replicated(rank, mesh, found)
    return found


def as_rated(rank: int, mesh: Any, rule: Any) -> list[tuple[dict[str, float], dict[str, float], list[str]]]:
    """Importance, norms of gradients and the selection: of sharded layers, and of one process on the joint batch."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    joint = tuple(torch.cat(of) for of in zip(rows(0), rows(1), strict=True))
    ways: Any = (sharded(layers(), mesh), rows(rank), {}), (layers_of_two_ranks(), joint, {"group": alone})
    passes = [GreenTrainer(rule=rule)]
    opts = [optimised(model, batch, LAYERS[2], passes=passes, optimizer=adamw(model), **own) for model, batch, own in ways]
    return [(opt.plan.importance.values, opt.plan.importance.norms, sorted(opt.selected)) for opt in opts]


def sent(opt: Any, batch: Any) -> list[tuple[str, int]]:
    """Name, and bytes of what a rank hands in, of every collective of a step, of float64."""
    kinds = {"c10d::_allgather_base_": "all_gather", "c10d::_reduce_scatter_base_": "reduce_scatter"}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        opt(*batch)[0].backward()
    events = [event for event in profiled.events() if event.name.startswith("c10d::")]
    return [(kinds.get(event.name, event.name), 8 * math.prod(event.input_shapes[1])) for event in events]


def accumulated(rank: int, run: Any) -> dict[str, Tensor]:
    """Gradients that gather on each rank until the last micro-batch."""
    run.load_state_dict(only(layers, init_device_mesh("cpu", (2,)), None).state_dict())
    run.zero_grad()
    for seed in range(3):
        run.set_requires_gradient_sync(seed == 2)
        run(*rows(rank, seed))[0].backward()
    return gradients(run)


def adapted_curve(run: nn.Module, batch: Callable[[int], tuple[Tensor, ...]]) -> list[float]:
    """Losses of some steps of two batches each, the first of which is not averaged by itself."""
    optimizer, losses = adamw(run), []
    for seed in range(4):
        if isinstance(run, FSDPModule):
            run.set_requires_gradient_sync(seed % 2 == 1)
        loss = run(*batch(seed))[0]
        loss.backward()
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def replicated(rank: int, mesh: Any, found: dict[str, Any]) -> None:
    """A frozen base whose weights are divided, under adapters that every rank has whole."""

    def model() -> nn.Module:
        made = adapted()
        whole_on_all = {p for p in made.parameters() if p.requires_grad}
        for block in made.base_model.model.blocks:
            fully_shard(block, mesh=mesh, ignored_params=whole_on_all)
        fully_shard(made, mesh=mesh, ignored_params=whole_on_all)
        return made

    batch = functools.partial(rows, rank)
    opt = optimised(model(), batch(), 0.9, mesh=mesh)
    for _ in range(2):
        opt(*batch())[0].backward()
    found["replicated"] = gradients(opt), sorted(opt.selected), opt.report.sections["distribute"], opt.model_runs
    found["replicated, sent"] = [(c.kind, c.bytes) for c in opt.report.communication.collectives]
    opt.zero_grad()
    found["replicated, curve"] = adapted_curve(opt, batch)
    eager = optimised(model(), batch(), passes=[])  # without a mesh
    eager(*batch())[0].backward()
    found["own"] = gradients(eager), eager.report.notes
    half = init_device_mesh("cpu", (2, 1), mesh_dim_names=("here", "there"))["there"]
    found["another mesh"] = error_of(lambda: optimised(model(), batch(), mesh=half))
    other = model()
    with torch.no_grad():
        other.get_parameter(found["replicated"][1][0]).add_(rank)
    found["other adapters"] = error_of(lambda: optimised(other, batch(), mesh=mesh))


def changes(rank: int, mesh: Any, found: dict[str, Any]) -> None:
    """The user freezes a part, and selects anew."""
    model, batch = sharded(layers(), mesh), rows(rank)
    opt = optimised(model, batch, 0.6, passes=[GreenTrainer(rule="greentrainer")], optimizer=adamw(model))
    step(opt, model, batch)
    model.blocks[-1].requires_grad_(False)
    found["frozen"] = step(opt, model, batch)[1], sorted(opt.selected)
    changed = opt.reselect(batch)
    found["anew"] = step(opt, model, batch)[1], sorted(opt.selected), changed.changed, opt.report.notes


def goes_on(rank: int, opt: Any, folder: str, found: dict[str, Any]) -> None:
    """Some steps, and a checkpoint of plan, weights and optimizer."""
    optimizer = torch.optim.AdamW([p for n, p in opt.named_parameters() if opt.selects_tensor(n)], lr=0.02)
    trained(opt, rows, rank, optimizer)
    own, states = get_state_dict(opt, optimizer)
    checkpoint.save({"model": own, "optimizer": states}, checkpoint_id=folder)
    if rank == 0:
        opt.save_state(Path(folder) / "plan")
    dist.barrier()
    found["saved"] = weights(opt), states_of(opt, optimizer), sorted(opt.selected)


def states_of(opt: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(p): name for name, p in opt.named_parameters()}
    return {names[id(p)]: whole(state["exp_avg_sq"]) for p, state in optimizer.state.items()}


def three(rank: int, folder: str) -> dict[str, Any]:
    """Rows that three ranks cannot divide; and what two ranks have saved."""
    mesh = init_device_mesh("cpu", (3,))
    found: dict[str, Any] = {"frozen": of_model(rank, mesh, *FROZEN)[0]}
    opt = optimised(sharded(layers(), mesh), rows(rank), LAYERS[2])
    opt.load_state(Path(folder) / "plan")
    optimizer = torch.optim.AdamW([p for n, p in opt.named_parameters() if opt.selects_tensor(n)], lr=0.02)
    own, states = get_state_dict(opt, optimizer)
    checkpoint.load({"model": own, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(opt, optimizer, model_state_dict=own, optim_state_dict=states)
    found["loaded"] = weights(opt), states_of(opt, optimizer), sorted(opt.selected)
    found["goes on"] = trained(opt, rows, rank, optimizer)
    return found
