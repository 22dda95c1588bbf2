"""A technique of somebody else's: decisions, refusals, checkpoints and a state, without a change to the core."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from graphopt.passes import DeadRows, GreenTrainer, LinearCrossEntropy, Lsp, Pass, Preserves, Recompute, Site, Vcas
from graphopt.passes.base import Changes
from graphopt.passes.technique import Planning, Technique
from graphopt.passes.vcas import SampleSizes
from torch import Tensor, nn

import graphopt
from graphopt.budget import Budget
from graphopt.errors import InputError, PassError
from graphopt.graph import TrainingGraph
from graphopt.planner.plan import Plan
from tests import zoo


@dataclass(frozen=True)
class Kept:
    """The parameters whose gradient is kept."""

    names: tuple[str, ...]

    @property
    def key(self) -> Hashable:
        return self.names


@dataclass(frozen=True)
class EveryOther(Technique):
    """Keeps the gradients of every other parameter, from the largest down."""

    name = "every other"
    preserves = Preserves.EXACT
    serves = ()
    by_part = True
    decides = Kept

    def check(self, budget: Budget, passes: Sequence[Pass]) -> None:
        if budget.flops is not None:
            raise PassError("every other: what is trained is not for a budget to say.")

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        return [Site(p.name) for p in graph.trainable]

    def after_selection(self, plan: Plan, planning: Planning) -> Plan:
        sizes: Mapping[str, Tensor] = planning.tensors
        order = sorted((site.name for site in self.applicable(planning.graph)), key=lambda name: -sizes[name].numel())
        return plan.decided(self.name, Kept(tuple(order[::2])))

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[Any, tuple[Any, ...]]:
        kept = plan.decisions[self.name].names
        return {site.name for site in self.applicable(graph)} & set(kept), (f"{len(kept)} kept",)

    def apply(self, graph: TrainingGraph, decisions: set[str]) -> Changes:
        cut = [p.name for p in graph.trainable if p.name not in decisions]
        for name in cut:
            graph.drop_gradient(name)
        graph.eliminate_dead_code()
        return Changes(tuple(cut))

    def start(self, opt: Any) -> None:
        STARTED.append(opt.plan.decisions[self.name])


STARTED: list[Kept] = []


def optimized() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, inputs = zoo.make("mlp", 6)
    return model, inputs, graphopt.optimize(model, inputs, passes=[EveryOther()], backend="aot_eager")


def test_it_decides_and_is_reported() -> None:
    STARTED.clear()
    model, inputs, opt = optimized()
    kept = set(opt.plan.decisions["every other"].names)
    assert [set(k.names) for k in STARTED] == [kept]
    zoo.loss_of(opt(*inputs)).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == kept
    (report,) = opt.last_step.reports
    assert report.choices == (f"{len(kept)} kept",)
    assert report.step_flops_after < report.step_flops_before


def test_what_it_decides_is_in_a_checkpoint(tmp_path: Path) -> None:
    _, _, opt = optimized()
    chosen = opt.plan.decisions["every other"].names[:1]
    opt.decide("every other", Kept(chosen))
    opt.save_state(tmp_path / "state")
    model, inputs, other = optimized()
    other.load_state(tmp_path / "state")
    zoo.loss_of(other(*inputs)).backward()
    assert tuple(name for name, p in model.named_parameters() if p.grad is not None) == chosen


def test_it_refuses_in_its_own_words() -> None:
    model, inputs = zoo.make("mlp", 6)
    with pytest.raises(PassError, match="not for a budget to say"):
        graphopt.optimize(model, inputs, Budget(flops=0.7), [EveryOther()])


@pytest.mark.parametrize(("ratios", "size"), [((("a", 1.5),), 4), ((), -1)])
def test_a_damaged_decision_is_refused(ratios: Any, size: int) -> None:
    with pytest.raises(InputError, match="ratios of vcas"):
        SampleSizes(ratios, size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearCrossEntropy(chunks=2.0), "linear_cross_entropy: chunks=2.0 must be a whole number of at least 1"),
        (lambda: LinearCrossEntropy(chunks="2"), "chunks='2'"),
        (lambda: DeadRows(labelled="0.5"), "dead_rows: labelled='0.5' must be a number above 0"),
        (lambda: Lsp(seed="x"), "lsp: seed='x' must be a whole number"),
        (lambda: Vcas(keep_rows=0.5, seed=2**70), "vcas: seed="),
        (lambda: GreenTrainer(train="a.weight"), "greentrainer: train='a.weight' is one name"),
        (lambda: Recompute(5), "recompute: segments=5"),
    ],
)
def test_fields_that_hold_something_else_are_refused_when_a_technique_is_made(make: Any, message: str) -> None:
    with pytest.raises(PassError, match=re.escape(message)):
        make()


def test_names_are_a_tuple_however_they_were_given() -> None:
    """Of `Lsp`, () and None are different things, which [] must be, too."""
    assert Lsp(weights=[]) == Lsp(weights=())  # type: ignore[arg-type]
    assert Lsp(weights={"c", "a", "b"}).weights == ("a", "b", "c")  # type: ignore[arg-type]  # in every process
    assert LinearCrossEntropy(chunks=numpy.int64(2)) == LinearCrossEntropy(chunks=2)  # type: ignore[arg-type]
    assert GreenTrainer(train=(name for name in "ab")) == GreenTrainer(train=("a", "b"))  # type: ignore[arg-type]
