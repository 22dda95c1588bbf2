"""What ranks have to agree on: a plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.compat.distributed import local_part
from graphopt.compat.fsdp import held_names
from graphopt.distributed.ranks import Ranks
from graphopt.errors import InputError, NothingToPlan, PassError
from graphopt.graph import TrainingGraph
from graphopt.passes import Pass, Preserves, communicating
from graphopt.passes.technique import technique
from graphopt.planner.plan import Plan


def plan_of_rank_0(plan: Plan, ranks: Ranks, chosen: Sequence[Pass], what: str) -> Plan:
    """Rank 0's plan, carried out by this rank's own passes.

    Args:
        plan: this rank's.
        chosen: the passes of which a plan has those that are needed.
    """
    if not ranks.several:
        return plan
    theirs = ranks.same(_decided(plan), what)
    names = theirs.pop("names")
    own = {p.name: p for p in chosen} | {p.name: p for p in plan.passes}
    decisions = {**plan.decisions, **theirs.pop("decisions")}
    return replace(plan.with_passes([own[name] for name in names]), decisions=decisions, **theirs)


def for_ranks(passes: tuple[Pass, ...], ranks: Ranks, auto: bool, mesh: bool, model: nn.Module) -> tuple[Pass, ...]:
    """The passes that several ranks can use; with a mesh, and what averages the gradients that `fully_shard` leaves alone.

    Raises:
        PassError: the caller has named another.
    """
    if not ranks.several:
        return passes
    unseen = "it keeps gradients where DistributedDataParallel does not see them; optimize(mesh=...) averages them"
    projected = {p.name: technique(p).apart if mesh else unseen for p in passes if p.preserves is Preserves.PROJECTED}
    others = {name: why for name, why in projected.items() if why}
    for name, why in others.items():
        if not auto:
            raise PassError(f"{name} cannot train on several ranks: {why}. Leave {name} out, or train on one process.")
    kept = tuple(p for p in passes if p.name not in others)
    return (*kept, communicating(ranks.samples.group_name, ranks.samples.size, held_names(model))) if mesh else kept


def require_same_graph(graph: TrainingGraph, ranks: Ranks) -> None:
    """Raise `NothingToPlan`, on every rank, where batches lead to other parameters on some."""
    found = ranks.gather(sorted(p.name for p in graph.trainable), "capturing the model")
    other = next((rank for rank, names in enumerate(found) if names != found[0]), None)
    if other is not None:
        names = sorted(set(found[0]) ^ set(found[other]))
        raise NothingToPlan(f"the batches of ranks 0 and {other} take different ways through the model: one uses {names[0]}.")


def require_same_weights(model: nn.Module, ranks: Ranks) -> None:
    """Raise `InputError`, on every rank, where weights or buffers differ: averaged gradients would not keep them together."""
    apart = held_names(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in apart}
    found = ranks.samples.gather({name: _fingerprint(tensor) for name, tensor in tensors.items()}, "comparing weights")
    for rank, theirs in enumerate(found):
        other = next((name for name in sorted({*theirs, *found[0]}) if theirs.get(name) != found[0].get(name)), None)
        if other is not None:
            raise InputError(
                f"{other} is not the same on ranks 0 and {rank}, and training by averaged gradients would not make it so. Seed "
                "all ranks alike before the model is made, load the same weights, or broadcast them from rank 0."
            )


def _fingerprint(tensor: Any) -> tuple[Any, ...]:
    """Its shape, and two sums by which it is told from another draw: of integers, which are the same in whatever order."""
    if not isinstance(tensor, Tensor):
        return ()
    dense = local_part(tensor).detach().to_dense().resolve_conj().resolve_neg().contiguous()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    bits = real.view(getattr(torch, f"int{8 * real.element_size()}")).to(torch.int64)
    return tuple(tensor.shape), str(tensor.dtype), int(bits.sum()), int(bits.square().sum())


def _decided(plan: Plan) -> dict[str, Any]:
    for rewrite in plan.passes:
        plan = technique(rewrite).alone(plan)  # no numbers that mean something in one process alone
    return {
        "names": [p.name for p in plan.passes],
        "train": plan.train,
        "selection": plan.selection,
        "importance": plan.importance,
        "not_separable": plan.not_separable,
        "not_needed": dict(plan.not_needed),
        "decisions": dict(plan.decisions),
    }


def in_common(plan: Plan) -> Hashable:
    """What of a plan must be equal on all ranks: which gradients there are, and what they are."""
    return None if plan.train is None else tuple(sorted(plan.train)), tuple(p.name for p in plan.passes)
