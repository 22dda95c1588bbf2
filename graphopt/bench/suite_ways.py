"""Ways to fine-tune that `graphopt bench suite` compares: exact training, graphopt's techniques, and what people use instead.

Baselines are those of the papers, compiled like all others: LoRA and DoRA by `peft`; GaLore and APOLLO as optimizers of our own;
LISA and BAdam, which train a few layers at a time, other ones every `PERIOD` steps.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.analysis.flops import flop_profile
from graphopt.bench.cpu_formulas import cpu_formulas
from graphopt.bench.glosses import Batch
from graphopt.bench.projected_adamw import ApolloAdamW, GaloreAdamW
from graphopt.compat.dynamo import compiled_by, seconds_compiling
from graphopt.passes import GreenTrainer, Lsp, Vcas
from graphopt.planner.flops_limit import default_limit
from graphopt.planner.plan import resolve_passes
from graphopt.planner.simple_rules import SIMPLE_RULES

FLOPS, VARIANCE, RANK, PERIOD = 0.5, 0.025, 8, 50
"""Of full training's; of the sampler; of adapters and of projected gradients; steps between two choices of layers."""

HEADS = ("classifier", "pooler", "lm_head")
"""Layers that fine-tuning trains in full beside adapters; the last of a language model stays as it is."""


@dataclass(frozen=True)
class Prepared:
    """A way to train, ready for its first step.

    Attributes:
        model: to evaluate.
        step: called as the model is.
        after_step: called with every batch after its step.
        compile_seconds: spent on tracing and compiling so far.
        step_flops: mean FLOPs of the steps so far (2 per multiply-add), for batches like the example; asked for at the end.
    """

    model: nn.Module
    step: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    after_step: Callable[[Batch], object]
    compile_seconds: Callable[[], float]
    step_flops: Callable[[], float]


@dataclass
class Apart:
    """What the benchmark itself has to find out for a way, which does not count in its time.

    Attributes:
        seconds: all in all.
        compiling: those of them that are counted as tracing and compiling.
    """

    seconds: float = 0.0
    compiling: float = 0.0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """What is inside does not count."""
        begin, traced = time.perf_counter(), seconds_compiling()
        yield
        self.seconds += time.perf_counter() - begin
        self.compiling += seconds_compiling() - traced


@dataclass(frozen=True)
class Start:
    """What a way begins with.

    Attributes:
        example: a batch of full length.
        rate: peak learning rate.
        apart: see `Apart`.
    """

    model: nn.Module
    example: Batch
    rate: float
    seed: int
    backend: str
    apart: Apart = field(default_factory=Apart)


Way = Callable[[Start], Prepared]


def exact(start: Start) -> Prepared:
    """`torch.compile` and AdamW."""
    return _compiled(start, start.model, _adamw(start.model, start.rate))


def checkpointed(start: Start) -> Prepared:
    """The same with every layer's activations computed again, as transformers does it."""
    enable: Any = start.model.gradient_checkpointing_enable
    enable()
    return exact(start)


def within(budget: graphopt.Budget, passes: Any = "auto") -> Way:
    """A budget, met by some passes."""

    def prepare(start: Start) -> Prepared:
        optimizer = _adamw(start.model, start.rate)
        opt = graphopt.optimize(start.model, start.example, budget, passes, start.backend, optimizer=optimizer)
        return _planned(start.model, opt, optimizer)

    return prepare


def within_memory(part: float) -> Way:
    """A budget of a part of the peak that exact training with AdamW is predicted to have."""

    def prepare(start: Start) -> Prepared:
        optimizer = _adamw(start.model, start.rate)
        with start.apart():
            peak = graphopt.analyze(start.model, start.example, optimizer=optimizer).memory.peak_bytes
        return within(graphopt.Budget(memory=int(part * peak)))(start)

    return prepare


def by_rule(rule: str) -> Way:
    """Tensors that a simple rule selects within the same FLOPs, counted after exact rewrites."""

    def prepare(start: Start) -> Prepared:
        with start.apart():
            graph = graphopt.analyze(start.model, start.example).graph
            limit = default_limit(graph, flop_profile(graph), FLOPS)
        shapes = {p.name: p.shape for p in graph.parameters}
        chosen = SIMPLE_RULES[rule](limit.costs, shapes, limit.most - limit.profile.forward)
        train = tuple(limit.costs.names[k] for k in chosen)
        passes: list[Any] = [GreenTrainer(train=train), *resolve_passes("auto", graphopt.Budget())]
        opt = graphopt.optimize(start.model, start.example, passes=passes, backend=start.backend)
        return _planned(start.model, opt, _adamw(start.model, start.rate))

    return prepare


def compressed(start: Start) -> Prepared:
    """Compressed gradients in subspaces of a quarter of a matrix's width, by dense projectors."""
    width = min(max(p.shape) for p in start.model.parameters() if p.dim() == 2 and min(p.shape) > 2 * RANK)
    size = max(RANK, width // 4)
    rewrite = Lsp(subspace=size, nonzeros=size, check_every=200, batches=16, threshold=0.3)
    opt = graphopt.optimize(start.model, start.example, passes=[rewrite], backend=start.backend)
    return _planned(start.model, opt, opt.make_optimizer(torch.optim.AdamW, lr=start.rate))


def adapted(reordered: bool = False, **options: Any) -> Way:
    """Adapters on every linear layer below the head; a classifier is trained in full.

    Args:
        reordered: with their products in the cheapest order.
        options: further ones of `peft.LoraConfig`.
    """

    def prepare(start: Start) -> Prepared:
        from peft import LoraConfig, get_peft_model

        linear = [name for name, m in start.model.named_modules() if isinstance(m, nn.Linear)]
        config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=[name for name in linear if not any(part in HEADS for part in name.split("."))],
            modules_to_save=[part for part in HEADS[:2] if any(part in name.split(".") for name in linear)],
            **options,
        )
        model: nn.Module = get_peft_model(start.model, config).train()
        optimizer = _adamw(model, start.rate)
        if not reordered:
            return _compiled(start, model, optimizer)
        opt = graphopt.optimize(model, start.example, passes=["runlora"], backend=start.backend)
        return _planned(model, opt, optimizer)

    return prepare


