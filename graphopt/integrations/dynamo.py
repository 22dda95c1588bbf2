"""`torch.compile(model, backend="graphopt", options={"budget": 0.5})`.

Dynamo hands over each graph of the model with its parameters as inputs. They are put back into a module, which goes through
the same pipeline as `graphopt.optimize`, once for every combination of input shapes that comes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from graphopt import compat
from graphopt.budget import Budget
from graphopt.errors import CaptureError, GraphoptError, PassError
from graphopt.lower import check_backend
from graphopt.passes import Preserves
from graphopt.planner.contraction import merge_errors
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.plan import Plan, resolve_passes
from graphopt.runtime.bounded_cache import BoundedCache
from graphopt.runtime.disabled import switched_off
from graphopt.runtime.variants import STEP_LIMIT

logger = logging.getLogger(__name__)

_TRAINED = WeakIdKeyDictionary()
"""Per parameter: the budget under which it was considered, and whether it is trained."""


def graphopt_backend(
    module: fx.GraphModule, example_inputs: list[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend function of `torch.compile`.

    Args:
        options: `budget`, `passes` and `backend`, as for `graphopt.optimize`.
    Raises:
        GraphoptError: an unknown option, or whatever `graphopt.optimize` raises for these.
    """
    settings = {"budget": None, "passes": "auto", "backend": "inductor", **(options or {})}
    unknown = sorted(set(settings) - {"budget", "passes", "backend"})
    if unknown:
        raise GraphoptError(f"unknown option {', '.join(unknown)}: use budget, passes and backend.")
    budget = Budget.of(settings["budget"])
    if switched_off():
        return module
    passes = resolve_passes(settings["passes"], budget)
    for rewrite in passes:
        if rewrite.preserves is Preserves.PROJECTED:
            raise PassError(
                f"{rewrite.name} needs an optimizer that steps compressed gradients, which torch.compile cannot hand out: use "
                "graphopt.optimize() and opt.make_optimizer()."
            )
    check_backend(settings["backend"])
    region = _Region(module)
    steps: BoundedCache[Any, Callable[..., Any]] = BoundedCache(STEP_LIMIT)

    def run(*inputs: Any) -> Any:
        parameters, arguments = region.bind(inputs)
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in parameters)):
            return module(*inputs)
        key = tuple((a.shape, a.dtype, a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments)
        step = steps.get((key, tuple(p.requires_grad for p in parameters)))
        if step is None:
            try:
                with compat.no_dynamo():
                    step = region.compile_for(arguments, budget, passes, settings["backend"])
            except CaptureError as error:
                logger.warning("a part of the model runs uncompiled: %s", error)
                step = region
            steps.put((key, tuple(p.requires_grad for p in parameters)), step)
        return step(*arguments)

    return run


class _Region(nn.Module):
    """A Dynamo graph whose parameters are module parameters again."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.names: list[str | None] = []
        for node in module.graph.find_nodes(op="placeholder"):
            example = compat.dynamo_example(node)
            self.names.append(
                _parameter_name(compat.dynamo_source(node), node.name) if isinstance(example, nn.Parameter) else None
            )
        self.positions = {name: i for i, name in enumerate(self.names) if name is not None}
        self.__dict__["module"] = module

    def bind(self, inputs: tuple[Any, ...]) -> tuple[list[nn.Parameter], tuple[Any, ...]]:
        """Split the graph's inputs into parameters (which become the module's own) and the rest."""
        parameters = []
        for name, value in zip(self.names, inputs, strict=True):
            if name is not None:
                self._parameters[name.replace(".", "/")] = value
                parameters.append(value)
        return parameters, tuple(v for name, v in zip(self.names, inputs, strict=True) if name is None)

    def forward(self, *arguments: Any) -> Any:
        rest = iter(arguments)
        flat = [next(rest) if name is None else self._parameters[name.replace(".", "/")] for name in self.names]
        return self.__dict__["module"](*flat)

    def compile_for(self, arguments: tuple[Any, ...], budget: Budget, passes: Any, backend: Any) -> Callable[..., Any]:
        """Plan and compile for these argument shapes."""
        from graphopt.planner.joint_plan import Means, within_memory
        from graphopt.planner.make_plan import make_plan
        from graphopt.runtime.variants import Variants

        variants = Variants(self, None, backend, straight_line=True)
        graph = variants.captured(arguments, {})
        parameters = dict(self.named_parameters())
        known = {name: _TRAINED.get(p) for name, p in parameters.items() if p.requires_grad}
        if all(entry is not None and entry[0] == budget for entry in known.values()):
            # Dynamo asks anew for other shapes: they train the same tensors.
            trained = frozenset(name for name, entry in known.items() if entry and entry[1])
            plan = Plan(
                budget, passes, trained, imprecise=merge_errors(graph, parameters), memory=MemoryLimit.of(budget, backend)
            )
            plan = within_memory(plan, graph, Means())
        else:
            plan = make_plan(self, arguments, {}, graph, budget, passes, None, None, backend)
        for name in known:
            _TRAINED[parameters[name]] = (budget, plan.train is None or name in plan.train)

        def step(*values: Any) -> Any:
            compiled, inputs = variants.step(plan, values, {})
            return compiled(dict(self.named_parameters()), inputs)

        return step


def _parameter_name(source: str, fallback: str) -> str:
    """`L['self']._modules['fc']._parameters['weight']` is `fc.weight`."""
    parts = re.findall(r"\['([^']+)'\]", source)
    return ".".join(parts[1:]) or fallback
