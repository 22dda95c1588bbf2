"""What runs where a step cannot be rewritten or compiled: training never dies of an optimisation.

In the place of the plan that fails for a call stands, in this order: the plan that ran last on the same shapes, if it does not
approximate more; the plan without approximations; the model itself, in eager mode. What is trained stays what is selected: in
eager mode, the gradients of tensors that are not selected are dropped. Each cause is told once, and a variant that failed is not
tried again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphopt.calls import FlatInputs
from graphopt.errors import first_line
from graphopt.planner.plan import Plan
from graphopt.runtime.compiled_step import CompiledStep
from graphopt.runtime.variants import Variants

if TYPE_CHECKING:
    from graphopt.runtime.module import OptimizedModule

logger = logging.getLogger(__name__)

FAILURE_LIMIT = 256
"""Variants that failed and are remembered; beyond that the oldest is tried again when it comes again."""


class Fallback:
    """Finds the compiled step for a call, or what stands in for it.

    Attributes:
        notes: every cause so far and what stood in, for the report.
        model_runs: how often the model itself stood in.
    """

    def __init__(self, variants: Variants) -> None:
        self.variants = variants
        self.notes: list[str] = []
        self.model_runs = 0
        self._failed: dict[Hashable, str] = {}
        self._just_failed: dict[Hashable, str] = {}
        self._hooks: list[Any] = []

    def step(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[CompiledStep, FlatInputs] | None:
        """The step of `plan` for this call, or of the first plan in its place that compiles; None: run the model itself.

        Raises:
            PassError: the user has frozen everything that is selected.
        """
        self._just_failed = {}
        for candidate in self._candidates(plan, args, kwargs):
            variant = self._variant(candidate, args, kwargs) if self._failed else None
            if variant in self._failed:
                continue
            try:
                found = self.variants.step(candidate, args, kwargs)
            except Exception as error:
                if self._all_frozen(candidate):
                    raise
                self._just_failed[self._variant(candidate, args, kwargs)] = first_line(error)
                continue
            self._tell("a plan that compiles" if candidate.passes == plan.passes else "the plan without approximations")
            return found
        return None

    def run_model(self, opt: OptimizedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model itself; if that fails, too, the error is the model's own, and nothing is held against the compiler."""
        self.drop_unselected(opt)
        output = self.variants.model(*args, **kwargs)
        self._tell("the model itself, uncompiled,")
        self.model_runs += 1
        return output

    def note(self, text: str) -> None:
        """Warn of something, once."""
        if text not in self.notes:
            self.notes.append(text)
            logger.warning("%s", text)

    def _candidates(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Plan]:
        yield plan
        last = self._quietly(lambda: self.variants.last_plan(args, kwargs, lambda other: other.may_replace(plan)))
        if last is not None:
            yield last
        exact = plan.without_approximations()
        if exact.key != plan.key:
            yield exact

    def _variant(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """What a compiled step is found by; None where the call itself cannot be read."""
        place = self._quietly(lambda: self.variants.place(args, kwargs))
        return None if place is None else (place, plan.key)

    @staticmethod
    def _quietly(find: Callable[[], Any]) -> Any:
        try:
            return find()
        except Exception:  # told of by the step that fails for the same reason
            return None

    def _all_frozen(self, plan: Plan) -> bool:
        """Whether nothing that is selected can be trained: the user has to know, since no fallback would train anything."""
        parameters = self.variants.model.named_parameters()
        return plan.train is not None and not any(p.requires_grad for name, p in parameters if name in plan.train)

    def _tell(self, instead: str) -> None:
        """Remember what failed just now, and warn of causes that are new."""
        for cause in dict.fromkeys(self._just_failed.values()):
            self.note(f"a step could not be compiled ({cause}); {instead} runs instead")
        self._failed |= {variant: cause for variant, cause in self._just_failed.items() if variant is not None}
        self._just_failed = {}
        while len(self._failed) > FAILURE_LIMIT:
            del self._failed[next(iter(self._failed))]

    def drop_unselected(self, opt: OptimizedModule) -> None:
        """Have tensors that are not selected lose any gradient that reaches them."""
        if self._hooks or not opt.selects:
            return
        for name, parameter in self.variants.model.named_parameters():
            if parameter.is_leaf and parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(DropGradient(opt, name)))
        weakref.finalize(opt, _remove, self._hooks)


class DropGradient:
    """A hook on a parameter, for as long as its optimised model lives; not part of copies and pickles of the model."""

    def __init__(self, opt: OptimizedModule | None = None, name: str = "") -> None:
        self.opt = None if opt is None else weakref.ref(opt)
        self.name = name

    def __call__(self, parameter: Tensor) -> None:
        """Drop the gradient, unless the parameter is selected now."""
        opt = None if self.opt is None else self.opt()
        if opt is not None and not opt.selects_tensor(self.name):
            parameter.grad = None
            if opt.subspaces is not None:
                opt.subspaces.clear_gradients([self.name])

    def __reduce__(self) -> tuple[Any, ...]:
        return DropGradient, ()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
