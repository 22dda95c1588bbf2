"""The optimizer of a model whose gradients are compressed: Adam in the subspace, on the host (LSP-Offload, Alg. 1 and 3)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from graphopt.passes.lsp.compressed_weight import hooked
from graphopt.passes.lsp.host_adam import HostUpdate, Moments, adam_direction
from graphopt.passes.lsp.offload import Apply, Offload, synchronize_before_reading
from graphopt.passes.lsp.projectors import Subspace, transport
from graphopt.passes.lsp.subspaces import Subspaces
from graphopt.passes.state import MakeOptimizer
from torch import Tensor, nn

from graphopt.compat.optimizer_hooks import load_with_hooks, state_with_hooks
from graphopt.errors import GraphoptError, InputError
from graphopt.runtime.load_optimizer import load_optimizer
from graphopt.runtime.plain_values import from_plain, to_plain


class SubspaceOptimizer(torch.optim.Optimizer):
    """Steps compressed weights in their subspaces, and all others with an ordinary optimizer.

    `param_groups` hold, in place of each compressed weight W, its variable D (s x s): schedulers, gradient scalers, `zero_grad`
    and clipping of `parameters()` see compressed gradients as ordinary ones. What reaches W itself (a penalty on it, or the model
    in eval mode) is compressed and added to D's gradient. A step adds -lr P u Q' to W, where u is Adam's direction; weight decay
    is decoupled and acts on W itself. Moments are float32 (float64 for float64 weights).

    A compressed gradient that is not finite skips the step of its weight, and is counted (`skipped`, and in `opt.report`).
    """

    def __init__(self, subspaces: Subspaces, model: nn.Module, make: MakeOptimizer, groups: Any, **options: Any) -> None:
        """Set up an optimizer; `OptimizedModule.make_optimizer` does it.

        Args:
            model: whose weights are compressed.
            make: `torch.optim.Adam` or `torch.optim.AdamW`.
            groups: parameters, or dicts with "params" as torch.optim takes them.
            options: for `make`.
        Raises:
            InputError: an optimizer whose update is not Adam's, or an option of it that the host update lacks.
        """
        weights = dict(model.named_parameters(remove_duplicate=False))
        self.subspaces = subspaces
        self._weights = {name: weights[name] for name in subspaces.weights}
        self._names = {id(w.variable): name for name, w in subspaces.weights.items()}
        variables = {id(self._weights[name]): w.variable for name, w in subspaces.weights.items()}
        self.inner = make([_with_variables(group, variables) for group in _as_groups(groups)], **options)
        self._check_options()
        super().__init__([{"params": list(g["params"])} for g in self.inner.param_groups], dict(self.inner.defaults))
        self.param_groups = self.inner.param_groups
        self.moments: dict[str, Moments] = {}
        for name, w in subspaces.weights.items():
            zeros = torch.zeros(w.variable.shape, dtype=w.variable.dtype)
            self.moments[name] = Moments(zeros, zeros.clone())
        self._variables = variables
        own = weakref.ref(self)  # the subspaces must not keep alive an optimizer that its user has dropped, nor its hooks
        self._changed = _Method(own, "_transport")
        self.offload: Offload | None = None
        if subspaces.gates is not None:
            order = list(subspaces.names)[::-1]
            self.offload = Offload({n: self._weights[n] for n in order}, _Method(own, "host_update"))
        self._claim()
        handles = [hooked(w, _Direct(subspaces, name)) for name, w in self._weights.items()]
        if self.offload is not None:
            handles += synchronize_before_reading(model, self.offload)
        weakref.finalize(self, _end, handles, self.offload)

    def __deepcopy__(self, memo: Any) -> SubspaceOptimizer:
        raise InputError("this optimizer belongs to one model: use state_dict(), and make_optimizer() of the other model.")

    def __getstate__(self) -> dict[str, Any]:
        raise InputError("this optimizer cannot be pickled: save its state_dict().")

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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of torch optimizers: compressed weights may be among the parameters."""
        if not hasattr(self, "_variables"):  # while the base class is set up
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(_with_variables(param_group, self._variables))
        try:
            self._check_options()
        except InputError:
            self.inner.param_groups.pop()
            raise
        self._claim()

    @property
    def skipped(self) -> dict[str, int]:
        """Steps that were left out, by weight, because its gradient was not finite."""
        return {name: w.skipped for name, w in self.subspaces.weights.items() if w.skipped}

    def parameters(self) -> list[nn.Parameter]:
        """Everything that this optimizer steps, for `torch.nn.utils.clip_grad_norm_`."""
        return [p for group in self.param_groups for p in group["params"]]

    def _stepped(self) -> dict[str, dict[str, Any]]:
        """The compressed weights that this optimizer steps, and the group of each."""
        return {self._names[id(p)]: group for group in self.param_groups for p in group["params"] if id(p) in self._names}

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
        stepped = self._stepped()
        gradients = {n: g for n in stepped if (g := self.subspaces.weights[n].variable.grad) is not None}
        updates = self._host_updates(gradients)
        self._step_others()
        for name, update in updates.items():
            if update is None:
                self.subspaces.weights[name].skipped += 1
                continue
            self.moments[name] = update.moments
            apply = self._application(name, stepped[name])
            if self.offload is not None:
                self.offload.commit(name, update.direction, apply)
            else:
                apply(update.direction.to(self._weights[name].device), self._weights[name])
        self.subspaces.stepped(stepped)
        return loss

    def synchronize(self) -> None:
        """Apply every update that still waits for the next forward (with `Lsp(schedule="layerwise")`).

        The forward, `state_dict` and `load_state_dict` of every module that holds compressed weights do so; whoever reads or
        changes its weights in another way calls this before.
        """
        if self.offload is not None:
            self.offload.synchronize()

    def _host_updates(self, gradients: dict[str, Tensor]) -> dict[str, HostUpdate | None]:
        """Host updates of all compressed gradients, None where one is not finite; nothing is changed yet."""
        if self.offload is not None:
            found: dict[str, HostUpdate | None] = self.offload.results(gradients)
            for name, update in found.items():
                if update is not None and self._outdated(name, update):
                    found[name] = self.host_update(name, gradients[name].to("cpu"))
            return found
        updates = {}
        for name, gradient in gradients.items():
            try:
                updates[name] = self.host_update(name, gradient.to("cpu"))
            except Exception as error:
                raise GraphoptError(f"the update of {name} on the host failed, and no weight was changed: {error}") from error
        return updates

    def _outdated(self, name: str, update: HostUpdate) -> bool:
        """Whether moments or options have changed between the backward and the step."""
        return update.before[0] is not self.moments[name] or update.before[1:] != self._options(name)

    def _claim(self) -> None:
        """Take over the compressed weights among the parameters, and note the number of each one's group."""
        stepped = self._stepped()
        numbers = {id(group): i for i, group in enumerate(self.param_groups)}
        self._group_of = {name: numbers[id(group)] for name, group in stepped.items()}
        self.subspaces.claim(stepped, map(id, self.parameters()), self._changed, self.offload)

    def _options(self, name: str) -> tuple[Any, ...]:
        group = self.param_groups[self._group_of[name]]
        return tuple(float(beta) for beta in group["betas"]), float(group["eps"])

    @torch.no_grad()
    def host_update(self, name: str, gradient: Tensor) -> HostUpdate | None:
        """Adam's direction from a compressed gradient on the host; None if that is not finite."""
        if not bool(torch.isfinite(gradient).all()):
            return None
        moments, (betas, eps) = self.moments[name], self._options(name)
        return HostUpdate(*adam_direction(gradient, moments, betas, eps), (moments, betas, eps))

    def _application(self, name: str, group: Mapping[str, Any]) -> Apply:
        """W <- (1 - lr * decay) W - lr P u Q', in place, with everything as it is at this step."""
        subspace, rate, decay = self.subspaces.weights[name].subspace, float(group["lr"]), float(group["weight_decay"])

        def apply(direction: Tensor, weight: Tensor) -> None:
            change = subspace.decompress(direction).to(weight.dtype)  # before anything is changed: it needs memory
            if decay:
                weight.mul_(1 - rate * decay)
            weight.add_(change, alpha=-rate)

        return apply

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

    def _transport(self, name: str, old: Subspace, new: Subspace, unseen: Tensor) -> None:
        """Carry moments over to new projectors; where that is not finite, they start anew."""
        moments = self.moments[name]
        first, second = (t.to(old.left.values.device) for t in (moments.first, moments.second))
        first, second = (t.cpu() for t in transport(old, new, first, second, unseen.to(first)))
        if bool(torch.isfinite(first).all() and torch.isfinite(second).all()):
            self.moments[name] = Moments(first, second, moments.step)
        else:
            self.moments[name] = Moments(torch.zeros_like(first), torch.zeros_like(second))

    def state_dict(self) -> dict[str, Any]:
        """As of torch optimizers, with the projectors under "lsp" and Adam's states in them under "moments"."""
        return state_with_hooks(self, self._state)

    def _state(self) -> dict[str, Any]:
        self.synchronize()
        own = {self.subspaces.rewrite.name: self.subspaces.snapshot(), "moments": to_plain(self.moments)}
        return self.inner.state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`.

        Raises:
            InputError: it is of another optimizer, of other weights, or of another size of subspace; nothing is changed then.
        """
        load_with_hooks(self, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        projectors = self.subspaces.rewrite.name
        if projectors not in state_dict:
            raise InputError(f"this is not the state of an optimizer with compressed gradients: it has no {projectors!r}.")
        restore_subspaces = self.subspaces.prepare(state_dict[projectors])
        moments = self._checked_moments(state_dict.get("moments"))
        load_optimizer(self.inner, {k: v for k, v in state_dict.items() if k not in (projectors, "moments")})
        self.param_groups = self.inner.param_groups
        self.synchronize()
        if self.offload is not None:
            self.offload.forget_started()
        restore_subspaces()
        self.moments = moments

    def _checked_moments(self, saved: Any) -> dict[str, Moments]:
        moments = from_plain(dict[str, Moments], saved, "moments")
        for name in sorted(set(moments) ^ set(self.moments)):
            raise InputError(f"the state has no moments of the same weights: {name} is in one of both alone.")
        for name, m in moments.items():
            like = self.moments[name].first
            if m.first.shape != like.shape or m.second.shape != like.shape or m.step < 0 or not m.first.is_floating_point():
                raise InputError(f"the moments of {name} are not two matrices of {tuple(like.shape)} and a number of steps.")
        return {
            name: Moments(
                m.first.to(self.moments[name].first, copy=True), m.second.to(self.moments[name].first, copy=True), m.step
            )
            for name, m in moments.items()
        }


class _Direct:
    """A hook on a compressed weight: a gradient that reaches the weight itself is compressed, and added to its variable's."""

    def __init__(self, subspaces: Subspaces | None = None, name: str = "") -> None:
        self.subspaces = None if subspaces is None else weakref.ref(subspaces)
        self.name = name

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> None:
        subspaces = None if self.subspaces is None else self.subspaces()
        if subspaces is None or weight.grad is None:
            return
        compressed = subspaces.weights[self.name]
        if not compressed.variable.requires_grad:
            return
        more = compressed.subspace.compress(weight.grad.to(compressed.variable.dtype)).contiguous()
        before = compressed.variable.grad
        compressed.variable.grad = more if before is None else before + more
        weight.grad = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Direct, ()


def _end(handles: list[Any], offload: Offload | None) -> None:
    """The optimizer is gone: finish its updates, and leave the model as it was."""
    if offload is not None:
        offload.synchronize()
    for handle in handles:
        handle.remove()


class _Method:
    """A method of an optimizer that this does not keep alive."""

    def __init__(self, own: weakref.ref[SubspaceOptimizer], name: str) -> None:
        self.own, self.name = own, name

    def __call__(self, *args: Any) -> Any:
        optimizer = self.own()
        if optimizer is None:
            raise GraphoptError("the optimizer of this model's compressed gradients is gone: make another with make_optimizer().")
        return getattr(optimizer, self.name)(*args)

    def __reduce__(self) -> Any:
        raise InputError(
            "an optimised model whose compressed weights have an optimizer cannot be pickled: pickle it before make_optimizer(), "
            "or keep what it has trained by save_state()."
        )


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
