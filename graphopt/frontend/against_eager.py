"""`optimize(verify=True)` of a plan that torch.compile runs: one step on the example batch, against eager autograd.

Two copies of the model run a step each: one as it is, one compiled. So nothing of the model changes, whatever forward does.

Dropout is compared, too: every draw begins with the same seed, here and in eager mode, so that masks are the same in whatever
order they are drawn. The step that is compared then draws with eager mode's kernels, since Inductor's own draw other numbers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import numbers
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, nn

from graphopt import compat
from graphopt.calls import copy_tensors, flatten_call
from graphopt.capture import no_generation_cache, twin, unchanged_draws
from graphopt.compat import InputDesc, OutputDesc, pytree
from graphopt.compat.dynamo import cause_of
from graphopt.compat.inductor import eager_draws
from graphopt.errors import first_line
from graphopt.frontend.outside import unchanged_outside
from graphopt.frontend.running import Running
from graphopt.loss import LossFunction, scalar_loss
from graphopt.passes import Preserves
from graphopt.passes.state import State
from graphopt.passes.technique import technique
from graphopt.runtime.captures import Counters
from graphopt.runtime.supply import Supply
from graphopt.runtime.uniforms import Uniforms
from graphopt.testing.compare import compare_gradients, compare_values, tolerance_of

if TYPE_CHECKING:
    from graphopt.runtime.module import OptimizedModule


def first_difference(opt: OptimizedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What a step of these inputs computes otherwise than eager autograd; "" if it computes the same.

    Gradients of what is trained are compared, outputs, buffers, and attributes of the modules that are tensors or numbers; those
    that a technique keeps with the image of eager's. Of a sampler the step without sampling is taken: its own tests hold it to
    its expectation.
    """
    model, graph, plan, captures, loss = opt._graphopt_model, opt._graph, opt.plan, opt.captures, opt.loss_given
    loss_alone = captures.loss_alone
    try:
        eager, ours = twin(model), twin(model)
    except Exception as error:
        return f"the model cannot be copied, so that nothing can be compared ({first_line(error)})"
    planned = [p.name for p in graph.parameters]
    told: list[str] = []
    kept = tuple(p for p in plan.passes if p.preserves is not Preserves.UNBIASED and not technique(p).communicates)
    plan = replace(plan, passes=kept)
    for rewrite in kept:
        plan = technique(rewrite).alone(plan)
    taken = _Taken(opt.states)
    own = copy.copy(captures)
    own.model, own.counters = ours, Counters()
    running = Running(own, planned, told.append, lambda: None, own.several_graphs, supply=taken)
    tensors = [*model.parameters(), *model.buffers(), *flatten_call(args, kwargs).tensors]
    trained = [n for n, p in model.named_parameters() if p.requires_grad and (plan.train is None or n in plan.train)]
    with same_draws(tensors), unchanged_outside(model), no_generation_cache(eager):
        theirs = _step(eager, eager, args, kwargs, loss)
    try:
        with same_draws(tensors), unchanged_outside(model), eager_draws():
            found = _step(ours, lambda *a, **k: running(plan, a, k), args, kwargs, loss)
    except Exception as error:
        return f"the step fails ({first_line(cause_of(error))})"
    if told:
        return told[0]
    values = [node.meta.get("val") for node in graph.graph.nodes]
    tolerance = tolerance_of(v.dtype for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()))
    compressed = taken.images(theirs[1])
    reached = [name for name in trained if theirs[1][name] is not None and name not in compressed]
    wrong = _states_differ(eager, ours)
    outputs = {name: value for name, value in theirs[0].items() if not loss_alone or name in found[0]}
    for agreement in (
        compare_values(found[0], outputs, tolerance),
        compare_gradients({n: g for n, g in found[1].items() if n in reached or n in planned}, theirs[1], reached, tolerance),
        compare_gradients(taken.gradients, compressed, list(compressed), tolerance),
        compare_values(_tensors(ours), _tensors(eager), tolerance),
    ):
        if agreement.difference:
            return agreement.difference
    return wrong


