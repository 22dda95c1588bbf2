"""The pipeline: capture, analyse, plan; rewriting and compiling follow when a step first needs them."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from graphopt.analysis.allocator import CONTEXT_BYTES
from graphopt.analysis.eager_memory import eager_memory
from graphopt.analysis.flops import FlopProfile, flop_profile
from graphopt.analysis.memory import MemoryProfile
from graphopt.analysis.optimizers import OptimizerFactory, check_optimizer
from graphopt.analysis.paper_rules import paper_profile
from graphopt.analysis.step_memory import step_memory
from graphopt.budget import Budget, Limits
from graphopt.calls import BatchDim, as_call
from graphopt.compat.distributed import whole_graphs
from graphopt.distributed.agreement import for_ranks, plan_of_rank_0, require_same_graph, require_same_weights
from graphopt.distributed.divided import budget_for, is_divided, ranks_for, require_ranks, require_undivided, to_be_averaged
from graphopt.distributed.predicted import averaged
from graphopt.distributed.ranks import Ranks
from graphopt.errors import InputError, NothingToPlan, PassError
from graphopt.frontend.accepted import (
    require_bare,
    require_module,
    require_no_mesh,
    require_storage,
    training_mode,
    with_values,
)
from graphopt.frontend.against_eager import first_difference
from graphopt.frontend.planning_graph import analysed, for_parts, planning_graph
from graphopt.graph import TrainingGraph
from graphopt.loss import LossFunction
from graphopt.lower import Backend, check_backend
from graphopt.passes import Pass, Preserves
from graphopt.planner.capacity import capacity
from graphopt.planner.flops_limit import default_limit
from graphopt.planner.guidance import Worth, worth_of_flops
from graphopt.planner.make_plan import make_plan
from graphopt.planner.parallel import MARGIN, MemoryPlan, check_devices, plan_devices
from graphopt.planner.pareto import Point, trade_offs
from graphopt.planner.plan import resolve_passes
from graphopt.runtime.captures import Captures
from graphopt.runtime.disabled import VARIABLE, DisabledModule, switched_off
from graphopt.runtime.module import OptimizedModule
from graphopt.runtime.stages import stage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)


def optimize(
    model: nn.Module,
    example_inputs: Any,
    budget: Limits = None,
    passes: str | Sequence[str | Pass] = "auto",
    backend: Backend = "inductor",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: LossFunction | None = None,
    batch_dim: BatchDim = 0,
    outputs: Literal["all", "loss"] = "all",
    verify: bool = False,
    fullgraph: bool = False,
    group: torch.distributed.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> OptimizedModule:
    """The same model with a cheaper training step.

    Where torch.distributed is initialised, all ranks call it, each with its own batch: gradients are averaged before tensors are
    rated, and rank 0's plan is everybody's. `DistributedDataParallel(opt)` then trains as it does with the model; or `mesh` is
    given, and the compiled backward itself averages the gradients that are left.

    Args:
        model: any module with trainable parameters; it is not changed, and shares its tensors with the result.
        example_inputs: one batch, as a tuple (`model(*inputs)`) or a dict (`model(**inputs)`), labels included.
        budget: what a step may cost: a `Budget`, its `flops`, "auto" (see `Budget.or_more`), or None: nothing is approximated.
        passes: "auto" for those that the budget needs, or names and pass objects.
        backend: "inductor", "aot_eager", or a callable `(gm, inputs) -> callable`.
        optimizer: tensors that it does not hold are not selected. `GreenTrainer(rule="greentrainer")` rates tensors by its next
            step; without it, by their squared gradient.
        loss: a scalar from the model's output, for a model that does not return a loss; its gradient on the example batch tells
            where the loss is steepest, which counts where not all tensors can be trained (see `GreenTrainer`).
        batch_dim: which dimension of each input is the batch: a number, or per input name (None: it has no batch).
        outputs: "loss" if training reads nothing but the model's loss, its first output: logits, hidden states and other tensors
            are then not kept, nor computed where only they need it, and reading one in training raises `OutputError`. Under
            `torch.no_grad()` all outputs are there.
        verify: run one compiled step on the example batch and compare outputs, gradients and buffers with eager autograd; if one
            differs, warn which, and train the model as it is. Leaves no trace in the model. Of a sampler the step without
            sampling is compared.
        fullgraph: refuse a model that is not one graph. By default its parts are planned together, what cannot be planned is
            compiled as torch.compile has it, and `opt.report` says so.
        group: the processes that train this model together, by default all.
        mesh: of one dimension: the same, and their gradients are averaged in the graph; then nothing else may average them. The
            weights have to be equal on all ranks.
    Returns:
        A module that is called as `model` is; compiled for each batch shape when it first comes. With GRAPHOPT_DISABLE=1 in the
        environment, or where `verify` finds a difference, one that runs the model itself (see `DisabledModule`).
    Raises:
        BudgetError, InputError, PassError, CaptureError, ImportanceError, RankError, TorchVersionError: with cause and remedy.
    """
    budget = Budget.of(budget)
    require_module(model, optimizer, loss)
    budget, unlimited = budget_for(model, budget)
    if outputs not in ("all", "loss"):
        raise InputError(f"outputs={outputs!r}: use 'all' or 'loss'.")
    if outputs == "loss" and loss is not None:
        raise InputError("outputs='loss' keeps the model's own loss alone, of which loss= cannot compute another: leave one out.")
    if switched_off():
        require_no_mesh(mesh, f"{VARIABLE} is set")
        return DisabledModule(model, budget, f"{VARIABLE} is set", backend, loss, ranks=Ranks(group))
    chosen = resolve_passes(passes, budget)
    check_backend(backend)
    require_storage(model, limited=budget.flops is not None or budget.memory is not None)
    require_bare(model)
    ranks = ranks_for(model, mesh, group)
    args, kwargs = ranks.together(lambda: with_values(*as_call(example_inputs, batch_dim)), "reading the batch")
    chosen = for_ranks(chosen, ranks, passes == "auto", mesh is not None, model)
    sampled = any(p.preserves is Preserves.UNBIASED for p in chosen)
    captures = Captures(model, batch_dim, backend, sampled, ranks.rank, outputs == "loss", loss is None)
    captures.long_to_eager = not (budget.stated() or fullgraph) and (passes == "auto" or not chosen)
    with training_mode(model), whole_graphs():
        start = time.perf_counter()
        try:
            require_ranks(model, ranks)
            trace = functools.partial(captures.graph, args, kwargs)
            capture = functools.partial(planning_graph, model, trace, args, kwargs, batch_dim, fullgraph, captures.long_to_eager)
            graph, unplanned = ranks.together(capture, "capturing the model")
            require_same_graph(graph, ranks)
            if mesh is not None:
                require_same_weights(model, ranks)
        except NothingToPlan as nothing:
            why = str(nothing).removesuffix(".")
            if passes != "auto" and chosen:
                raise PassError(f"{chosen[0].name} has nothing to work on: {why}.") from nothing
            require_no_mesh(mesh, why)
            logger.warning("%s. The model runs as torch.compile has it.", why)
            return DisabledModule(model, budget, why, backend, loss, compiles=True, ranks=ranks)
        capture_seconds = time.perf_counter() - start
        if unplanned is not None or is_divided(model):
            why = "they are divided among ranks" if unplanned is None else graph.static_reason
            chosen = for_parts(chosen, passes == "auto", why)
        not_separable = functools.partial(captures.not_separable, args=args, kwargs=kwargs)
        auto = passes == "auto"
        make = functools.partial(make_plan, model, args, kwargs, graph, budget, chosen, optimizer, loss, backend)
        with stage("plan"):
            plan = ranks.together(lambda: make(not_separable, auto, ranks), "planning")
            plan = plan_of_rank_0(plan, ranks, chosen, "planning")
    seconds = time.perf_counter() - start - capture_seconds
    opt = OptimizedModule(model, captures, graph, plan, loss, seconds, unplanned is not None, fullgraph, ranks)
    unaveraged = to_be_averaged(model) if mesh is None and ranks.several else ""
    for told in filter(None, (*(unplanned or ()), unlimited, unaveraged)):
        opt.note(told)
    opt.start_techniques()
    if verify:
        with training_mode(model):
            mine = ranks.together(lambda: first_difference(opt, args, kwargs), "verifying")
            difference = next(filter(None, ranks.gather(mine, "verifying")), "")
        if difference:
            require_no_mesh(mesh, f"verify=True found that {difference}")
            logger.warning("the optimised step is not eager's: %s. The model is trained as it is.", difference)
            return DisabledModule(model, budget, f"verify=True found that {difference}", backend, loss, ranks=ranks)
    return opt


@dataclass(frozen=True)
class Analysis:
    """What a training step of a model costs.

    Attributes:
        flops: FLOPs per step and per tensor, as integers and as formulas of the batch size.
        graph: the captured joint graph.
        device: the device the kernels were chosen for; attention kernels differ between devices.
    """

    flops: FlopProfile
    graph: TrainingGraph
    device: str
    _measure_memory: Callable[[TrainingGraph | None], MemoryProfile] = field(repr=False, compare=False)
    _averages: bool = field(default=False, repr=False, compare=False)

    @cached_property
    def memory(self) -> MemoryProfile:
        """Bytes of a step as a timeline; found when first asked for.

        Raises:
            InputError, CaptureError: see `step_memory` and `eager_memory`.
        """
        return self._measure_memory(None)

    def memory_on(self, ranks: int) -> MemoryProfile | None:
        """`memory` on each of several ranks under `optimize(mesh=...)`; None if the graph does not average each backward."""
        return self._measure_memory(averaged(self.graph, ranks)) if self._averages and ranks > 1 else None


def analyze(
    model: nn.Module,
    example_inputs: Any,
    *,
    cost: Literal["exact", "paper"] = "exact",
    batch_dim: BatchDim = 0,
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor",
    optimizer: str | OptimizerFactory | torch.optim.Optimizer | None = "adamw",
    accumulation: int = 1,
    master_weights: bool = False,
    keep_outputs: bool = False,
    loss: LossFunction | None = None,
) -> Analysis:
    """Count the FLOPs and bytes of a training step, without compiling, allocating or changing anything.

    Args:
        model: its weights may be real, fake, or on the meta device.
        example_inputs: as for `optimize`.
        cost: "exact" counts the operators of the graph; "paper" applies GreenTrainer's own rules per tensor.
        batch_dim: as for `optimize`.
        backend: whose memory: "inductor" and "aot_eager" as of `optimize`, "eager" for the model as it is, uncompiled.
        optimizer: whose memory: "sgd", "momentum", "adam", "adamw" (torch's default form for the device, or with
            "-loop", "-foreach", "-fused"), "momentum8bit", "adam8bit", "adamw8bit", a function from parameters to an optimizer,
            an optimizer to take type and defaults from, or None.
        accumulation: backward passes per optimizer step, for the memory.
        master_weights: half-precision parameters have float32 copies that the optimizer steps.
        keep_outputs: the caller holds all outputs until the step ends, not only the loss.
        loss: as for `optimize`; used by the memory of "eager" alone.
    Raises:
        InputError, CaptureError, TorchVersionError: with cause and remedy.
    """
    if cost not in ("exact", "paper"):
        raise InputError(f"cost={cost!r}: use 'exact' or 'paper'.")
    if backend not in ("inductor", "aot_eager", "eager"):
        raise InputError(f"backend={backend!r}: use 'inductor', 'aot_eager' or 'eager'.")
    if not isinstance(accumulation, Integral) or accumulation < 1:
        raise InputError(f"accumulation={accumulation!r} must be a whole number of at least 1 backward per optimizer step.")
    check_optimizer(optimizer)
    require_module(model, loss=loss)
    args, kwargs = as_call(example_inputs, batch_dim)
    with training_mode(model):
        graph = analysed(model, args, kwargs, batch_dim)
    profile = flop_profile(graph) if cost == "exact" else paper_profile(graph)
    device = next((str(n.meta["val"].device) for n in graph.placeholders), "cpu")
    options = {"accumulation": accumulation, "master_weights": master_weights, "keep_outputs": keep_outputs}

    def measure_memory(on_ranks: TrainingGraph | None) -> MemoryProfile:
        with stage("memory"), training_mode(model):
            if backend != "eager":
                return step_memory(on_ranks or graph, backend, optimizer, **options)
            return eager_memory(model, args, kwargs, batch_dim, optimizer, loss=loss, **options)

    return Analysis(profile, graph, device, measure_memory, backend != "eager" and accumulation == 1)


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    devices: int,
    device_memory: int | str,
    optimizer: str | OptimizerFactory | torch.optim.Optimizer | None = "adamw",
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor",
    tensor_parallel: int | None = None,
    context_bytes: int = CONTEXT_BYTES,
    margin: float = MARGIN,
    allow_within_margin: bool = False,
    batch_dim: BatchDim = 0,
    accumulation: int = 1,
    master_weights: bool = False,
) -> MemoryPlan:
    """How to train a model on `devices` equal devices: the strategy, the batch, and what else was considered.

    Args:
        model, example_inputs, optimizer, backend, batch_dim, accumulation, master_weights: as for `analyze`.
        devices, device_memory, tensor_parallel, context_bytes, margin, allow_within_margin: see `plan_devices`.
    Raises:
        BudgetError, InputError, CaptureError, TorchVersionError: with cause and remedy.
    """
    check_devices(devices, device_memory, tensor_parallel, margin)
    require_undivided(model)
    analysis = analyze(
        model,
        example_inputs,
        batch_dim=batch_dim,
        backend=backend,
        optimizer=optimizer,
        accumulation=accumulation,
        master_weights=master_weights,
    )
    return plan_devices(
        analysis.memory,
        devices,
        device_memory,
        averaging=analysis.memory_on(devices),
        tensor_parallel=tensor_parallel,
        context_bytes=context_bytes,
        margin=margin,
        allow_within_margin=allow_within_margin,
    )


def worth(graph: TrainingGraph) -> tuple[Worth, ...]:
    """What each fraction of a full step's FLOPs buys: how much of the value the best selection within it trains.

    What exact passes save is allowed for, as where `optimize` selects. Tensors are rated by place and size alone, without a step.

    Args:
        graph: of `analyze`.
    """
    limit = default_limit(graph, flop_profile(graph))
    values = capacity(graph, limit.profile).values
    return worth_of_flops(limit.costs, [values[name] for name in limit.costs.names], spare_flops=limit.likely_saved)


def pareto(
    model: nn.Module,
    example_inputs: Any,
    *,
    backend: str = "aot_eager",
    optimizer: str | OptimizerFactory | torch.optim.Optimizer | None = "adamw",
    batch_dim: BatchDim = 0,
    advance: Callable[[], object] = lambda: None,
) -> tuple[Point, ...]:
    """What a training step of a model can cost: the best plans over FLOPs and memory, with the value that they keep.

    Args:
        model, example_inputs, backend, optimizer, batch_dim: as for `analyze`.
        advance: called as the search goes on, for a progress bar; see `trade_offs`.
    Raises:
        BudgetError, InputError, CaptureError, TorchVersionError: with cause and remedy.
    """
    if backend not in ("inductor", "aot_eager"):
        raise InputError(f"backend={backend!r}: use 'inductor' or 'aot_eager'.")
    graph = analyze(model, example_inputs, optimizer=optimizer, batch_dim=batch_dim).graph
    return trade_offs(graph, backend, optimizer, advance)
