"""Methods of nn.Module that a model overrides run on the optimised model, too."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphopt


class Overriding(nn.Module):
    """Notes what was called, and trains the last layer alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.called: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu()).square().mean()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.called.append("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.last.parameters(recurse)

    def to(self, *args: Any, **kwargs: Any) -> Overriding:
        self.called.append("to")
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> Overriding:
        self.called.append("cuda")
        return self

    def eval(self) -> Overriding:
        self.called.append("eval")
        return super().eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Overriding:
        self.called.append("_apply")
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.called.append("_load_from_state_dict")
        super()._load_from_state_dict(*args, **kwargs)

    def extra_repr(self) -> str:
        return "of two layers"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "made_when_asked_for"]


def optimised() -> tuple[Any, Any]:
    model = Overriding()
    opt = graphopt.optimize(model, (torch.randn(3, 4),), backend="aot_eager")
    model.called.clear()
    return model, opt


def test_what_the_model_overrides_runs() -> None:
    model, opt = optimised()
    assert [id(p) for p in opt.parameters()] == [id(p) for p in model.last.parameters()]
    assert opt.cuda() is opt.eval() is opt
    assert model.called == ["cuda", "eval"]
    assert not model.training
    model.called.clear()
    assert opt.to(torch.float64) is opt.half() is opt  # half, as nn.Module has it, calls _apply
    assert model.called == ["to", "_apply", "_apply"]
    assert {p.dtype for p in model.state_dict().values()} == {torch.float16}
    assert len(dict(opt.named_parameters())) == 4
    assert model.called[-1] == "named_parameters"
    assert repr(opt) == repr(model)
    assert {"made_when_asked_for", "called", "first"} <= set(dir(opt))


def test_parts_that_are_named_like_attributes_of_ours_are_found_by_name() -> None:
    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph, self.states = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
            self.register_buffer("plan", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.graph(x) * self.states + self.plan).square().mean()

    model = Graphs()
    opt = graphopt.optimize(model, (torch.randn(3, 4),), backend="aot_eager")
    assert opt.get_submodule("graph") is model.graph
    assert opt.get_submodule("") is opt
    assert opt.get_parameter("states") is model.states
    assert opt.get_parameter("graph.weight") is model.graph.weight
    assert opt.get_buffer("plan") is model.plan
    opt.states = nn.Parameter(torch.zeros(4))
    assert opt.get_parameter("states") is model.states
    assert not model.states.any()
    with pytest.raises(AttributeError, match="opt.ranks cannot be set"):
        opt.ranks = None
    opt(torch.randn(3, 4)).backward()
    opt.set_submodule("graph", nn.Identity())
    assert isinstance(model.graph, nn.Identity)


def test_what_the_model_does_not_override_is_its_own() -> None:
    model, opt = optimised()
    assert next(opt.modules()) is opt
    assert opt.float() is opt.requires_grad_(False) is opt
    assert [p.requires_grad for p in model.last.parameters()] == [False, False]
    seen = []
    opt.register_forward_hook(lambda *_: seen.append(1))
    opt(torch.randn(3, 4))
    assert seen == [1]
    assert not model._forward_hooks


def test_a_method_that_is_put_on_the_model_itself_runs() -> None:
    """As libraries do that keep weights from being moved."""
    model, opt = optimised()
    model.bfloat16 = types.MethodType(lambda self: "refused", model)
    assert opt.bfloat16() == "refused"


def test_a_module_that_holds_it_loads_and_moves_it_by_its_own() -> None:
    model, opt = optimised()
    whole = nn.Sequential(opt)
    whole.load_state_dict(whole.state_dict())
    assert "_load_from_state_dict" in model.called
    whole.double()
    assert model.called[-1] == "_apply"
    assert len(list(whole.parameters())) == 4  # those of every module, as nn.Module finds them


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_copies_run_their_own_models(copied: Callable[[Any], Any]) -> None:
    model, opt = optimised()
    other = copied(opt)
    assert other.to(torch.float64) is other
    assert (model.called, other.called) == ([], ["to", "_apply"])
    assert [p.dtype for p in other.parameters()] == [torch.float64] * 2


def test_the_loss_function_of_a_model_is_its_own() -> None:
    """Models of transformers have one, which can be set."""
    model = Overriding()
    opt = graphopt.optimize(model, (torch.randn(2, 4),), backend="aot_eager")
    opt.loss_function = nn.functional.mse_loss
    assert model.loss_function is opt.loss_function is nn.functional.mse_loss
