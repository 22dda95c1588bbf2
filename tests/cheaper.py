"""What processes of tests leave out, as it takes time and shows nothing. It is imported first."""

# ruff: noqa: E402 (nothing is imported while the collector is on)

import gc
from types import SimpleNamespace

gc.disable()  # until all is imported; looking through modules for cycles took a tenth of the time

import accelerate.utils.memory
import torch._dynamo.guards

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # flushes the processor's caches, 20 ms for each compiled frame
accelerate.utils.memory.gc = SimpleNamespace(collect=lambda: 0)  # twice for each run of a Trainer, through all that tests share


def all_imported() -> None:
    """Modules are not looked through, and graphs, of which there is always a lot, rarely."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
