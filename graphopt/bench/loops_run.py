"""One case of `graphopt bench loops`: the same training loop run several times, and the first thing that is wrong."""

from __future__ import annotations

import importlib.util
import logging
import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench.breadth_run import BUDGET, seed_everything
from graphopt.bench.cases import NOT_KEPT, begin, described

BACKEND = "aot_eager"

TOLERANCE = 1e-2
"""Difference of weights and losses that counts as none: of weights as a part of the largest change that training made."""

OVER = "of the FLOPs, over flops="
"""What graphopt says of a step over its budget."""

VERDICTS = ("ok", "wrong", NOT_KEPT, "loop fails")


@dataclass
class Loop:
    """One run of a training loop: what a case takes from graphopt, and what it reports.

    Attributes:
        folder: for whatever the loop writes.
        ours: with graphopt.
        budget: of graphopt; None: it computes everything exactly.
        dropped: parameters that have no gradients, as with graphopt those that are not selected.
        losses: of the optimizer steps.
        effects: tensors that the loop collected beside, such as activations.
        problems: what a case found wrong by itself.
        callback: of the Trainer of transformers, if the loop has one.
        warnings: what graphopt warned of.
        opt: the optimised model.
    """

    folder: Path
    ours: bool = False
    budget: float | None = None
    dropped: Collection[str] = ()
    losses: list[float] = field(default_factory=list)
    effects: list[Tensor] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    callback: Any = None
    warnings: list[str] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    _model: nn.Module | None = None
    opt: Any = None

    def begin(self, model: nn.Module) -> None:
        """Look at a model's weights before it is trained."""
        self._model = model
        self.before = self.weights
        for name, parameter in model.named_parameters():
            if name in self.dropped and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def optimized(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The model, optimised where this run is with graphopt."""
        from graphopt import optimize

        self.begin(model)
        if not self.ours:
            return model
        self.opt = optimize(model, batch, self.budget, backend=BACKEND, optimizer=optimizer)
        return self.opt

    def callbacks(self) -> list[Any]:
        """For a Trainer of transformers."""
        from graphopt import TrainerCallback

        self.callback = TrainerCallback(self.budget, backend=BACKEND) if self.ours else None
        return [] if self.callback is None else [self.callback]

    def train(self, trainer: Any, model: nn.Module | None = None) -> None:
        """Have a Trainer of transformers train, evaluate and save its model in the folder `saved`, and keep its losses.

        Args:
            model: whose weights are compared; None: the Trainer's.
        """
        self.begin(trainer.model if model is None else model)
        trainer.train()
        self.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if self.callback is not None:
            self.opt = self.callback.opt
            last = next(entry for entry in reversed(trainer.state.log_history) if "graphopt/original_steps" in entry)
            if last["graphopt/original_steps"]:
                self.problems.append(f"{last['graphopt/original_steps']:.0f} steps were computed without graphopt")
            most = max(entry.get("graphopt/flops_ratio", 0.0) for entry in trainer.state.log_history)
            self.check(self.budget is None or most <= self.budget + 1e-6, f"a step took {most:.1%} of the FLOPs")
        trainer.evaluate()
        self.losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        trainer.save_model(str(self.folder / "saved"))

    def check(self, holds: bool, otherwise: str) -> None:
        """Note a problem."""
        if not holds:
            self.problems.append(otherwise)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the model that is trained, copied."""
        assert self._model is not None, "the case did not say which model it trains"
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}


@dataclass
class Case:
    """A training loop.

    Attributes:
        run: trains; with the same seed it does the same.
        group: a heading of the table.
        needs: packages that graphopt does not install, as they are imported.
        told: parts of what graphopt has to say of such a loop, such as advice; whatever else it says is a fault.
    """

    run: Callable[[Loop], None]
    group: str
    needs: Collection[str] = ()
    told: Collection[str] = ()


def cases_of(group: str, *needs: str, told: Collection[str] = (), **runs: Callable[[Loop], None]) -> dict[str, Case]:
    """Cases of one library by name, in which an underscore becomes a hyphen."""
    return {name.replace("_", "-"): Case(run, group, needs, told) for name, run in runs.items()}


def missing(case: Case) -> list[str]:
    """What pip has to install for a case."""
    return [name.replace("_", "-") for name in case.needs if importlib.util.find_spec(name) is None]


