"""Outputs beside the loss that share memory, come from several graphs, or are differentiated late."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt
from graphopt.errors import RerunError
from tests.frontend.stepping import assert_gradients, assert_steps_as_in_eager, generated
from tests.long_forms import long


class Shared(nn.Module):
    """Returns a loss and other tensors, of the kind asked for."""

    def __init__(self, kind: str = "separate") -> None:
        super().__init__()
        self.kind, self.breaks = kind, False
        self.body, self.head, self.other = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(hidden)
        loss = logits.square().mean()
        return {"loss": loss, **self.others(x, hidden, logits, loss)}

    def others(self, x: Tensor, hidden: Tensor, logits: Tensor, loss: Tensor) -> dict[str, Tensor]:
        found = {
            "separate": lambda: (logits, self.other(hidden)),
            "transposed": lambda: (logits, logits.t()),
            "twice": lambda: (logits, logits),
            "input": lambda: (x, logits),
            "parameter": lambda: (self.head.weight, logits),
            "view of a parameter": lambda: (self.head.weight.t(), logits),
            "the loss": lambda: (loss, logits),
            "halves": lambda: logits.chunk(2, -1),
            "slice": lambda: (logits[:, :1], hidden),
        }[self.kind]()
        return dict(zip("ab", found, strict=True))


KINDS = ("separate", "transposed", "twice", "input", "parameter", "view of a parameter", "the loss", "halves", "slice")

USES: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "loss": lambda out: out["loss"],
    "all": lambda out: out["loss"] + out["a"].pow(2).sum() + 2 * out["b"].pow(3).sum(),
    "others": lambda out: out["a"].pow(2).sum() + 2 * out["b"].pow(3).sum(),
}


def rows(step: int) -> Tensor:
    return generated(step, 4, 5).double()


def assert_as_in_eager(model: Shared, budget: float | None, use: Callable[[dict[str, Tensor]], Tensor], steps: int = 3) -> Any:
    """Gradients of what is trained and of the input are eager's, in every step; returns the optimised model."""
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0).requires_grad_(),), budget, backend="aot_eager")
    for step in range(steps):
        x, y = (rows(step).requires_grad_() for _ in range(2))
        for module, called, given in ((eager, eager, x), (model, opt, y)):
            module.zero_grad()
            use(called(given)).backward()
        torch.testing.assert_close(x.grad, y.grad)
        for name, parameter in eager.named_parameters():
            if not opt.selects_tensor(name):
                parameter.grad = None
        for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None or (opt.selects_tensor(name) and not mine.grad.any()), name
            else:
                torch.testing.assert_close(mine.grad, theirs.grad)
    return opt


ALONE = ("separate", "parameter", "the loss", "halves")
"""Memory that is shared with nothing, with a parameter, with the loss, and by two outputs: the others repeat one of these."""


@pytest.mark.parametrize(
    ("kind", "use"),
    [case if use == "all" or kind in ALONE else long(case)[0] for kind in KINDS for use in USES for case in [(kind, use)]],
)
def test_outputs_that_share_memory(kind: str, use: str) -> None:
    assert_as_in_eager(Shared(kind), None, USES[use])


@pytest.mark.parametrize("kind", [*ALONE, *long(*(kind for kind in KINDS if kind not in ALONE))])
def test_outputs_that_share_memory_under_a_budget(kind: str) -> None:
    assert_as_in_eager(Shared(kind), 0.7, USES["all"])


@pytest.mark.parametrize("use", USES)
def test_a_model_that_breaks_into_several_graphs_after_it_was_captured_as_one(use: str) -> None:
    """A later part cannot run again by itself: all of its outputs are differentiated, as by torch.compile."""
    model = Shared()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for step, breaks in enumerate((False, True, True, False, True)):
        model.breaks = eager.breaks = breaks
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            USES[use](called(rows(step))).backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            torch.testing.assert_close(torch.zeros_like(mine) if mine.grad is None else mine.grad, expected)
    assert opt.model_runs == 0


class Around(nn.Module):
    """Runs something that torch.compile leaves alone before the part that it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(5, 6), nn.Linear(6, 3)
        self.double()

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return self.before(x)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.after(torch.tanh(self.outside(x)))
        return {"loss": logits.square().mean(), "logits": logits}


def with_logits(out: dict[str, Tensor]) -> Tensor:
    return out["loss"] + out["logits"].pow(3).sum()


def test_what_is_computed_outside_of_the_graph_is_reached() -> None:
    assert_steps_as_in_eager(Around(), (rows(0),), lambda called, _, step: with_logits(called(rows(step))))


class Holding(nn.Module):
    """Reads a tensor with a history that is no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(5, 5).double()), nn.Linear(5, 3).double()
        self.held: list[Tensor] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(x @ self.held[0])
        return {"loss": logits.square().mean(), "logits": logits}


