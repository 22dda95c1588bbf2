"""DistributedDataParallel around an optimised module: whether its options fit what is trained.

It expects a gradient of every parameter, or to be told that some have none. Otherwise it fails in the second step with an error
about its own internals, or gives tensors that are not trained a gradient of zeros, which an optimizer with momentum or weight
decay moves them by.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from graphopt.compat.distributed import active_ddp
from graphopt.errors import InputError
from graphopt.passes.base import Preserves

if TYPE_CHECKING:
    from graphopt.runtime.module import OptimizedModule


class Wrapping:
    """Looks at the DistributedDataParallel that calls a model, again whenever it or the plan changes."""

    def __init__(self) -> None:
        self._seen: tuple[Any, Any] = (None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Wrapping, ()

    def check(self, opt: OptimizedModule) -> None:
        """Raise `InputError` if the DistributedDataParallel in whose forward this is called cannot train as `opt` does."""
        ddp = active_ddp()
        if ddp is None or (self._seen[0] is not None and self._seen[0]() is ddp and self._seen[1] is opt.plan):
            return
        if all(p.preserves is Preserves.EXACT for p in opt.plan.passes) and not opt.selects:
            return
        self._check_group(ddp, opt)
        if opt.selects:
            self._check_unused(ddp, opt)
        self._seen = weakref.ref(ddp), opt.plan

    @staticmethod
    def _check_group(ddp: DistributedDataParallel, opt: OptimizedModule) -> None:
        size = dist.get_world_size(ddp.process_group)
        if size != opt.ranks.size:
            raise InputError(
                f"DistributedDataParallel trains on {size} ranks, and optimize() made a plan for {opt.ranks.size}: they could "
                "train different tensors. Call torch.distributed.init_process_group() first, and optimize(group=...) with the "
                "group that DistributedDataParallel has."
            )

    @staticmethod
    def _check_unused(ddp: DistributedDataParallel, opt: OptimizedModule) -> None:
        names = [name for name, p in opt.named_parameters() if p.requires_grad]
        ignored = {id(p) for name, p in ddp.module.named_parameters() if name in ddp.parameters_to_ignore}
        own = dict(opt.named_parameters())
        lost = next((name for name in names if opt.selects_tensor(name) and id(own[name]) in ignored), None)
        if lost is not None:
            raise InputError(
                f"{lost} is trained now, and DistributedDataParallel was told to ignore it: every rank would step it by its own "
                "gradient. Make a new DistributedDataParallel around the model."
            )
        cut = [name for name in names if not opt.selects_tensor(name) and id(own[name]) not in ignored]
        if cut and (ddp.static_graph or not ddp.find_unused_parameters):
            raise InputError(
                f"{len(cut)} tensors are not trained (the first is {cut[0]}), of which DistributedDataParallel has to be told: "
                "DistributedDataParallel(opt, find_unused_parameters=True), without static_graph; in accelerate "
                "DistributedDataParallelKwargs(find_unused_parameters=True), in the Trainer ddp_find_unused_parameters=True."
            )
