"""Random operators that a backward repeats, and effects, under a FLOP counter. torch's own ends such a graph with a TypeError."""

from __future__ import annotations

import functools
from typing import Any

from torch._C import DispatchKey
from torch._higher_order_ops.effects import with_effects
from torch._prims.rng_prims import graphsafe_run_with_rng_state, run_and_save_rng_state, run_with_rng_state
from torch.utils import flop_counter


@functools.cache
def count_repeated_draws() -> None:
    """Let `FlopCounterMode` look into the operators by which a recomputed dropout draws the same numbers, or with effects."""
    counter = getattr(flop_counter, "_FlopCounterMode", None)
    if counter is None:
        return
    for operator in (run_and_save_rng_state, run_with_rng_state, graphsafe_run_with_rng_state):
        if counter not in operator.python_key_table:
            operator.py_impl(counter)(functools.partial(_counted, operator, DispatchKey.BackendSelect))
    if counter not in with_effects.python_key_table:
        with_effects.py_impl(counter)(functools.partial(_counted, with_effects, DispatchKey.CompositeExplicitAutograd))


def _counted(operator: Any, kernel: DispatchKey, mode: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return operator.py_kernels[kernel](*args, **kwargs)