@contextmanager
def _heard(texts: list[str]) -> Iterator[None]:
    """What graphopt warns of goes to `texts` as well."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("graphopt")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def run_loop(case: Case, **options: Any) -> tuple[Loop, dict[str, Tensor]]:
    """Run a case once, in a folder of its own: what it reports, and the weights it ends with.

    Raises:
        Exception: whatever the loop raises.
    """
    torch.compiler.reset()
    seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(Path(folder), **options)
        with _heard(loop.warnings):
            case.run(loop)
    return loop, loop.weights


def difference(found: tuple[Loop, dict[str, Tensor]], wanted: tuple[Loop, dict[str, Tensor]]) -> str:
    """What two runs did not do alike; "" if nothing."""
    (ours, ended), (theirs, expected) = found, wanted
    if len(ours.losses) != len(theirs.losses):
        return f"{len(ours.losses)} losses instead of {len(theirs.losses)}"
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        if not abs(a - b) <= TOLERANCE * max(abs(b), 1e-3):
            return f"the loss of step {step + 1} is {a:.6g} instead of {b:.6g}"
    changed = max((_largest(expected[n] - theirs.before[n]) for n in expected), default=0.0)
    for name, value in expected.items():
        by = _largest(ended[name] - value) if name in ended else math.inf
        if not by <= TOLERANCE * changed:
            return f"{name} differs by {by / changed if changed else by:.1g} of the largest change"
    if len(ours.effects) != len(theirs.effects):
        return f"{len(ours.effects)} tensors were collected instead of {len(theirs.effects)}"
    for number, (one, other) in enumerate(zip(ours.effects, theirs.effects, strict=True)):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * _largest(other)):
            return f"collected tensor {number + 1} differs"
    return ""


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def uncompiled(loop: Loop, told: Collection[str] = ()) -> str:
    """Which step of a run with graphopt was not compiled as planned, or what else it has said; "" if nothing.

    Args:
        told: see `Case`.
    """
    from graphopt.runtime.disabled import DisabledModule

    if loop.opt is None:
        return "nothing was optimised"
    said = [text for text in (*loop.warnings, *loop.opt.report.notes) if not any(part in text for part in told)]
    if isinstance(loop.opt, DisabledModule) or loop.opt.model_runs or loop.opt.last_step is None:
        return f"uncompiled: {said[0] if said else 'no step was compiled'}"
    return said[0] if said else ""


def over_budget(loop: Loop, ended: Mapping[str, Tensor]) -> str:
    """What a run under a budget did that it must not do; "" if nothing. A step over its budget must at least be told of."""
    if not all(map(math.isfinite, loop.losses)):
        return f"losses are {loop.losses}"
    left = [name for name in ended if not loop.opt.selects_tensor(name)]
    moved = [name for name in left if not torch.equal(ended[name], loop.before[name])]
    if moved:
        return f"{len(moved)} tensors that are not selected were trained, as {moved[0]}"
    if not left and loop.opt.report.flops_ratio >= 1:
        return "every tensor is trained, and nothing is saved"
    ratio = loop.opt.report.flops_ratio
    told = any(OVER in text for text in (*loop.warnings, *loop.opt.report.notes))
    return "" if told or ratio <= BUDGET + 1e-6 else f"a step takes {ratio:.1%} of the FLOPs"


def measure(case: Case) -> dict[str, Any]:
    """Run a case in eager mode, exactly, under a budget, and in eager mode with what the budget trains."""
    from graphopt.integrations.models import quiet_transformers

    quiet_transformers()
    row: dict[str, Any] = {"group": case.group, "verdict": "loop fails"}
    if absent := missing(case):
        return {**row, "verdict": NOT_KEPT, "error": f"pip install {' '.join(absent)}"}
    plain: tuple[Loop, dict[str, Tensor]]

    def eager() -> str:
        nonlocal plain
        plain = run_loop(case)
        row["steps"] = len(plain[0].losses)
        wrong = next(iter(plain[0].problems), "") or ("" if plain[0].losses else "it has no losses")
        return wrong or difference(run_loop(case), plain)  # a loop that does not repeat itself cannot be compared

    def exact() -> str:
        found = run_loop(case, ours=True)
        return uncompiled(found[0], case.told) or next(iter(found[0].problems), "") or difference(found, plain)

    def budget() -> str:
        cut = loop, ended = run_loop(case, ours=True, budget=BUDGET)
        if wrong := uncompiled(loop, case.told):
            return wrong
        row["flops_ratio"] = loop.opt.report.flops_ratio
        row["selected"], row["trainable"] = len(loop.opt.selected), len(ended)
        row["compilations"] = loop.opt.counters.compilations
        dropped = frozenset(name for name in ended if not loop.opt.selects_tensor(name))
        return next(iter(loop.problems), "") or over_budget(*cut) or difference(cut, run_loop(case, dropped=dropped))

    for name, check in (("", eager), ("without a budget", exact), ("under a budget", budget)):
        row |= {"verdict": "wrong" if name else "loop fails", "run": name}
        begin(row)
        try:
            wrong = check()
        except Exception as error:
            wrong = described(error)
        if wrong:
            return {**row, "error": wrong}
    return {**row, "verdict": "ok"}