class _Reseeded(compat.DispatchMode):
    """Seeds the generators before every draw, and has it fill tensors in the order of their indices, whatever their layout."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.generators = [torch.default_generator]
        if any(t.is_cuda for t in tensors):
            self.generators += [
                torch.cuda.default_generators[i] for i in sorted({t.device.index or 0 for t in tensors if t.is_cuda})
            ]

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, compat.OpOverload):  # branches of torch.cond draw, and what checkpointing computes again
            return func(*pytree.tree_map(self._around, args), **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        ordered = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in args]
        result = func(*args, **(kwargs or {}))  # for the layout of what it returns
        for generator in self.generators:
            generator.manual_seed(0)
        drawn = func(*ordered, **(kwargs or {}))
        written = compat.written_arguments(func)[: len(args)]
        changed = [pair for pair, is_written in zip(zip(args, ordered, strict=True), written, strict=True) if is_written]
        for mine, other in (*zip(pytree.tree_leaves(result), pytree.tree_leaves(drawn), strict=True), *changed):
            if isinstance(mine, Tensor):
                mine.copy_(other)
        return result

    def _around(self, argument: Any) -> Any:
        """A function, graph or operator that draws, run in this mode, which torch leaves for the operator that calls it."""
        draws = isinstance(argument, compat.OpOverload) and torch.Tag.nondeterministic_seeded in argument.tags
        if not draws and not isinstance(argument, (types.FunctionType, nn.Module)):
            return argument

        @functools.wraps(argument)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return run


@contextlib.contextmanager
def same_draws(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Runs inside draw the same random numbers; every stream is afterwards as it was."""
    with unchanged_draws(tensors), _Reseeded(tensors):
        random.seed(0)
        numpy.random.seed(0)
        yield


class _Taken(Supply):
    """What a step that is compared exchanges: gradients that a technique keeps are gathered by name."""

    def __init__(self, states: Mapping[str, State]) -> None:
        super().__init__(Uniforms(), states)
        self.gradients: dict[str, Tensor | None] = {}

    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> None:
        """See `Supply`; slots are none of the training's."""
        if isinstance(desc, InputDesc):
            self.gradients[desc.target] = value

    def finish(self) -> None:
        """See `Supply`; nothing waits."""

    def images(self, eager: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """What the gathered gradients must be, where eager autograd has any."""
        found: dict[str, Tensor | None] = {}
        for name in self.gradients:
            gradient = eager.get(name)
            images = [] if gradient is None else [state.image(name, gradient) for state in self.states.values()]
            image = next((made for made in images if made is not None), None)
            if image is not None:
                found[name] = image
        return found


def _step(
    model: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: LossFunction | None
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Outputs, and gradients by parameter and input."""
    args, kwargs = copy_tensors((args, dict(kwargs)))
    with torch.enable_grad():
        output = run(*args, **kwargs)
        scalar, _ = scalar_loss(output, loss)
        wanted: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        wanted |= {f"input {i}": t for i, t in enumerate(flatten_call(args, kwargs).tensors) if t.requires_grad}
        return named_outputs(output), dict(zip(wanted, _gradients(scalar, list(wanted.values())), strict=True))


def _gradients(scalar: Tensor, wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients by leaves of a copy; what is shared with the model, such as the parameters of a loss, keeps its own."""
    nodes = list(compat.functions_behind([scalar]))
    if not any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
        return torch.autograd.grad(scalar, wanted, allow_unused=True)
    # reentrant checkpointing refuses torch.autograd.grad
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    before = [(leaf, leaf.grad) for leaf in leaves if not any(leaf is tensor for tensor in wanted)]
    for tensor in wanted:
        tensor.grad = None
    scalar.backward()
    for leaf, gradient in before:
        leaf.grad = gradient
    return [tensor.grad for tensor in wanted]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and other tensors that the modules hold."""
    found = {f"the buffer {name}": value.detach() for name, value in model.named_buffers(remove_duplicate=False)}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                found[f"the attribute {prefix}.{name}".replace(" .", " ")] = value.detach()
    return found


def _states_differ(eager: nn.Module, ours: nn.Module) -> str:
    """The first number or text among the modules' attributes that is not the same."""
    others = dict(ours.named_modules())
    for prefix, module in eager.named_modules():
        if prefix not in others:
            return f"the module {prefix} is there in eager mode alone"
        for name, value in vars(module).items():
            if isinstance(value, (numbers.Number, str)) and not _equal(value, vars(others[prefix]).get(name)):
                return f"the attribute {f'{prefix}.{name}'.lstrip('.')} is not what eager mode makes it"
    return ""


def _equal(a: Any, b: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(a == b) or (a != a and b != b)
    return True


def named_outputs(output: Any) -> dict[str, Tensor]:
    """The tensors of a model's output, by where they stand in it."""
    leaves = pytree.tree_flatten_with_path(output)[0]
    return {f"output {pytree.keystr(path)}".strip(): leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)}
