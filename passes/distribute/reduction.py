"""Averaging over ranks what no graph has averaged: at the end of a backward, in the same buckets as a graph would.

So it is after `no_sync()`, where gradients have gathered on each rank, and where a step is not one graph, or the model itself
runs. The collectives are then the same as those of a graph, so that ranks on which something else runs do not part.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from graphopt.passes.distribute.rewrite import in_buckets
from graphopt.passes.state import State
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphopt.analysis.communication import Collective, communication
from graphopt.compat import fsdp, pytree
from graphopt.compat.distributed import (
    Silenced,
    active_ddp,
    backward_number,
    distributed_like,
    group_named,
    local_part,
    silence,
    store_of,
)
from graphopt.distributed.divided import is_parallel
from graphopt.distributed.ranks import lost, wait
from graphopt.errors import InputError, RankError
from graphopt.planner.plan import Plan

if TYPE_CHECKING:
    from graphopt.passes.distribute.technique import Distribute, Reduced

    from graphopt.frontend.step import RegionStep
    from graphopt.runtime.module import OptimizedModule


class Reduction(State):
    """Averages gradients after a backward.

    Attributes:
        pending: gradients have gathered that are this rank's own.
        why_after: why the last step averaged after the backward; "" if its graph did.
    """

    saved = False  # other ranks may go on from a state file, or one process

    def __init__(self, rewrite: Distribute, opt: OptimizedModule) -> None:
        self.rewrite = rewrite
        self.pending = False
        self.why_after = ""
        self._opt = opt
        self._name = opt.ranks.same(uuid.uuid4().hex, "starting to train")  # of this training, on all ranks
        self._local = self._gathers = self._in_parts = False
        self._plans = 0  # that were put in force so far: on all ranks together
        self._plan: tuple[Plan | None, Plan | None] = (None, None)
        self._step: tuple[Any, ...] = (None, None, None)
        self._outside: dict[str, Tensor] = {}
        self._sent: list[Collective] = []
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] | None = None
        self._backward = self._around = -1
        self._silenced: Silenced | None = None
        self._held: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `State`."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    def before_forward(self, plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan without collectives where gradients of other steps are to be averaged with those of this one."""
        self._gathers = self._gathers_now()
        if not (self._gathers or self.pending or self._in_parts or self._opt.captures.several_graphs):
            return plan
        if plan is not self._plan[0]:
            mine: Reduced = plan.decisions[self.rewrite.name]
            self._plan = plan, plan.decided(self.rewrite.name, replace(mine, local=True))
        assert self._plan[1] is not None
        return self._plan[1]

    def _gathers_now(self) -> bool:
        """Whether the gradients of the step under way stay this rank's own, to be averaged with those of a later one."""
        gathers = bool(self.rewrite.elsewhere) and not fsdp.reduces(self._opt._graphopt_model)
        return self._local or gathers or not self._averages_inside(active_ddp())

    def _averages_inside(self, ddp: DistributedDataParallel | None) -> bool:
        """Whether the step under way averages; a DistributedDataParallel around the model then need not, but knows when."""
        if ddp is None or ddp.process_group.size() != self.rewrite.size:
            return True
        if self._around != id(ddp):
            self._around, own = id(ddp), {id(p) for p in self._opt.parameters()}
            self._silenced = silence(ddp) if all(id(p) in own for p in ddp.module.parameters()) else None
        if self._silenced is not None:
            self._silenced.leaves = True
        return ddp.require_backward_grad_sync

    def selected(self, names: Iterable[str]) -> None:
        """See `State`: another plan is in force."""
        self._plans += 1

    def after_forward(self, step: RegionStep | None, output: Any) -> None:
        """Have gradients averaged at the end of the backward from `output`, as far as the step's graph does not do it."""
        self._in_parts = self._in_parts or (step is not None and step.broken)  # later graphs must not average: `_finish` does
        if step is None:  # perhaps without `before_forward`: see `TrainingSteps`
            self._gathers = self._gathers_now()
        if self._gathers:
            self._gather()
            _on_backward(output, self._gather)  # which may come after another's has averaged
            return
        here = (step, self._opt.plan, self.pending)
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._trained:  # on all ranks in the same step
            self._meet()
        if not all(now is before for now, before in zip(here, self._step, strict=True)):
            self.why_after = "gradients have gathered since no_sync()" if self.pending else _why_after(step, self.rewrite)
            self._outside = self._others()
            self._check(step)
            self._step, self._sent = here, []
        if self.why_after or self._outside:
            self._attach(output, bool(self.why_after))

    @property
    def collectives(self) -> Sequence[Collective]:
        """See `State`; of a step that measures nothing is told."""
        return () if self._step[0] is not None and self._step[0].plan.measures else tuple(self._sent)

    def _others(self) -> dict[str, Tensor]:
        """Trained parameters of which the plan's graph has no gradient; other batches may reach them, on one rank alone."""
        opt = self._opt
        known = {*opt.plan.decisions[self.rewrite.name].order, *self.rewrite.elsewhere}
        return {n: p for n, p in opt.named_parameters() if p.requires_grad and n not in known and opt.selects_tensor(n)}

    def _tensors(self) -> dict[str, Tensor]:
        """What the plan averages, in the agreed order: parameters, or what is stepped in their place."""
        plan, parameters = self._opt.plan, self._opt.tensors()
        others = {n: v for state in self._opt.states.values() for n, v in state.variables().items() if v.requires_grad}
        frozen = {name for name, p in parameters.items() if not p.requires_grad}
        wanted = plan.decisions[self.rewrite.name].wanted(plan.train, frozen)
        return {name: others.get(name, parameters[name]) for name in wanted}

    def _buckets(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
        sized = {name: local_part(t) for name, t in tensors.items()}
        return in_buckets([(n, (t.dtype, t.device), t.nbytes) for n, t in sized.items()], self.rewrite.bucket_bytes)

    def _meet(self) -> None:
        """Raise `RankError`, on every rank, where others train other parameters: buckets as large could be of those."""
        named = {name: p for name, p in self._opt.named_parameters() if name not in self.rewrite.elsewhere}
        trained = [name for name, p in named.items() if p.requires_grad]
        self._opt.ranks.samples.check_same(trained, "which parameters require a gradient")
        self._parameters, self._trained = list(named.values()), [p.requires_grad for p in named.values()]
        self._step = (None, None, None)  # what else is trained is to be looked for anew

    def _check(self, step: RegionStep | None) -> None:
        """Raise `RankError` where another rank sends other buckets under this plan; the first to come has said which."""
        tensors = self._tensors()
        inside = [] if step is None else [found.bytes for found in _means(step, self.rewrite.group)]
        after = self._buckets(tensors) if self.why_after else ()
        sizes = inside + [sum(local_part(tensors[name]).nbytes for name in bucket) for bucket in after]
        opt = self._opt
        trained = sorted(name for name, p in opt.named_parameters() if p.requires_grad)
        mine = repr((sizes, sorted(self._outside), _digest(list(tensors))))
        parallel = is_parallel(opt._graphopt_model)
        if parallel:  # a graph averages gradients as they lie, and this as the parameters do: no rank may mix them
            mine += f" {bool(self.why_after) and not self.pending}"
        rest = {name: decision for name, decision in opt.plan.decisions.items() if name != self.rewrite.name}
        plan = self._plans, replace(opt.plan, decisions=rest).key
        key = _digest((self._name, plan, trained, parallel and self.pending))
        store = store_of(group_named(self.rewrite.group))
        try:
            theirs = store.compare_set(f"graphopt/means/{key}", "", mine).decode()
        except RuntimeError as error:  # the process that kept the store is gone
            raise lost() from error
        if theirs != mine:
            raise RankError(
                "this rank does not average the gradients that another rank does in the same step, so that those of different "
                "tensors would be mixed. Call optimize() with the same model, arguments and versions on every rank; the notes of "
                f"opt.report say what could not be compiled here. Bytes, others and order there: {theirs}; here: {mine}."
            )

    def _gather(self) -> None:
        self.pending = True

    def _attach(self, output: Any, everything: bool) -> None:
        if not _on_backward(output, lambda: self._begin(everything)):
            raise InputError(
                "the model's output holds no tensor that can be seen, so that its backward cannot be followed by averaging "
                f"gradients ({self.why_after}). Return tensors, or tuples, lists and dicts of them."
            )

    def _begin(self, everything: bool) -> None:
        """A backward begins: set aside what earlier ones have averaged."""
        if self._backward == backward_number():
            return
        self._backward, self._sent, self._held = backward_number(), [], []
        tensors = [*(self._tensors().values() if everything else ()), *self._outside.values()]
        if not self.pending:
            for tensor in tensors:
                if tensor.grad is not None:
                    self._held.append((tensor, tensor.grad.clone()))  # DistributedDataParallel writes to views of its buckets
                    tensor.grad = None
        at_the_end = torch.autograd.Variable._execution_engine.queue_callback

        def end() -> None:  # after a DistributedDataParallel has ended its own
            at_the_end(lambda: self._finish(everything))

        weakref.finalize(end, _put_back, self._held).atexit = False  # torch lets go of it with the backward, failed or not
        at_the_end(end)

    @torch.no_grad()
    def _finish(self, everything: bool) -> None:
        if everything:
            self._average(self._tensors())
            self.pending = False
        if self._outside:
            device = next(iter(self._outside.values())).device
            there = torch.tensor([float(t.grad is not None) for t in self._outside.values()], device=device)
            wait(self._send(there))
            anywhere = zip(self._outside.items(), there.tolist(), strict=True)
            self._average({name: t for (name, t), found in anywhere if found})
        for tensor, before in self._held:
            tensor.grad = before if tensor.grad is None else before.add_(tensor.grad)
        self._held.clear()

    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the mean over ranks in the place of each gradient; one that is missing counts as zeros.

        It is there on all ranks then, as where a graph averages: where zeros were left out, ranks would part by weight decay.
        """
        sent = []
        for bucket in self._buckets(tensors):
            members = [tensors[name] for name in bucket]
            flat = torch.cat([_dense(t).reshape(-1) for t in members]).mul_(1 / self.rewrite.size)
            sent.append((members, flat, self._send(flat)))
        for members, flat, work in sent:
            wait(work)
            for tensor, mean in zip(members, flat.split([local_part(t).numel() for t in members]), strict=True):
                tensor.grad = distributed_like(mean.view(local_part(tensor).shape).clone(), tensor)

    def _send(self, tensor: Tensor) -> Any:
        self._sent.append(Collective("all_reduce", tensor.nbytes))
        return dist.all_reduce(tensor, group=group_named(self.rewrite.group), async_op=True)


def _on_backward(output: Any, begin: Callable[[], None]) -> bool:
    """Have `begin` called where a backward enters `output`, once per tensor of it; False where none can be seen."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.grad_fn is not None:
            leaf.register_hook(lambda _: begin())
    return bool(leaves)


def _digest(value: Any) -> str:
    """Of what is the same text in every process."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _put_back(held: list[tuple[Tensor, Tensor]]) -> None:
    """Gradients that a backward has set aside and not added to: it has failed."""
    for tensor, before in held:
        tensor.grad = before


def _dense(tensor: Tensor) -> Tensor:
    """The gradient of a parameter, of a DTensor this rank's part of it, divided as the parameter is."""
    part = local_part(tensor)
    if tensor.grad is None:
        return torch.zeros_like(part)
    own = local_part(distributed_like(tensor.grad, tensor))
    return own.to_dense() if own.layout != torch.strided else own


def _why_after(step: RegionStep | None, rewrite: Distribute) -> str:
    """Why a step's gradients are averaged after its backward; "" if its graph averages them all."""
    if step is None:
        return "the model itself runs"
    if rewrite.elsewhere:
        return "fully_shard averages others"
    if step.plan.measures:
        return "the step measures"
    computing = [r for r in step.regions if r.reduced or (r.graph is not None and r.graph.gradients())]
    if len(computing) != 1 or step.broken:
        return "the step is not one graph"
    return "" if _means(step, rewrite.group) else "the plan could not be carried out as it is"


def _means(step: RegionStep, group: str) -> list[Collective]:
    """The collectives of a step's graphs by which gradients are averaged: a tensor parallel model has others."""
    return [found for found in communication(*step.graphs).collectives if found.group == group]