def test_a_tensor_with_a_history_that_the_model_holds_is_reached() -> None:
    def train(called: Any, module: Any, step: int) -> Tensor:
        module.held = [torch.tanh(module.weight)]
        return with_logits(called(rows(step)))

    model = Holding()
    model.held = [torch.eye(5).double()]
    assert_steps_as_in_eager(model, (rows(0),), train)


@pytest.mark.usefixtures("_only_new_objects")
def test_outputs_are_freed_while_the_loss_is_held() -> None:
    opt = graphopt.optimize(Shared(), (rows(0),), backend="aot_eager")
    for step in range(3):
        out = opt(rows(step))
        loss, logits = out["loss"], weakref.ref(out["a"])
        del out
        gc.collect()
        assert logits() is None
        loss.backward()


@pytest.mark.usefixtures("_only_new_objects")
def test_what_a_step_read_is_freed_after_its_backward() -> None:
    opt = graphopt.optimize(Shared(), (rows(0),), backend="aot_eager")
    for step in range(4):
        x = rows(step)
        loss, given = opt(x)["loss"], weakref.ref(x)
        del x
        loss.backward()
        gc.collect()
        assert given() is None


def test_an_output_that_is_differentiated_after_the_graph_was_freed_is_an_error_as_in_eager_mode() -> None:
    opt = graphopt.optimize(Shared(), (rows(0),), backend="aot_eager")
    out = opt(rows(0))
    out["loss"].backward()
    with pytest.raises(RerunError, match="retain_graph=True"):
        out["a"].sum().backward()


def test_an_output_that_the_user_changes_in_place_is_still_differentiated() -> None:
    def use(out: dict[str, Tensor]) -> Tensor:
        scaled = out["b"].mul_(3)
        return out["loss"] + scaled.pow(2).sum()

    assert_as_in_eager(Shared(), None, use)


@pytest.mark.parametrize("use", ["all", "others"])
def test_hooks_on_outputs_that_are_differentiated(use: str) -> None:
    seen: list[Tensor] = []

    def hooked(out: dict[str, Tensor]) -> Tensor:
        out["b"].register_hook(lambda gradient: seen.append(gradient) or gradient * 2)  # type: ignore[func-returns-value]
        out["b"].retain_grad()
        loss = USES[use](out)
        seen.clear()
        return loss

    assert_as_in_eager(Shared(), None, hooked)
    assert len(seen) == 1


def test_inside_a_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Shared()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for step in range(3):
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            out = checkpoint(called, rows(step), use_reentrant=False)
            USES["all"](out).backward()
        assert_gradients(model, eager)


class Drawing(Shared):
    """With dropout, and statistics of the batch in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(6).double(), nn.Dropout(0.5)

    def others(self, x: Tensor, hidden: Tensor, logits: Tensor, loss: Tensor) -> dict[str, Tensor]:
        return {"a": logits, "b": self.other(self.dropout(self.norm(hidden)))}


def test_two_calls_before_their_backwards() -> None:
    """Each runs again as it was, whatever has happened since."""
    model = Drawing()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")
    for step in range(3):
        for module, called in ((eager, eager), (model, opt)):
            module.zero_grad()
            torch.manual_seed(step)
            first, second = called(rows(step)), called(rows(step + 10))
            USES["all"](first).backward()
            (USES["others"](second) + second["loss"]).backward()
        assert_gradients(model, eager)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))


def test_compiled_autograd() -> None:
    """It calls no backward of ours: an output that is differentiated is an error once, and no gradient is lost without a word."""
    from torch._dynamo import compiled_autograd

    model = Shared()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, (rows(0),), backend="aot_eager")

    def backward(loss: Tensor) -> None:
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
            loss.backward()

    backward(opt(rows(0))["loss"])
    eager(rows(0))["loss"].backward()
    assert_gradients(model, eager)
    other = graphopt.optimize(copy.deepcopy(model), (rows(0),), backend="aot_eager")
    refused = pytest.raises(Exception, match="compiled autograd")
    for called, expected in ((other, refused), (other, nullcontext()), (eager, nullcontext())):
        called.zero_grad()
        loss = USES["all"](called(rows(1)))
        with expected:
            backward(loss)
    assert_gradients(other, eager)
