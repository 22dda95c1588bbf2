"""A step that runs again, because an output was differentiated that has no backward; see `graphopt.frontend.outputs`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from graphopt import compat
from graphopt.compat import MODULE_HOOKS, pytree
from graphopt.errors import RerunError
from graphopt.frontend.backend import PlanBackend
from graphopt.frontend.before import Before
from graphopt.frontend.compiled_region import Ran
from graphopt.testing.compare import tolerance_of

if TYPE_CHECKING:
    from graphopt.frontend.running import Running
    from graphopt.planner.plan import Plan

CHANGED = (
    "an output of the model beside the loss was differentiated, for which the step was to run again, but its inputs, weights or "
    "attributes are no longer what they were (modified by an inplace operation, or by forward() itself). Repeat the step; later "
    "ones are prepared for it."
)

_TWICE = (
    "gradients of gradients (create_graph=True) cannot be computed through an optimised step: compute what needs them, such as a "
    "gradient penalty, with the model itself."
)

_OF_A_CALL = ("forward", *MODULE_HOOKS)
"""Attributes of a model that a training loop changes around a call; a step that runs again has those of its call."""


class Rerun:
    """The `ask` of one step's autograd node; it must not hold what holds the node."""

    __slots__ = ("arguments", "before", "called", "differentiated", "loss", "outputs", "plan", "ran", "running")

    def __init__(
        self,
        running: Running,
        plan: Plan,
        differentiated: frozenset[int] | None,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        before: Before | None,
        outputs: Sequence[Any],
        ran: Ran,
    ) -> None:
        """Remember a step that has just run.

        Args:
            differentiated: positions of the leaves that it was prepared for.
            arguments: positional and by name.
            before: what it began with; None where that was not remembered.
            outputs: of the region that it consists of, and what that `ran`.
        """
        surroundings = ran.region.surroundings
        assert surroundings is not None
        self.running, self.plan, self.arguments, self.before = running, plan, arguments, before
        self.differentiated, self.ran = differentiated, ran
        self.called = list(map(vars(running.model).get, _OF_A_CALL))
        loss = None if surroundings.loss is None else outputs[surroundings.loss]
        self.loss = None if loss is None else (loss.detach(), loss._version)
        self.outputs = [(nr, k, weakref.ref(outputs[i]), outputs[i]._version) for i, nr, k in surroundings.unasked]

    def __call__(self, node: Any, gradients: Mapping[int, Tensor], loss_too: bool) -> Sequence[Tensor | None]:
        """Gradients of what the node needs gradients of, in order.

        Args:
            gradients: of outputs of the node, by their number among them.
            loss_too: the loss is differentiated as well, by the node itself.
        Raises:
            RerunError: the step cannot run again; later ones are prepared for what is asked for.
        """
        if torch.is_grad_enabled():
            raise RerunError(_TWICE)
        leaves = {number: leaf for number, leaf, _, _ in self.outputs}
        frozen = sum(t.requires_grad for t in self.ran.tensors) < sum(node.needs_input_grad)
        before = self.before or Before(False)
        kept = {id(buffer) for buffer, _ in before.buffers}
        if frozen or self.ran.has_changed(kept) or not gradients.keys() <= leaves.keys():
            self.running.differentiate_all()
            raise RerunError(CHANGED)
        wanted, keep = [leaves[number] for number in gradients], compat.keeps_graph()
        (args, kwargs), cut = _cut_off(self.arguments)
        running = self.running
        backend = PlanBackend(self.plan, lambda: running, running.captures.backend)  # type: ignore[arg-type,return-value]
        dropped = backend.needless([given for given, _ in cut.values()])
        needless = [edge for i, edge in enumerate(cut) if i in dropped]
        if not before.attributes:
            self._check_inputs(before, args, kwargs)
        with self._as_called(before):
            asked = frozenset(wanted) | ({0} if loss_too else set())
            found = pytree.tree_leaves(self.running.again(self.plan, asked, args, kwargs))
            self._check_same(found, wanted)
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            into: list[Any] = [cut[edge][1] if edge in cut else GradientEdge(*edge) for edge in edges]
            others = [leaf for edge, (_, leaf) in cut.items() if edge not in edges and edge not in needless]
            with _without_hooks(self.ran.tensors):
                more = torch.autograd.grad(
                    [found[i] for i in wanted], [*into, *others], list(gradients.values()), keep, allow_unused=True
                )
        if any(gradient is not None for gradient in more[len(edges) :]):
            self.running.differentiate_all()
            raise RerunError(CHANGED)
        return [None if edge in needless else gradient for edge, gradient in zip(edges, more, strict=False)]

    @contextlib.contextmanager
    def _as_called(self, before: Before) -> Iterator[None]:
        """Inside, the model and torch are as they were for the step's call."""
        model, surroundings = self.running.model, self.ran.region.surroundings
        assert surroundings is not None
        with before.restored(model), contextlib.ExitStack() as stack:
            for kind, dtype, enabled in surroundings.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            vars(model).pop("forward", None)  # a loop's own, which would compute a step in this one
            vars(model).update((k, v) for k, v in zip(_OF_A_CALL, self.called, strict=True) if v is not None)
            yield

    def _check_inputs(self, before: Before, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the step would read something else now: attributes are not remembered for every step."""
        with self._as_called(before):
            now = self.running.read_again(self.plan, self.differentiated, args, kwargs)
        if now is None or not self.ran.is_like(now):
            self.running.differentiate_all()
            raise RerunError(CHANGED)

    def _check_same(self, again: Sequence[Tensor], wanted: Sequence[int]) -> None:
        """Raise, or tell, if the step gave other outputs than before, as far as those are still there, and the loss."""
        pairs = [] if self.loss is None else [(again[0], *self.loss)]
        alive = [(i, output, version) for _, i, ref, version in self.outputs if (output := ref()) is not None]
        pairs += [(again[i], output, version) for i, output, version in alive if i in wanted]
        if all(_close(a.detach(), b.detach()) for a, b, version in pairs if b._version == version):
            return
        if self.running.draws_again():
            self.running.note("an output beside the loss was differentiated; in this first step its dropout was drawn again")
            return
        self.running.differentiate_all()
        raise RerunError(CHANGED)


def _cut_off(arguments: Any) -> tuple[Any, dict[tuple[Any, int], tuple[Tensor, Tensor]]]:
    """A call's arguments as leaves: what they were computed from gets its gradients by the backward under way, and by that alone.

    Returns:
        The arguments; and by edge of autograd's graph the tensor that it leads to, and the leaf in its place.
    """
    cut: dict[tuple[Any, int], tuple[Tensor, Tensor]] = {}

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return value
        edge = value.grad_fn, value.output_nr
        if edge not in cut:
            cut[edge] = value, value.detach().requires_grad_()
        return cut[edge][1]

    return pytree.tree_map(leaf, arguments), cut


@contextlib.contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hooks on tensors are not called inside: the backward under way calls them, with all of a gradient."""
    hooked = [(hooks, hooks.copy()) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, values in hooked:
            hooks.update(values)


def _close(again: Tensor, before: Tensor) -> bool:
    tolerance = tolerance_of([before.dtype])
    largest = float(before.abs().nan_to_num(0.0, 0.0).max()) if before.numel() else 0.0  # a loss of no labels is NaN
    return torch.allclose(again, before, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
