"""Ordinary Python in `forward`: losses, gradients and attributes are eager mode's, whatever it is written with."""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import pytest
import torch
from torch import Tensor, nn

from tests.frontend.stepping import BUDGETS, X, assert_steps_as_in_eager, generated


class Base(nn.Module):
    """Three layers, of which a habit uses what it likes."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.double()

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


class KeywordsOnly(Base):
    def forward(self, x: Tensor, *, factor: float = 2.0, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.b(self.hidden(x)) * factor
        return {"loss": (logits if labels is None else logits - labels).square().mean(), "logits": logits}


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    more: list[Tensor] = field(default_factory=list)


class ReturnsDataclass(Base):
    def forward(self, x: Tensor) -> Output:
        hidden = self.hidden(x)
        logits = self.b(hidden)
        return Output(logits.square().mean(), logits, [self.c(hidden)])


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


class ReturnsNamedTuple(Base):
    def forward(self, x: Tensor) -> Pair:
        logits = self.b(self.hidden(x))
        return Pair(logits.square().mean(), logits)


class Closures(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        calls = 0

        def layer(module: nn.Module) -> Callable[[Tensor], Tensor]:
            def run(value: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                return module(value) * calls

            return run

        hidden = torch.tanh(layer(self.a)(x))
        logits = layer(self.b)(hidden)
        return {"loss": logits.square().mean(), "logits": logits}


class Generators(Base):
    def parts(self, x: Tensor) -> Iterator[Tensor]:
        hidden = self.hidden(x)
        for head in (self.b, self.c):
            yield head(hidden)

    def forward(self, x: Tensor) -> dict[str, Any]:
        parts = list(self.parts(x))
        return {"loss": sum(p.square().mean() for p in parts), "parts": parts}


class TryExcept(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        try:
            hidden = self.missing(x)
        except AttributeError:
            hidden = self.hidden(x)
        try:
            logits = self.b(hidden)
        finally:
            self.finished = True
        return {"loss": logits.square().mean(), "logits": logits}


class ClassAttribute(Base):
    calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        type(self).scale = 1.5
        logits = self.b(self.hidden(x)) * self.scale
        return {"loss": logits.square().mean(), "logits": logits}


class Lists(Base):
    def forward(self, x: Tensor) -> list[Any]:
        found: list[Any] = []
        hidden = self.hidden(x)
        for head in (self.b, self.c):
            found.append(head(hidden))
        found.insert(0, found[0].square().mean())
        return found


class MutatesDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, Any] = {}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.b(self.hidden(x))
        out = {"logits": logits}
        self.log["last"] = logits.detach()
        self.log["calls"] = self.log.get("calls", 0) + 1
        out.update(extra=logits * 2)
        return {"loss": logits.square().mean(), **out}


class EarlyReturn(Base):
    def __init__(self) -> None:
        super().__init__()
        self.short = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        logits = self.b(hidden)
        if self.short:
            return {"loss": logits.square().mean(), "logits": logits}
        more = self.c(hidden)
        return {"loss": (logits + more).square().mean(), "logits": logits, "more": more}


class BufferInPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6).double())
        self.mean: Tensor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        self.mean.lerp_(hidden.detach().mean(0), 0.5)
        logits = self.b(hidden - self.mean)
        return {"loss": logits.square().mean(), "logits": logits}


class Partial(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        run = functools.partial(torch.nn.functional.linear, weight=self.b.weight, bias=self.b.bias)
        logits = functools.reduce(lambda value, f: f(value), [self.a, torch.tanh, run], x)
        return {"loss": logits.square().mean(), "logits": logits}


class Property(Base):
    @property
    def tied(self) -> Tensor:
        return self.b.weight + self.c.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.hidden(x) @ self.tied.t()
        return {"loss": logits.square().mean(), "logits": logits}


class Cached(Base):
    @functools.cached_property
    def mask(self) -> Tensor:
        return torch.tensor([1.0, 0.0, 2.0]).double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.b(self.hidden(x)) * self.mask
        return {"loss": logits.square().mean(), "logits": logits}


class Weak(Base):
    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        head = weakref.ref(self.b)
        found = head()
        assert found is not None
        logits = found(self.hidden(x))
        return {"loss": logits.square().mean(), "logits": logits}


_steps = {"forward": 0}


class GlobalCounter(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        _steps["forward"] += 1
        logits = self.b(self.hidden(x))
        return {"loss": logits.square().mean(), "logits": logits}


class Mode(enum.Enum):
    PLAIN = enum.auto()
    DOUBLED = enum.auto()


class Enums(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mode = Mode.PLAIN

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.b(self.hidden(x)) * {Mode.PLAIN: 1, Mode.DOUBLED: 2}[self.mode]
        self.mode = Mode.DOUBLED if self.mode is Mode.PLAIN else Mode.PLAIN
        return {"loss": logits.square().mean(), "logits": logits}


class Typed(TypedDict):
    loss: Tensor
    logits: Tensor


class ReturnsTypedDict(Base):
    def forward(self, x: Tensor) -> Typed:
        logits = self.b(self.hidden(x))
        return Typed(loss=logits.square().mean(), logits=logits)


class NoGradIsland(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        with torch.no_grad():
            weights = torch.softmax(self.c(hidden), -1)
        logits = self.b(hidden) * weights
        return {"loss": logits.square().mean(), "logits": logits, "weights": weights}


class Detached(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        logits = self.b(hidden) + self.c(hidden.detach())
        return {"loss": logits.square().mean(), "logits": logits, "kept": hidden.detach()}


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradients[0] * x.cos()


class OwnFunction(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.b(_Doubled.apply(self.hidden(x)))
        return {"loss": logits.square().mean(), "logits": logits}


class Autocast(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            logits = self.b(self.hidden(x))
        return {"loss": logits.square().mean(), "logits": logits}


class HookReplaces(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda module, args, output: output * 2)
        self.c.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        logits = self.b(hidden) + self.c(hidden)
        return {"loss": logits.square().mean(), "logits": logits}


class Context(Base):
    @contextlib.contextmanager
    def doubled(self) -> Iterator[float]:
        yield 2.0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with self.doubled() as factor, contextlib.suppress(KeyError):
            logits = self.b(self.hidden(x)) * factor
        return {"loss": logits.square().mean(), "logits": logits}


class Matching(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        match (x.dim(), {"kind": "linear"}):
            case (2, {"kind": "linear"}):
                logits = self.b(self.hidden(x))
            case _:
                raise AssertionError
        total = 0.0
        for i, row in enumerate(logits):
            total = total + row.sum() * (i + 1)
        if (n := logits.shape[0]) > 1:
            total = total / n
        return {"loss": total.square(), "logits": logits}


class SetsGradients(Base):
    """A tensor that forward makes requires a gradient of its own."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        shift = torch.zeros_like(hidden).requires_grad_()
        logits = self.b(hidden + shift)
        return {"loss": logits.square().mean(), "logits": logits}


