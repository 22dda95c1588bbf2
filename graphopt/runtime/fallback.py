"""What runs where a step cannot be compiled: the model itself, in eager mode. Training never dies of an optimisation.

What is trained stays what is selected: gradients of tensors that are not are dropped. Each cause is warned of once.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from graphopt import compat
from graphopt.calls import kind_of
from graphopt.compat.dynamo import cause_of, is_compile_error
from graphopt.compat.fsdp import held_parameters
from graphopt.errors import first_line

if TYPE_CHECKING:
    from graphopt.frontend.running import Running
    from graphopt.planner.plan import Plan
    from graphopt.runtime.module import OptimizedModule

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a step is compiled that cannot be: it may have been for want of memory."""

REPLACED = (
    "the model was called with tensors in the place of its parameters, as by torch.func.functional_call: their gradients are "
    "computed, whatever is selected"
)

TRANSFORMED = "the model was called inside a transform of torch.func (grad, vmap ...), where the model itself, uncompiled, runs"


_IN_FORCE: WeakKeyDictionary[nn.Module, list[object]] = WeakKeyDictionary()
"""Of each model, in a list of one: by what the `Fallback` is known that is in force."""


class Fallback:
    """Runs a model in the place of its compiled steps.

    Attributes:
        notes: what did not run as planned so far, for the report.
        model_runs: how often the model itself stood in.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.notes: list[str] = []
        self.model_runs = 0
        self._failures: Counter[Hashable] = Counter()
        self._hooks: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._known_by = object()
        self._in_force = _IN_FORCE.setdefault(model, [None])

    @property
    def in_force(self) -> bool:
        """Whether gradients of tensors that are not selected are dropped: of a model's plans, by the one that ran last."""
        return self._in_force[0] is self._known_by

    def put_in_force(self) -> None:
        """Have this plan, and no other, say which gradients are dropped."""
        self._in_force[0] = self._known_by

    def rest(self) -> None:
        """Let all gradients through, until it is put in force again."""
        if self.in_force:
            self._in_force[0] = None

    def __getstate__(self) -> dict[str, Any]:
        """Without hooks, which copies of parameters do not have; what failed here is tried there."""
        return {"model": self.model, "notes": self.notes, "model_runs": self.model_runs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]
        self.__dict__.update(state)

    def compiled_or_not(
        self, opt: OptimizedModule, running: Running, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, bool]:
        """The output of a step, and whether it ran compiled: the model itself runs where torch.compile fails.

        Where it has failed `ATTEMPTS` times for inputs of a kind, it is tried no more.
        """
        if compat.in_function_transform():  # Dynamo would note that it has nothing to compile, for later steps, too
            self.note(TRANSFORMED)
            return self.run_model(opt, args, kwargs), False
        if self._failures and self._failures[plan.key, kind_of((args, kwargs))] >= ATTEMPTS:
            return self.run_model(opt, args, kwargs), False
        try:
            return running(plan, args, kwargs), True
        except Exception as error:
            if not is_compile_error(error):
                raise
            output = self.run_model(opt, args, kwargs)
            self.note(f"a step could not be compiled ({first_line(cause_of(error))}); the model itself, uncompiled, runs instead")
        self._failures[plan.key, kind_of((args, kwargs))] += 1
        return output, False

    def run_model(self, opt: OptimizedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model itself; if that fails, too, the error is the model's own, and nothing is held against the compiler."""
        self.drop_unselected(opt)
        output = self.model(*args, **kwargs)
        self.model_runs += 1
        return output

    def note(self, text: str) -> None:
        """Warn of something, once."""
        if text not in self.notes:
            self.notes.append(text)
            logger.warning("%s", text)

    def drop_unselected(self, opt: OptimizedModule | None) -> None:
        """Have tensors that are not selected lose any gradient that reaches them."""
        if opt is None or not opt.selects:
            return
        self.put_in_force()
        first = not self._hooks
        parameters = dict(self.model.named_parameters())
        if any(not isinstance(p, nn.Parameter) for p in parameters.values()):
            self.note(REPLACED)
        forms = {id(t): (name, t) for name, t in parameters.items() if isinstance(t, nn.Parameter)}  # others are the caller's
        for held in held_parameters(self.model):  # gathered, so that nothing is sent; sharded, where they are gathered later
            name = next((n for n in held.names if n in parameters), held.names[0])
            forms |= {id(t): (name, t) for t in (held.sharded, held.whole) if t is not None}
        for name, parameter in forms.values():
            hooked = self._hooks.get(id(parameter))
            if parameter.is_leaf and parameter.requires_grad and (hooked is None or hooked[0]() is not parameter):
                handle = parameter.register_post_accumulate_grad_hook(DropGradient(opt, name))
                self._hooks[id(parameter)] = weakref.ref(parameter), handle
        if first and self._hooks:
            weakref.finalize(opt, _remove, self._hooks)


class DropGradient:
    """A hook on a parameter, for as long as its optimised model lives; not part of copies and pickles of the model."""

    def __init__(self, opt: OptimizedModule | None = None, name: str = "") -> None:
        self.opt = None if opt is None else weakref.ref(opt)
        self.name = name

    def __call__(self, parameter: Tensor) -> None:
        """Drop the gradient, unless the parameter is selected now."""
        opt = None if self.opt is None else self.opt()
        if opt is not None and opt._fallback.in_force and not opt.selects_tensor(self.name):
            parameter.grad = None
            for state in opt.states.values():
                state.clear_gradients([self.name])

    def __reduce__(self) -> tuple[Any, ...]:
        return DropGradient, ()


def _remove(hooks: dict[int, tuple[weakref.ref[Tensor], Any]]) -> None:
    for _, handle in hooks.values():
        handle.remove()
