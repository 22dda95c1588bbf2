"""The optimizer of a model whose gradients are compressed: Adam in the subspace, on the host (LSP-Offload, Alg. 1 and 3)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.errors import GraphoptError, InputError
from graphopt.projectors import Subspace, transport
from graphopt.runtime.offload import Offload
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


@dataclass(frozen=True)
class _Update:
    """What a step will do to one weight once every host update has succeeded.

    Attributes:
        direction: u, on the host.
        moments: to be in force afterwards.
        options: betas and eps that it was computed with.
    """

    direction: Tensor
    moments: Moments
    options: tuple[Any, ...]


@dataclass(frozen=True)
class _Application:
    """How an update is added to its weight: learning rate and weight decay as they were at the step."""

    rate: float
    decay: float


def apply_before_reading(model: nn.Module, optimizer: SubspaceOptimizer) -> None:
    """Have a model's own forward and `state_dict` wait for updates that would be applied in the next compiled step."""
    own = weakref.ref(optimizer)

    def synchronize(*_: Any) -> None:
        living = own()
        if living is not None:
            living.synchronize()

    model.register_forward_pre_hook(synchronize)
    model.register_state_dict_pre_hook(synchronize)


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
        self._variables = variables
        stepped = {id(p) for p in self.parameters()}
        subspaces.claim({n for n, w in subspaces.weights.items() if id(w.variable) in stepped}, self._transport)
        self.offload = self._offload(subspaces) if subspaces.offload is not None else None

    def __deepcopy__(self, memo: Any) -> SubspaceOptimizer:
        raise InputError("this optimizer belongs to one model: use state_dict(), and make_optimizer() of the other model.")

    def __getstate__(self) -> dict[str, Any]:
        raise InputError("this optimizer cannot be pickled: save its state_dict().")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch optimizers: compressed weights may be among the parameters."""
        if not hasattr(self, "_variables"):
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(_with_variables(param_group, self._variables))
        self._check_options()
        stepped = {id(p) for p in self.parameters()}
        names = {n for n, w in self.subspaces.weights.items() if id(w.variable) in stepped}
        self.subspaces.claim(names, self._transport)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of torch optimizers, for compressed gradients, too."""
        super().zero_grad(set_to_none)
        for name in self._stepped():
            self._weights[name].grad = None

    def _stepped(self) -> dict[str, dict[str, Any]]:
        """The compressed weights that this optimizer steps, and the group of each."""
        return {self._names[id(p)]: group for group in self.param_groups for p in group["params"] if id(p) in self._names}

    def _offload(self, subspaces: Subspaces) -> Offload:
        """The schedule beside the device; the other way round, nothing here keeps the optimizer alive."""
        own = weakref.ref(self)

        def update(name: str, gradient: Tensor) -> _Update | None:
            return _living(own).host_update(name, gradient)

        def apply(name: str, sent: tuple[_Application, Tensor], weight: Tensor) -> None:
            _living(own).apply(name, *sent, weight)

        device = next(iter(subspaces.weights.values())).variable.device
        offload = Offload(subspaces.names[::-1], device, update, apply, subspaces.rewrite.schedule == "layerwise")
        subspaces.produced, subspaces.needed = offload.produced, offload.needed

        def synchronize() -> None:
            optimizer = own()
            if optimizer is not None:
                optimizer.synchronize()

        subspaces.synchronize = synchronize
        return offload

    def _check_options(self) -> None:
        if type(self.inner) not in (torch.optim.Adam, torch.optim.AdamW):
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
        self.synchronize()
        gradients = {}
        for name in self._stepped():
            gradient = self._gradient(name)
            if gradient is not None:
                gradients[name] = gradient
        updates = self._host_updates(gradients)
        self._step_others()
        for name, update in updates.items():
            if update is None:
                self.skipped[name] = self.skipped.get(name, 0) + 1
            else:
                self._commit(name, update)
        if self.subspaces.rewrite.schedule != "layerwise":
            self.synchronize()
        self.subspaces.after_step()
        return loss

    def _gradient(self, name: str) -> Tensor | None:
        """The compressed gradient of a weight, with that of what the model's own forward or a penalty gave the weight itself."""
        compressed, direct = self.subspaces.weights[name], self._weights[name].grad
        gradient = compressed.variable.grad
        if direct is None:
            return gradient
        more = compressed.subspace.compress(direct.to(compressed.variable.dtype))
        return more if gradient is None else gradient + more

    def synchronize(self) -> None:
        """Apply every update that still waits for the next forward (with `Lsp(schedule="layerwise")`).

        The model's own forward and `state_dict` do so; whoever reads its weights in another way calls this before.
        """
        if self.offload is not None:
            with torch.no_grad():
                for name in list(self.offload.pending):
                    self.offload.needed(name, self._weights[name])

    def _host_updates(self, gradients: dict[str, Tensor]) -> dict[str, _Update | None]:
        """Host updates of all compressed gradients, None where one is not finite; nothing is changed yet."""
        if self.offload is not None:
            found = self.offload.results(gradients)
            changed = [n for n, u in found.items() if u is not None and u.options != self._options(n)]
            for name in changed:  # somebody changed betas between backward and step
                found[name] = self.host_update(name, gradients[name].to("cpu"))
            return found
        updates = {}
        for name, gradient in gradients.items():
            try:
                updates[name] = self.host_update(name, gradient.to("cpu"))
            except Exception as error:
                raise GraphoptError(f"the update of {name} on the host failed, and no weight was changed: {error}") from error
        return updates

    def _options(self, name: str) -> tuple[Any, ...]:
        group = self._stepped()[name]
        return tuple(float(beta) for beta in group["betas"]), float(group["eps"])

    @torch.no_grad()
    def host_update(self, name: str, gradient: Tensor) -> _Update | None:
        """Adam's direction from a compressed gradient on the host; None if that is not finite."""
        if not bool(torch.isfinite(gradient).all()):
            return None
        options = self._options(name)
        return _Update(*adam_direction(gradient, self.moments[name], *options), options)

    def _commit(self, name: str, update: _Update) -> None:
        group = self._stepped()[name]
        application = _Application(float(group["lr"]), float(group["weight_decay"]))
        self.moments[name] = update.moments
        if self.offload is not None:
            self.offload.commit(name, application, update.direction)
        else:
            weight = self._weights[name]
            self.apply(name, application, update.direction.to(weight.device), weight)

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

    @torch.no_grad()
    def apply(self, name: str, application: _Application, direction: Tensor, weight: Tensor) -> None:
        """W <- (1 - lr * decay) W - lr P u Q', in place, on the device."""
        if application.decay:
            weight.mul_(1 - application.rate * application.decay)
        change = self.subspaces.weights[name].subspace.decompress(direction)
        weight.add_(change.to(weight.dtype), alpha=-application.rate)

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
        self.synchronize()
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
        self.synchronize()
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k not in ("subspaces", "moments")})
        self.param_groups = self.inner.param_groups
        self.subspaces.load(state_dict["subspaces"])
        for name, entry in state_dict["moments"].items():
            like = self.moments[name].first
            self.moments[name] = Moments(entry["first"].to(like, copy=True), entry["second"].to(like, copy=True), entry["step"])


def _living(reference: weakref.ref[SubspaceOptimizer]) -> SubspaceOptimizer:
    optimizer = reference()
    if optimizer is None:
        raise GraphoptError("the optimizer of this model's compressed gradients is gone: make another with make_optimizer().")
    return optimizer


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
