"""One run of `graphopt bench selection`: a task fine-tuned with the tensors that a rule selects, and nothing else trained.

Gradients of a dy-only cut are those of a model whose other tensors are frozen, so that runs freeze them and need no compiling.
FLOPs are counted on the graph as exact rewrites leave it, for every rule alike; seconds are not compared here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphopt
from graphopt.analysis.flops import flop_profile
from graphopt.bench.glosses import rate_factor
from graphopt.bench.selection_tasks import Task, batches, evaluate, load
from graphopt.bench.tuning import RESULTS, finished_runs
from graphopt.graph import TrainingGraph
from graphopt.integrations.models import quiet_transformers
from graphopt.planner.costs import BackwardCosts
from graphopt.planner.flops_limit import FlopsLimit, default_limit
from graphopt.planner.plan import resolve_passes
from graphopt.planner.simple_rules import Shapes, in_order, is_vector, shuffled, small_first, topmost

PERIOD = 50
"""Steps between two sets of the rotation."""


@dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        task: of `selection_tasks.TASKS`.
        rule: of `RULES`, or "full".
        flops: of a step, as a fraction of full training's.
        rate: peak learning rate; it rises over the first tenth of the steps and then falls to 0, both linearly.
        seed: of the model's head, the batches and dropout.
        draw: of a random rule.
    """

    task: str
    rule: str
    flops: float
    rate: float
    steps: int
    seed: int
    draw: int = 0


@dataclass(frozen=True)
class Problem:
    """What a rule selects from.

    Attributes:
        flops: of a step, as a fraction of full training's; `limit` is what it leaves to the backward.
    """

    task: Task
    costs: BackwardCosts
    shapes: Shapes
    flops: float
    limit: int
    seed: int
    draw: int


def ours(problem: Problem) -> list[int]:
    """What `optimize` selects by itself."""
    return _planned(problem)


def by_place(problem: Problem) -> list[int]:
    """By place and size alone, without gradients."""
    return _planned(problem, graphopt.passes.GreenTrainer(rule="capacity"))


def published(problem: Problem) -> list[int]:
    """GreenTrainer's importance, by AdamW's next step on one batch, with exact costs."""
    return _planned(problem, graphopt.passes.GreenTrainer(rule="greentrainer"))


def attention_first(problem: Problem) -> list[int]:
    """The output layer, matrices of attention from the output down, then biases and norms, then the rest."""
    names, count = problem.costs.names, range(len(problem.costs.names))
    heads = [k for k in count if any(part in names[k] for part in ("classifier", "pooler", "lm_head"))]
    attention = [k for k in count if "attn" in names[k] or "attention" in names[k]]
    wide = [k for k in attention if not is_vector(problem.shapes[names[k]])]
    small = [k for k in count if is_vector(problem.shapes[names[k]])]
    return in_order(problem.costs, dict.fromkeys([*heads, *wide, *small, *count]), problem.limit)


def _simple(rule: Callable[[BackwardCosts, Shapes, int], list[int]]) -> Callable[[Problem], list[int]]:
    return lambda problem: rule(problem.costs, problem.shapes, problem.limit)


def _random(problem: Problem) -> list[int]:
    return shuffled(problem.costs, problem.shapes, problem.limit, problem.draw)


RULES: dict[str, Callable[[Problem], list[int]]] = {
    "ours": ours,
    "topmost": _simple(topmost),
    "random": _random,
    "attention first": attention_first,
    "biases and norms first": _simple(small_first),
    "rotation": _random,
    "greentrainer": published,
    "place and size": by_place,
}


def _planned(problem: Problem, selecting: graphopt.passes.GreenTrainer | None = None) -> list[int]:
    """What `optimize` selects, by a rule of this pass; exact rewrites save as much for every rule."""
    model = problem.task.make_model(problem.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=problem.task.rate)
    batch = problem.task.example() if selecting is None else next(batches(problem.task.train, problem.seed))
    passes: list[Any] | str = "auto"
    if selecting is not None:
        wanted = resolve_passes("auto", graphopt.Budget(flops=problem.flops))
        passes = [selecting if p.name == selecting.name else p for p in wanted]
    opt = graphopt.optimize(model, batch, problem.flops, passes, "aot_eager", optimizer=optimizer)
    selected = opt.selected
    return [k for k, name in enumerate(problem.costs.names) if name in selected]