def projected(make: Callable[..., torch.optim.Optimizer]) -> Way:
    """An optimizer whose states of matrices are those of projected gradients."""
    return lambda start: _compiled(start, start.model, make(start.model.parameters(), lr=start.rate, rank=4 * RANK))


def rotating(sets: Callable[[Sequence[nn.Module], Sequence[nn.Module], int], Iterator[list[nn.Module]]]) -> Way:
    """A few modules are trained at a time, with new optimizer states each time.

    Args:
        sets: (repeated layers, all others, seed) -> what is trained in one period after the other.
    """

    def prepare(start: Start) -> Prepared:
        model, spent = start.model, [0.0]
        step = compiled_by(model, start.backend, False)
        optimizer = _adamw(model, start.rate)
        layers = next([*m] for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
        inside = {id(m) for layer in layers for m in layer.modules()}
        others = [m for m in model.modules() if id(m) not in inside and [*m.parameters(recurse=False)]]
        order = sets(layers, others, start.seed)
        turns: list[frozenset[int]] = []
        count = [0]

        def put_in_force(trained: frozenset[int]) -> None:
            for p in model.parameters():
                p.requires_grad_(id(p) in trained)
                p.grad = None

        def turn() -> None:
            trained = frozenset(id(p) for m in next(order) for p in m.parameters())
            put_in_force(trained)
            optimizer.state.clear()
            if trained not in turns:
                spent[0] += _first_step(step, start.example, model)
            turns.append(trained)

        def flops() -> float:
            total = 0
            for trained, times in Counter(turns).items():
                put_in_force(trained)
                total += times * counted_flops(model, start.example)
            put_in_force(turns[-1])
            return total / len(turns)

        def after_step(batch: Batch) -> None:
            count[0] += 1
            if count[0] % PERIOD == 0:
                turn()

        turn()
        return Prepared(model, step, optimizer, after_step, lambda: spent[0], flops)

    return prepare


def two_layers(layers: Sequence[nn.Module], others: Sequence[nn.Module], seed: int) -> Iterator[list[nn.Module]]:
    """LISA (arXiv 2403.17919): embeddings and head always, two of the layers by chance."""
    draw = random.Random(seed)
    while True:
        yield [*others, *draw.sample(list(layers), 2)]


def one_block(layers: Sequence[nn.Module], others: Sequence[nn.Module], seed: int) -> Iterator[list[nn.Module]]:
    """BAdam (arXiv 2404.02827): one block after the other, in an order drawn for each round."""
    draw = random.Random(seed)
    blocks = [[layer] for layer in layers] + [list(others)]
    while True:
        draw.shuffle(blocks)
        yield from blocks


WAYS: dict[str, Way] = {
    "exact": exact,
    "auto": within(graphopt.Budget.of("auto")),
    "flops=0.5": within(graphopt.Budget(flops=FLOPS)),
    "flops=0.4": within(graphopt.Budget(flops=0.4)),
    "flops=0.6": within(graphopt.Budget(flops=0.6)),
    "flops=0.7": within(graphopt.Budget(flops=0.7)),
    "memory=0.5": within_memory(0.5),
    "vcas": within(graphopt.Budget(variance=VARIANCE), [Vcas(every=50, alpha=0.03, beta=0.85)]),  # for short training
    "lsp": compressed,
    "reordered LoRA": adapted(reordered=True),
    "LoRA": adapted(),
    "DoRA": adapted(use_dora=True),
    "GaLore": projected(GaloreAdamW),
    "APOLLO": projected(ApolloAdamW),
    "LISA": rotating(two_layers),
    "BAdam": rotating(one_block),
    "topmost": by_rule("topmost"),
    "random": by_rule("random"),
    "checkpointing": checkpointed,
}
"""What is compared, by name."""


def _adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, fused=True)


def _compiled(start: Start, model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """`torch.compile`; its first step, on the example, is counted as compiling."""
    step = torch.compile(model, backend=start.backend)
    elapsed = _first_step(step, start.example, model)
    return Prepared(model, step, optimizer, lambda batch: None, lambda: elapsed, lambda: counted_flops(model, start.example))


def counted_flops(model: nn.Module, example: Batch) -> int:
    """FLOPs of the products and convolutions of a step in eager mode, as torch's own counter sees them; leaves no gradients."""
    with FlopCounterMode(display=False, custom_mapping=cpu_formulas()) as counter:
        model(**example).loss.backward()
    model.zero_grad()
    return counter.get_total_flops()


def _first_step(step: Callable[..., Any], example: Batch, model: nn.Module) -> float:
    """Seconds of a step that leaves nothing behind but compiled code."""
    before = {name: b.clone() for name, b in model.named_buffers()}
    begin = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        step(**example).loss.backward()
    model.zero_grad()
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(before[name])
    return time.perf_counter() - begin


def _planned(model: nn.Module, opt: graphopt.OptimizedModule, optimizer: torch.optim.Optimizer) -> Prepared:
    controller, counters = opt.controller, opt.counters
    after_step = (lambda batch: None) if controller is None else controller.after_step

    def flops() -> float:
        return opt.report.step_flops if controller is None else (1 - controller.flops_saved) * opt.report.full_step_flops

    return Prepared(model, opt, optimizer, after_step, lambda: counters.capture_seconds + counters.compile_seconds, flops)
