"""The subspaces of a model's compressed gradients while it trains: projectors, and when they are fitted anew (LSP, Alg. 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from graphopt.passes.lsp.cleared import Cleared
from graphopt.passes.lsp.compressed_weight import Changed, CompressedWeight, WeightState
from graphopt.passes.lsp.compressor import Part
from graphopt.passes.lsp.learning import draw_moments, scaled_to_one
from graphopt.passes.lsp.offload import Offload
from graphopt.passes.lsp.projectors import Subspace, draw_subspace, fit, unseen_energy
from graphopt.passes.lsp.technique import Lsp
from graphopt.passes.state import MakeOptimizer, State
from torch import Tensor, nn

from graphopt.compat import InputDesc, OutputDesc
from graphopt.distributed.ranks import Ranks
from graphopt.errors import GraphoptError, InputError
from graphopt.ops.host_callback import new_receiver
from graphopt.planner.plan import Plan
from graphopt.runtime.plain_values import from_plain, to_plain
from graphopt.runtime.uniforms import check_generator_state

if TYPE_CHECKING:
    from graphopt.frontend.step import RegionStep

CHECKING = "comparing projectors with gradients"


@dataclass(frozen=True)
class SubspacesState:
    """What a checkpoint keeps of `Subspaces`."""

    size: int
    weights: dict[str, WeightState]
    steps: int
    forwards: int
    checked_at: int
    stepped: tuple[str, ...]
    generator: Tensor


class Subspaces(State):
    """Every compressed weight of a model, and the receiver to which checking steps hand full gradients, one at a time.

    Attributes:
        steps: of the optimizer.
        forwards: of the model since its last step.
        gates: the receiver that is asked for each weight in the middle of a forward, with `Lsp(schedule="layerwise")`.
        offloads: by weight, what is told of its compressed gradient in the middle of a backward, and of its use in a forward.
    """

    own_optimizer = True

    def __init__(self, rewrite: Lsp, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        """Draw random projectors.

        Args:
            weights: by name, those to compress.
            ranks: that train the model together; they have the same projectors.
        """
        self.ranks = ranks
        self.rewrite = rewrite
        self.generator = torch.Generator().manual_seed(rewrite.seed)
        self.weights: dict[str, CompressedWeight] = {}
        self.steps = self.forwards = 0
        self._checked_at = -1
        self._checks = self._again = self._awaited = False
        self._cleared = Cleared()
        self._beside: set[int] = set()
        for name, weight in weights.items():
            exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
            zero = torch.zeros((), dtype=exact, device=weight.device)
            shape = (weight.shape[0], weight.shape[1])
            variable = nn.Parameter(zero.expand(rewrite.subspace, rewrite.subspace))
            drawn = self._drawn(shape, weight.device, exact)
            self.weights[name] = CompressedWeight(name=name, shape=shape, variable=variable, subspace=drawn)
        self.names = tuple(self.weights)
        self.offloads: dict[str, Offload] = {}
        self._stepped: set[str] = set()
        self.receiver = new_receiver(self._check)
        self.gates = None if rewrite.schedule == "sequential" else new_receiver(self._needed)

    def __deepcopy__(self, memo: Any) -> Subspaces:
        raise InputError("compressed gradients belong to one model: copy the model itself, and call optimize() on the copy.")

    def _drawn(self, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Subspace:
        return draw_subspace(shape, self.rewrite.subspace, self.rewrite.nonzeros, self.generator).to(device, dtype)

    def before_forward(self, plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """See `State`: now and then a step looks whether the projectors still represent the gradients.

        Raises:
            GraphoptError: no optimizer steps the compressed gradients.
        """
        if all(w.changed is None for w in self.weights.values()):
            raise GraphoptError(
                "gradients of this model are compressed, which an ordinary optimizer does not see: make yours with "
                "opt.make_optimizer(torch.optim.AdamW, lr=...), before the first step."
            )
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad and (plan.train is None or n in plan.train)}
        others = {n: p for n, p in trained.items() if id(p) in self._beside}
        none = all(w.variable.grad is None for w in self.weights.values())
        if not none and self._cleared.are(others, stepped=not self.forwards):
            self.clear_gradients()
        elif none and not self._awaited:  # what ran before was not stepped, as where a scaler left it out
            self.forwards = 0
        self._checks, self._awaited = self.due(trained), True
        self.forwards += 1
        if not self._checks:
            return plan
        hands_out = replace(plan.decisions[self.rewrite.name], checking=self.receiver)
        return plan.measuring().decided(self.rewrite.name, hands_out)

    def after_forward(self, step: RegionStep | None, output: Any) -> None:
        """See `State`."""
        self._cleared.follow(step)
        if self._checks and (step is None or not step.graph.compressed):  # none of these weights is trained now
            self._checked_at = self.steps // self.rewrite.check_every

    def supply(self, desc: InputDesc, size: Sequence[int], like: Tensor) -> Tensor | None:
        """What a compiled step reads of a weight's projectors."""
        if not isinstance(desc.target, Part):
            return None
        compressed = self.weights[desc.target.weight]
        compressed.follow(like.device)
        return compressed.inputs[desc]

    @torch.no_grad()
    def take(self, desc: InputDesc | OutputDesc, value: Tensor) -> bool:
        """See `State`; `value` is a tensor of our own. Gradients that no optimizer steps are dropped."""
        if desc.kind != "compressed" or desc.target not in self.weights:
            return False
        self._awaited = False
        compressed = self.weights[desc.target]
        variable = compressed.variable
        if variable.requires_grad:
            compressed.follow(value.device)
            if variable.grad is None:
                variable.grad = value
            else:
                variable.grad.add_(value)
            if desc.target in self.offloads and not self._checks:
                self.offloads[desc.target].produced(desc.target, value)
        return True

    def image(self, name: str, gradient: Tensor) -> Tensor | None:
        """P'GQ."""
        if name not in self.weights:
            return None
        weight = self.weights[name]
        return weight.subspace.compress(gradient.to(weight.variable.dtype))

    def variables(self) -> Mapping[str, Tensor]:
        """The variables D in the place of compressed weights."""
        return {name: weight.variable for name, weight in self.weights.items()}

    def optimizer(self, model: nn.Module, make: MakeOptimizer, groups: Any, options: Mapping[str, Any]) -> Any:
        """One that steps compressed gradients in their subspaces."""
        from graphopt.passes.lsp.optimizer import SubspaceOptimizer

        return SubspaceOptimizer(self, model, make, groups, **options)

    def steps_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """See `State`."""
        from graphopt.passes.lsp.optimizer import SubspaceOptimizer

        return isinstance(optimizer, SubspaceOptimizer)

    def due(self, trained: Collection[str]) -> bool:
        """Whether the next step compares the projectors with the gradients: the first one, and every `check_every` steps.

        Trained weights whose gradient was zero or not finite then are looked at again, alone, in steps 1, 2, 4 and so on: ever
        more rarely, as some may never get another.
        """
        self._again = self._checked_at == self.steps // self.rewrite.check_every
        unseen = any(math.isnan(w.error) for name, w in self.weights.items() if name in trained)
        return not self._again or (unseen and self.steps & (self.steps - 1) == 0)

    def selected(self, names: Iterable[str]) -> None:
        """Have the next step fit projectors of these weights that have never seen a gradient."""
        if any(math.isnan(self.weights[name].error) for name in names if name in self.weights):
            self._checked_at = -1

    def stepped(self, names: Iterable[str]) -> None:
        """An optimizer has stepped some weights: projectors that were fitted for them meanwhile come into force.

        With several optimizers, a step is over when each has made its own.
        """
        names = set(names)
        for name in names:
            compressed = self.weights[name]
            if compressed.next is not None:
                compressed.replace(*compressed.next)
        over = names & self._stepped or self._stepped | names >= {n for n, w in self.weights.items() if w.changed is not None}
        self._stepped = set() if over else self._stepped | names
        if over:
            if self._checked_at == self.steps // self.rewrite.check_every:
                for compressed in self.weights.values():
                    compressed.gathered, compressed.moments, compressed.batches = None, None, 0
            self.steps += 1
            self.forwards = 0

    def _check(self, site: int, gradient: Tensor) -> Tensor:
        """Take the full gradient of a weight in a checking step, learn projectors anew that represent it badly, and compress it.

        The first gradient takes the place of random projectors. A check then gathers gradients of several batches: projectors are
        learned from all but the last of them, and compared with the last, which they have not seen.

        Should there be another forward in this step, or a compressed gradient of the weight already, then those are in the old
        projectors, and what is learned comes into force after the step.
        """
        compressed = self.weights[self.names[site]]
        compressed.follow(gradient.device)
        exact: Any = self.ranks.mean([gradient.detach().to(compressed.variable.dtype)], CHECKING)[0]
        largest = exact.abs().max()
        counts = bool(torch.isfinite(largest)) and (not self._again or math.isnan(compressed.error))
        if counts:
            compressed.batches += 1
            complete = compressed.batches >= min(self.rewrite.batches, self.rewrite.check_every)
            if complete:
                self._checked_at = self.steps // self.rewrite.check_every
        if counts and bool(largest):  # of zero there is nothing to learn
            scaled, gathered = scaled_to_one(exact), compressed.gathered
            if gathered is None or not complete:
                if compressed.moments is None:  # in blocks of their own: subspaces differ from check to check
                    s, d = self.rewrite.subspace, self.rewrite.nonzeros
                    compressed.moments = draw_moments(compressed.shape, s, d, self.generator, exact.dtype)
                compressed.moments = compressed.moments.add(scaled)
            if complete and gathered is not None:
                self._compare(compressed, scaled, scaled_to_one(gathered.to(exact.device)), scaled)
            elif complete:
                self._compare(compressed, scaled, scaled)
            elif math.isnan(compressed.error):
                self._compare(compressed, scaled)
            if not complete:
                host = exact.to("cpu")
                compressed.gathered = host.clone() if compressed.gathered is None else compressed.gathered + host
        return compressed.subspace.compress(exact).contiguous()

    def _compare(
        self, compressed: CompressedWeight, latest: Tensor, known: Tensor | None = None, unseen: Tensor | None = None
    ) -> None:
        """Learn projectors from the moments if those in force represent `latest` badly, and if that helps there.

        Args:
            known: gradients to which what was learned is fitted further; None: it is not.
            unseen: by which that is judged; None: by those themselves.
        """
        compressed.error = self.ranks.same(compressed.subspace.error(latest), CHECKING)
        if compressed.error < self.rewrite.threshold:
            return
        assert compressed.moments is not None
        s, d = self.rewrite.subspace, self.rewrite.nonzeros
        starts = [compressed.moments.subspace(s, d).to(latest.device, latest.dtype)]
        if s % d and known is not None:  # which leaves columns without an entry
            starts.append(self._drawn(compressed.shape, latest.device, latest.dtype))
        if known is not None and starts[0].error(latest) >= self.rewrite.threshold:
            starts = [fit(start, known, self.rewrite.threshold, self.rewrite.iterations, unseen) for start in starts]
        found = min(starts, key=lambda start: start.error(latest))
        found, error = self.ranks.same((found, found.error(latest)), CHECKING)  # rounding is not the same everywhere
        if error < compressed.error:
            compressed.error = error
            compressed.fits += 1
            compressed.next = found, unseen_energy(compressed.subspace, found, latest)
            if self.forwards == 1 and compressed.variable.grad is None:
                compressed.replace(*compressed.next)

    def _needed(self, site: int, weight: Tensor) -> None:
        """A weight is about to be read, in the middle of a forward."""
        name = self.names[site]
        if name in self.offloads:
            self.offloads[name].needed(name, weight)

    def synchronize(self) -> None:
        """Finish every update that waits for the next forward."""
        for offload in set(self.offloads.values()):
            offload.synchronize()

    def snapshot(self) -> dict[str, Any]:
        """See `Stateful`."""
        weights = {name: w.moved(torch.device("cpu"), w.variable.dtype) for name, w in self.weights.items()}
        stepped, drawn = tuple(sorted(self._stepped)), self.generator.get_state()
        state = SubspacesState(self.rewrite.subspace, weights, self.steps, self.forwards, self._checked_at, stepped, drawn)
        return to_plain(state)

    def prepare(self, snapshot: Any) -> Callable[[], None]:
        """See `Stateful`."""
        saved = from_plain(SubspacesState, snapshot, "subspaces")
        check_generator_state(saved.generator)
        for name in sorted(set(saved.weights) ^ set(self.names) | set(saved.stepped) - set(self.names)):
            raise InputError(f"the checkpoint does not compress the same weights: {name} is in one of both alone.")
        if saved.size != self.rewrite.subspace:
            raise InputError(f"the checkpoint has subspace={saved.size}, this model {self.rewrite.subspace}: use the same Lsp.")
        for name, weight in self.weights.items():
            saved.weights[name].check(weight, self.rewrite)
        moved = {n: saved.weights[n].moved(w.variable.device, w.variable.dtype) for n, w in self.weights.items()}

        def restore() -> None:
            self.synchronize()
            for name, weight in self.weights.items():
                weight.restore(moved[name])
            self.steps, self.forwards, self._checked_at = saved.steps, saved.forwards, saved.checked_at
            self._stepped = set(saved.stepped)
            self.generator.set_state(saved.generator)

        return restore

    def clear_gradients(self, names: Iterable[str] | None = None) -> None:
        """See `State`."""
        for name in self.weights if names is None else names:
            if name in self.weights:
                self.weights[name].variable.grad = None

    def claim(self, names: Collection[str], beside: Iterable[int], changed: Changed, offload: Offload | None) -> None:
        """An optimizer takes over weights, and others `beside` them, by `id`; weights that none has taken get no gradient.

        Args:
            changed: told of new subspaces.
            offload: told of these weights in place of what was until now.
        Raises:
            GraphoptError: it takes none.
        """
        if not names:
            raise GraphoptError("no parameter given to make_optimizer has a compressed gradient: make an ordinary optimizer.")
        for name, w in self.weights.items():
            if name in names:
                w.changed = changed
            w.variable.requires_grad_(w.changed is not None)
        if offload is not None:
            self.synchronize()
            self.offloads |= dict.fromkeys(names, offload)
        self._beside.update(beside)
