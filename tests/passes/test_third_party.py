"""A technique of somebody else's, in one file: CONTRIBUTING's "Write a technique", followed to the letter.

Gradients rounded to multiples of s, with error feedback (Karimireddy et al., 2019, Algorithm 2): g' = s round((g + e) / s),
e <- g + e - g'. It has decisions, inputs and results of its own, a controller, a state, terms in the program and a section.
"""

from __future__ import annotations

import copy
import math
import os
import signal
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Pass, Preserves, RunLora, Site
from graphopt.passes.base import Changes, PassReport
from graphopt.passes.state import State
from graphopt.passes.technique import Found, Offers, Planning, Section, Smaller, Technique
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

import graphopt
from graphopt.budget import Budget
from graphopt.compat import InputDesc, OutputDesc
from graphopt.errors import InputError, PassError
from graphopt.graph import TrainingGraph
from graphopt.planner.plan import Plan
from graphopt.runtime.plain_values import from_plain, to_plain
from graphopt.testing import check_pass, check_passes
from graphopt.transforms.edit import insert_node
from tests import zoo
from tests.forked import ended
from tests.long_forms import long
from tests.properties.random_models import Network, networks
from tests.runtime.comparing import same
from tests.runtime.uneven import batches

aten = torch.ops.aten


@dataclass(frozen=True)
class Steps:
    """By parameter, to multiples of what its gradient is rounded."""

    sizes: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not all(0 < size < math.inf for _, size in self.sizes):
            raise InputError("the sizes of rounding are not all positive numbers.")

    @property
    def key(self) -> Hashable:
        return self.sizes


@dataclass(frozen=True)
class Error:
    """The target of an input: e of a parameter."""

    weight: str


