"""The optimizer of a model whose gradients are compressed: Adam in the subspace, on the host (LSP-Offload, Alg. 1 and 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.errors import GraphoptError, InputError
from graphopt.projectors import Subspace, transport
from graphopt.runtime.subspaces import Subspaces

OptimizerType = Callable[..., torch.optim.Optimizer]


@dataclass
class Moments:
    """Adam's state of one compressed gradient, (s x s) each, on the host."""

    first: Tensor
    second: Tensor
    step: int = 0


def adam_direction(gradient: Tensor, moments: Moments, betas: tuple[float, float], eps: float) -> tuple[Tensor, Moments]:
    """Adam's bias-corrected direction m / (sqrt(v) + eps), and the new moments; `moments` stay as they are.

    Source: Kingma and Ba, 2015, Alg. 1, as torch.optim.Adam computes it.
    """
    first = moments.first.lerp(gradient, 1 - betas[0])
    second = (moments.second * betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    step = moments.step + 1
    denominator = (second.sqrt() / math.sqrt(1 - betas[1] ** step)).add_(eps)
    return (first / (1 - betas[0] ** step)).div_(denominator), Moments(first, second, step)


@dataclass
class _Update:
    """What a step will do to one weight once every host update has succeeded."""

    name: str
    direction: Tensor
    moments: Moments
    group: dict[str, Any]


class SubspaceOptimizer(torch.optim.Optimizer):
    """Steps compressed weights in their subspaces, and all others with an ordinary optimizer.

    `param_groups` hold, in place of each compressed weight W, its variable D (s x s): schedulers, gradient scalers, `zero_grad`
    and clipping of `parameters()` see compressed gradients as ordinary ones. A step adds -lr P u Q' to W, where u is Adam's
    direction; weight decay is decoupled and acts on W itself. Moments are float32 (float64 for float64 weights).

    Attributes:
        skipped: steps that were left out, by weight, because its gradient was not finite.
    """

    def __init__(
        self, subspaces: Subspaces, weights: Mapping[str, Tensor], make: OptimizerType, groups: Any, **options: Any
    ) -> None:
        """Set up an optimizer; `OptimizedModule.make_optimizer` does it.

        Args:
            weights: the model's parameters by name.
            make: `torch.optim.Adam` or `torch.optim.AdamW`.
            groups: parameters, or dicts with "params" as torch.optim takes them.
            options: for `make`.
        Raises:
            InputError: an optimizer whose update is not Adam's, or an option of it that the host update lacks.
        """
        self.subspaces = subspaces
        self.skipped: dict[str, int] = {}
        variables = {id(weights[name]): w.variable for name, w in subspaces.weights.items()}
        self._names = {id(w.variable): name for name, w in subspaces.weights.items()}
        self._weights = {name: weights[name] for name in subspaces.weights}
        self.inner = make([_with_variables(group, variables) for group in _as_groups(groups)], **options)
        self._check_options()
        super().__init__([{"params": list(g["params"])} for g in self.inner.param_groups], dict(self.inner.defaults))
        self.param_groups = self.inner.param_groups
        self.moments: dict[str, Moments] = {}
        for name, w in subspaces.weights.items():
            zeros = torch.zeros(w.variable.shape, dtype=w.variable.dtype)
            self.moments[name] = Moments(zeros, zeros.clone())
        subspaces.changed = self._transport
        subspaces.used = True

    def _check_options(self) -> None:
        if not isinstance(self.inner, (torch.optim.Adam, torch.optim.AdamW)):
            raise InputError(
                f"compressed gradients are stepped by Adam or AdamW on the host; {type(self.inner).__name__} is neither. Use "
                "torch.optim.AdamW, or leave out the lsp pass."
            )
        for group in self.inner.param_groups:
            if not any(id(p) in self._names for p in group["params"]):
                continue
            for option in ("amsgrad", "maximize", "differentiable"):
                if group.get(option):
                    raise InputError(f"{option}=True is not supported for compressed gradients: leave it out.")
            decoupled = group.get("decoupled_weight_decay", isinstance(self.inner, torch.optim.AdamW))
            if group["weight_decay"] and not decoupled:
                raise InputError("Adam adds weight_decay to gradients, which are compressed here: use torch.optim.AdamW.")

    def parameters(self) -> list[nn.Parameter]:
        """Everything that this optimizer steps, for `torch.nn.utils.clip_grad_norm_`."""
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; see the class. If an update on the host fails, nothing has been changed.

        Raises:
            GraphoptError: an update on the host failed; says for which weight.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = self._updates()
        self._step_others()
        for update in updates:
            self._apply(update)
        self.subspaces.steps += 1
        return loss

    def _updates(self) -> list[_Update]:
        """Host updates of all compressed gradients; nothing is changed yet."""
        updates = []
        for group in self.param_groups:
            for variable in group["params"]:
                name = self._names.get(id(variable))
                if name is None or variable.grad is None:
                    continue
                gradient = variable.grad.to("cpu")
                if not bool(torch.isfinite(gradient).all()):
                    self.skipped[name] = self.skipped.get(name, 0) + 1
                    continue
                try:
                    direction, moments = adam_direction(gradient, self.moments[name], group["betas"], group["eps"])
                except Exception as error:
                    raise GraphoptError(f"the update of {name} on the host failed, and no weight was changed: {error}") from error
                updates.append(_Update(name, direction, moments, group))
        return updates

    def _step_others(self) -> None:
        """Step the ordinary parameters with the optimizer that the user chose."""
        held = [(w.variable, w.variable.grad) for w in self.subspaces.weights.values()]
        try:
            for variable, _ in held:
                variable.grad = None
            self.inner.step()
        finally:
            for variable, gradient in held:
                variable.grad = gradient

    def _apply(self, update: _Update) -> None:
        """W <- (1 - lr * decay) W - lr P u Q'."""
        weight, rate = self._weights[update.name], float(update.group["lr"])
        if update.group["weight_decay"]:
            weight.mul_(1 - rate * float(update.group["weight_decay"]))
        direction = update.direction.to(weight.device)
        change = self.subspaces.weights[update.name].subspace.decompress(direction)
        weight.add_(change.to(weight.dtype), alpha=-rate)
        self.moments[update.name] = update.moments

    def _transport(self, name: str, old: Subspace, new: Subspace) -> None:
        """Carry moments over to new projectors; where that is not finite, they start anew."""
        moments = self.moments[name]
        first, second = (t.to(old.left.values.device) for t in (moments.first, moments.second))
        first, second = (t.cpu() for t in transport(old, new, first, second))
        if bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
            self.moments[name] = Moments(first, second, moments.step)
        else:
            self.moments[name] = Moments(torch.zeros_like(first), torch.zeros_like(second))

    def state_dict(self) -> dict[str, Any]:
        """As of torch optimizers, with the projectors under "subspaces" and Adam's states in them under "moments"."""
        moments = {name: dict(vars(m)) for name, m in self.moments.items()}
        return {**self.inner.state_dict(), "subspaces": self.subspaces.state(), "moments": moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`.

        Raises:
            InputError: it is of another optimizer, of other weights, or of another size of subspace; nothing is changed then.
        """
        if "subspaces" not in state_dict:
            raise InputError("this is not the state of an optimizer with compressed gradients: it has no 'subspaces'.")
        self.subspaces.check_state(state_dict["subspaces"])
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k not in ("subspaces", "moments")})
        self.param_groups = self.inner.param_groups
        self.subspaces.load(state_dict["subspaces"])
        for name, entry in state_dict["moments"].items():
            like = self.moments[name].first
            self.moments[name] = Moments(entry["first"].to(like, copy=True), entry["second"].to(like, copy=True), entry["step"])


def _as_groups(groups: Any) -> list[dict[str, Any]]:
    groups = list(groups)
    if groups and isinstance(groups[0], dict):
        return groups
    return [{"params": groups}]


def _with_variables(group: Mapping[str, Any], variables: Mapping[int, nn.Parameter]) -> dict[str, Any]:
    """A parameter group with D in place of every compressed W."""
    members: Iterable[Any] = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]

    def replaced(member: Any) -> Any:
        if isinstance(member, tuple):  # (name, parameter)
            return member[0], variables.get(id(member[1]), member[1])
        return variables.get(id(member), member)

    return {**group, "params": [replaced(member) for member in members]}