class MutatesInput(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.b(self.hidden(x.clone()))
        x[:, 0] = 1.0
        return {"loss": (logits + x[:, :3]).square().mean(), "logits": logits}


class Deletes(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.kept = self.hidden(x)
        logits = self.b(self.kept)
        del self.kept
        return {"loss": logits.square().mean(), "logits": logits}


class Setattr(Base):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for name in ("b", "c"):
            setattr(self, f"seen_{name}", getattr(self, name)(self.hidden(x)))
        return {"loss": (self.seen_b + self.seen_c).square().mean(), "logits": self.seen_b}


def leaves(output: Any) -> list[Tensor]:
    if isinstance(output, Output):
        output = [output.loss, output.logits, *output.more]
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]


def loss_of(output: Any) -> Tensor:
    return leaves(output)[0]


def of_all(output: Any) -> Tensor:
    """Of every output, each with a weight of its own."""
    tensors = [t for t in leaves(output) if t.requires_grad]
    return torch.stack([(t * (i + 1)).pow(2).sum() for i, t in enumerate(tensors)]).sum()


HABITS = [kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Base) and kind is not Base]
OPAQUE = (ReturnsDataclass,)
"""No first output could be taken for the loss: there are zeros where eager mode has no gradient, as by torch.compile."""


def attributes(model: Base) -> dict[str, Any]:
    """What the model holds beside its parameters and modules."""
    own = {k: v.value if isinstance(v, enum.Enum) else v for k, v in vars(model).items() if not k.startswith("_")}
    return {**{k: v for k, v in own.items() if isinstance(v, (bool, int, float, dict, Tensor))}, "scale": type(model).scale}


@BUDGETS
@pytest.mark.parametrize("kind", HABITS, ids=lambda kind: kind.__name__)
def test_the_loss(kind: type[Base], budget: float | None) -> None:
    def call(called: Any, model: Any, step: int) -> Tensor:
        output = called(generated(step, 4, 5).double())
        return of_all(output) if kind in OPAQUE else loss_of(output)

    budget = None if kind is Cached else budget  # torch.compile leaves parts of it to eager mode, which no plan cuts
    own = kind is Enums  # torch.compile does not notice that forward has changed one
    assert_steps_as_in_eager(kind(), (X[0].double(),), call, budget, state=attributes, torchs_own=own)


@pytest.mark.parametrize("kind", [k for k in HABITS if k not in (Enums, MutatesInput)], ids=lambda kind: kind.__name__)
def test_all_outputs(kind: type[Base]) -> None:
    """The first step runs again for them; of a changed input, see `test_outputs`."""

    def call(called: Any, model: Any, step: int) -> Tensor:
        return of_all(called(generated(step, 4, 5).double()))

    assert_steps_as_in_eager(kind(), (X[0].double(),), call, state=attributes)