@dataclass(frozen=True)
class Rounding(Technique):
    """See the module; s is `size`, and half of that after every `every` optimizer steps."""

    size: float = 2.0**-6
    every: int = 3
    name = "rounding"
    preserves = Preserves.PROJECTED
    serves = ()
    decides = Steps

    def check(self, budget: Budget, passes: Sequence[Pass]) -> None:
        if budget.variance is not None:
            raise PassError("rounding: a variance is measured on ordinary gradients.")

    def applicable(self, graph: TrainingGraph) -> list[Site]:
        return [Site(name) for name in graph.gradients() if name not in graph.compressed]

    def offers(self, plan: Plan, graph: TrainingGraph) -> Offers:
        return Offers(smaller={p.name: Smaller(math.prod(p.shape), 0) for p in graph.trainable}, kept_value=0.5)

    def adopt(self, plan: Plan, found: Found) -> Plan:
        return plan.decided(self.name, Steps(tuple((name, 2 * self.size) for name in found.smaller)))

    def after_selection(self, plan: Plan, planning: Planning) -> Plan:
        coarse = dict(plan.decisions.get(self.name, Steps(())).sizes)
        sites = [site.name for site in self.applicable(planning.graph)]
        return plan.decided(self.name, Steps(tuple((name, coarse.get(name, self.size)) for name in sites)))

    def decide(self, plan: Plan, captured: TrainingGraph, graph: TrainingGraph) -> tuple[Any, tuple[Any, ...]]:
        sites = {site.name for site in self.applicable(graph)}
        mine = plan.decisions.get(self.name, Steps(()))
        return {name: size for name, size in mine.sizes if name in sites}, tuple(size for _, size in mine.sizes)

    def apply(self, graph: TrainingGraph, decisions: Mapping[str, float] | Collection[str]) -> Changes:
        sizes = decisions if isinstance(decisions, Mapping) else dict.fromkeys(decisions, self.size)
        gradients = graph.gradients()
        for name, size in sizes.items():
            gradient = gradients[name]
            kept = graph.add_input(InputDesc("given", Error(name)), gradient.meta["val"])
            graph.add_input(InputDesc("compressed", name), gradient.meta["val"])
            anchor = gradient.next

            def node(target: Any, *args: Any, anchor: Any = anchor) -> Any:
                return insert_node(graph.graph, target, args, anchor)

            total = node(aten.add.Tensor, gradient, kept)
            rounded = node(aten.mul.Tensor, node(aten.round.default, node(aten.div.Tensor, total, size)), size)
            graph.compress_gradient(name, rounded)
            graph.add_backward_output(f"error of {name}", node(aten.sub.Tensor, total, rounded))
        graph.module.recompile()
        return Changes(tuple(sizes))

    def start(self, opt: graphopt.OptimizedModule) -> State:
        return Errors(opt, self)

    def section(
        self, plan: Plan, graph: TrainingGraph, reports: Sequence[PassReport], ran: Sequence[PassReport], state: State | None
    ) -> Section:
        assert isinstance(state, Errors)
        left = math.fsum(float(e.abs().sum()) for e in state.errors.values())
        facts = {"sizes": dict(plan.decisions[self.name].sizes), "left over": left}
        return Section(facts, (f"rounded          {left:.3g} left over",), approximation="gradients rounded")

    def example_inputs(self, graph: TrainingGraph, seed: int) -> dict[InputDesc, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        own = [
            (d, n.meta["val"])
            for d, n in zip(graph.inputs, graph.placeholders, strict=True)
            if isinstance(d.target, Error) or d.kind == "compressed"
        ]
        return {
            d: torch.zeros(v.shape, dtype=v.dtype)
            if d.kind == "compressed"
            else self.size * torch.rand(v.shape, dtype=v.dtype, generator=generator)
            for d, v in own
        }

    def image(self, name: str, given: Mapping[InputDesc, Tensor], gradients: Mapping[str, Tensor]) -> Tensor:
        return rounded(gradients[name] + given[InputDesc("given", Error(name))], self.size)


def rounded(value: Tensor, size: float) -> Tensor:
    return (value / size).round() * size


@dataclass(frozen=True)
class Kept:
    """What a checkpoint holds."""

    errors: dict[str, Tensor]
    steps: int


class Errors(State):
    """The errors e, and the controller that makes steps smaller."""

    adapts = True

    def __init__(self, opt: graphopt.OptimizedModule, rewrite: Rounding) -> None:
        self.opt, self.rewrite = opt, rewrite
        parameters = opt.tensors()
        self.errors = {name: torch.zeros_like(parameters[name].detach()) for name, _ in self.sizes.items()}
        self.steps = 0

    @property
    def sizes(self) -> dict[str, float]:
        return dict(self.opt.plan.decisions[self.rewrite.name].sizes)

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor | None:
        return self.errors[desc.target.weight].clone() if isinstance(desc.target, Error) else None

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> bool:
        if isinstance(desc, OutputDesc):
            self.errors[desc.target.removeprefix("error of ")] = value.clone()
        else:
            parameter = self.opt.tensors()[desc.target]
            parameter.grad = value.clone() if parameter.grad is None else parameter.grad + value
        return True

    def selected(self, names: Iterable[str]) -> None:
        for name in names:
            self.errors[name].zero_()

    def image(self, name: str, gradient: Tensor) -> Tensor | None:
        return rounded(gradient + self.errors[name], self.sizes[name]) if name in self.errors else None

    def after_step(self, batch: Any) -> None:
        self.steps += 1
        if self.steps % self.rewrite.every == 0:
            self.opt.decide(self.rewrite.name, Steps(tuple((name, size / 2) for name, size in self.sizes.items())))

    def numbers(self) -> dict[str, float]:
        return {"smallest step": min(self.sizes.values())}

    def snapshot(self) -> Any:
        return to_plain(Kept({name: e.cpu() for name, e in self.errors.items()}, self.steps))

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        saved = from_plain(Kept, snapshot, "rounding")
        for name, error in self.errors.items():
            if name not in saved.errors or saved.errors[name].shape != error.shape:
                raise InputError(f"the checkpoint has no error of {name} of its shape.")

        def restore() -> None:
            self.errors = {name: saved.errors[name].to(error) for name, error in self.errors.items()}
            self.steps = saved.steps

        return restore


def made(**options: Any) -> tuple[nn.Module, graphopt.OptimizedModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zoo.MLP(width=8)
    opt = graphopt.optimize(model, batches(1)[0], passes=[Rounding()], backend="aot_eager", **options)
    return model, opt, opt.make_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)


def train(opt: graphopt.OptimizedModule, optimizer: torch.optim.Optimizer, data: Sequence[Any]) -> None:
    for batch in data:
        opt.zero_grad()
        opt(*batch).backward()
        optimizer.step()
        opt.controller.after_step(batch)


@pytest.mark.parametrize("name", ["mlp", *long("bert")])
def test_it_keeps_its_contract(name: str) -> None:
    check_pass(Rounding(), *zoo.make(name, 4))


def test_it_keeps_its_contract_beside_others() -> None:
    model, inputs = zoo.make("mlp", 4)
    trained = {"second.weight", "third.bias"}
    check_passes([(GreenTrainer(), trained), (RunLora(), set()), (Rounding(), trained)], model, inputs)


def test_errors_are_fed_back_and_the_controller_halves_the_step() -> None:
    model, opt, optimizer = made()
    reference = copy.deepcopy(model)
    errors = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for k, batch in enumerate(batches(5)):
        train(opt, optimizer, [batch])
        plain.zero_grad()
        reference(*batch).backward()
        size = Rounding().size / 2 ** (k // 3)
        for name, p in reference.named_parameters():
            total = p.grad + errors[name]
            p.grad = rounded(total, size)
            errors[name] = total - p.grad
        plain.step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert opt.counters.compilations == 2
    assert opt.report.notes == []


def test_it_is_verified_reported_dumped_and_logged(tmp_path: Path) -> None:
    model, opt, optimizer = made(verify=True)
    assert isinstance(opt.states["rounding"], Errors)
    train(opt, optimizer, batches(2))
    report = opt.report
    assert report.passes == ["rounding"]
    assert report.approximations == ["rounding: gradients rounded"]
    assert report.sections["rounding"]["sizes"] == {name: 2.0**-6 for name, _ in model.named_parameters()}
    assert report.to_dict()["sections"]["rounding"]["left over"] > 0
    assert "left over" in str(report)
    names = {path.name for path in opt.dump(tmp_path)}
    assert {"1_rounding.py", "1_rounding.diff"} <= names
    assert opt.states["rounding"].numbers() == {"smallest step": 2.0**-6}


def test_a_wrong_image_is_found_by_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Errors, "image", lambda self, name, gradient: 1.5 * gradient)
    _, opt, _ = made(verify=True)
    assert "gradient" in opt.report.notes[0]


def test_it_refuses_in_its_own_words() -> None:
    model, inputs = zoo.make("mlp", 6)
    with pytest.raises(PassError, match="measured on ordinary gradients"):
        graphopt.optimize(model, inputs, Budget(variance=0.1), [Rounding(), "vcas"])


def test_its_terms_are_in_the_program() -> None:
    """A gradient of a quarter of the bytes and without a state takes the place of others where memory is short."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(2, 64)
    loss = torch.sum
    free = graphopt.optimize(model, (x,), Budget(memory="1GiB"), [Rounding()], "aot_eager", loss=loss)
    assert {size for _, size in free.plan.decisions["rounding"].sizes} == {Rounding().size}
    limit = free.report.plan.remaining["memory"]["used"] - 1000
    tried: list[Found] = []

    @dataclass(frozen=True)
    class Recording(Rounding):
        def adopt(self, plan: Plan, found: Found) -> Plan:
            tried.append(found)
            return super().adopt(plan, found)

    with pytest.raises(graphopt.BudgetError, match="Smallest feasible"):  # for the peak is that of what really runs
        graphopt.optimize(model, (x,), Budget(memory=int(limit)), [Recording()], "aot_eager", loss=loss)
    assert any(found.smaller for found in tried)


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, opt, optimizer = made()
    train(opt, optimizer, batches(2))
    opt.save_state(tmp_path / "state", optimizer)
    torch.manual_seed(0)
    other = graphopt.optimize(zoo.MLP(width=8), batches(1)[0], passes=[], backend="aot_eager")
    with pytest.raises(InputError, match="other passes"):
        other.load_state(tmp_path / "state")
    with pytest.raises(InputError, match="not all positive"):
        Steps((("a", -1.0),))


def program(folder: Path) -> None:
    """Train, save after every step, and be killed in the middle of the fifth."""
    model, opt, optimizer = made()
    for k, batch in enumerate(batches(8)):
        train(opt, optimizer, [batch])
        opt.save_state(folder / "state", optimizer)
        torch.save(model.state_dict(), folder / "weights")
        if k == 3:
            optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def test_killed_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    assert ended(program, tmp_path) == -signal.SIGKILL
    model, opt, optimizer = made()
    model.load_state_dict(torch.load(tmp_path / "weights"))
    opt.load_state(tmp_path / "state", optimizer)
    train(opt, optimizer, batches(8)[4:])
    whole, expected, steps = made()
    train(expected, steps, batches(8))
    assert same(dict(model.state_dict()), dict(whole.state_dict()))
    assert opt.report.sections["rounding"] == expected.report.sections["rounding"]


@settings(max_examples=4, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks())
def test_random_networks_train_with_rounded_gradients(model: Network) -> None:
    torch.compiler.reset()
    args = model.inputs(model.sizes[0], seed=0)
    reference = copy.deepcopy(model)
    reference.loss_of(reference(*args)).backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.requires_grad and p.grad is not None}
    if not wanted:
        return
    opt = graphopt.optimize(model, args, passes=[replace(Rounding(), size=2.0**-20)], backend="aot_eager")
    model.loss_of(opt(*model.inputs(model.sizes[0], seed=0))).backward()
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, rounded(wanted[name], 2.0**-20), rtol=0, atol=2.0**-20)