@functools.cache
def _loaded(task: str, folder: Path) -> tuple[Task, TrainingGraph, Shapes]:
    found = load(task, folder)
    model = found.make_model(0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return found, graphopt.analyze(model, found.example()).graph, shapes


@functools.cache
def _limited(task: str, folder: Path, flops: float) -> tuple[Task, FlopsLimit, Shapes]:
    """A task, what its gradients cost after exact rewrites within a budget, and its shapes."""
    found, graph, shapes = _loaded(task, folder)
    return found, default_limit(graph, flop_profile(graph), flops), shapes


def train(run: Run, folder: Path) -> dict[str, Any]:
    """Fine-tune, and evaluate on the rows for tuning and on those that are held out.

    A run of another rule that trained the same tensors in the same way is not repeated: its result is returned.

    Args:
        folder: of the finished runs; see also `load`.
    """
    quiet_transformers()
    torch.set_num_threads(1)
    task, limit, shapes = _limited(run.task, folder, run.flops)
    costs = limit.costs
    torch.set_float32_matmul_precision(task.precision)
    start = time.perf_counter()
    chosen = _chosen(run, task, limit, shapes, 0)
    choosing = time.perf_counter() - start
    trained_names = [costs.names[k] for k in chosen]
    flops = limit.costs.part(costs.forward_flops + costs.cost(chosen))
    for earlier in finished(folder / RESULTS):
        if run.rule != "rotation" and earlier["trained"] == trained_names and _trains_alike(earlier, run):
            return {**earlier, **asdict(run), "step_flops": flops, "choosing_seconds": choosing, "seconds": 0.0}
    model = task.make_model(run.seed)
    parameters = dict(model.named_parameters())
    trained = range(len(costs.names)) if run.rule == "rotation" else chosen
    optimizer = torch.optim.AdamW([parameters[costs.names[k]] for k in trained], lr=run.rate, fused=True)
    _train_only(parameters, costs, chosen)
    torch.manual_seed(run.seed)  # choosing draws different numbers for each rule
    start = time.perf_counter()
    for step, batch in zip(range(run.steps), batches(task.train, run.seed), strict=False):
        if run.rule == "rotation" and step and step % PERIOD == 0:
            _train_only(parameters, costs, _chosen(run, task, limit, shapes, step // PERIOD))
        for group in optimizer.param_groups:
            group["lr"] = run.rate * rate_factor(step / run.steps, 1 / run.steps)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    accuracy, loss = evaluate(model, task.tuning)
    held_out, held_out_loss = evaluate(model, task.held_out)
    return {
        **asdict(run),
        "accuracy": accuracy,
        "loss": loss,
        "held_out": held_out,
        "held_out_loss": held_out_loss,
        "trained": trained_names,
        "step_flops": flops,
        "seconds": seconds,
        "choosing_seconds": choosing,
    }


def finished(file: Path) -> list[dict[str, Any]]:
    """See `finished_runs`."""
    return finished_runs(file, Run, "trained")


def _trains_alike(earlier: dict[str, Any], run: Run) -> bool:
    same = all(earlier[name] == getattr(run, name) for name in ("task", "rate", "steps", "seed"))
    return same and earlier["rule"] != "rotation"


def _chosen(run: Run, task: Task, limit: FlopsLimit, shapes: Shapes, period: int) -> list[int]:
    costs, most = limit.costs, limit.most - limit.profile.forward
    if run.rule == "full":
        return list(range(len(costs.names)))
    return RULES[run.rule](Problem(task, costs, shapes, run.flops, most, run.seed, run.draw + 1000 * period))


def _train_only(parameters: dict[str, nn.Parameter], costs: BackwardCosts, chosen: list[int]) -> None:
    names = {costs.names[k] for k in chosen}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in names)
