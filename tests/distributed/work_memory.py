"""What each rank does for `test_memory`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import graphopt
from graphopt.distributed.predicted import block_of
from graphopt.frontend.running import FIRST_CALLS
from tests import zoo
from tests.measure import peak_and_rest

BATCH, STEPS = 8, 6
AVERAGED = ("gpt2", "cnn")
SHARDED = ("gpt2", "llama")
FROZEN = "bert.encoder.layer.0"


def half_frozen() -> tuple[nn.Module, Any]:
    """A model whose first block is not trained, nor anything before it."""
    model, inputs = zoo.make("bert", BATCH)
    for part in ("bert.embeddings", FROZEN):
        model.get_submodule(part).requires_grad_(False)
    return model, inputs


def work(rank: int) -> dict[tuple[str, str], int]:
    """Bytes at the peak of a step under `mesh=`, and of models that `fully_shard` was applied to."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name in AVERAGED:
        found["averaged", name] = measured(*zoo.make(name, BATCH), mesh=mesh)
    for name in (*SHARDED, FROZEN):
        model, inputs = half_frozen() if name == FROZEN else zoo.make(name, BATCH)
        for block in {block_of(own): None for own, _ in model.named_parameters() if block_of(own)}:
            fully_shard(model.get_submodule(block), mesh=mesh)
        fully_shard(model, mesh=mesh)
        found["sharded", name] = measured(model, inputs)
    return found


def measured(model: nn.Module, inputs: Any, **options: Any) -> int:
    """What a step allocates at its peak, and what exists before it; of several steps the least.

    gloo frees its copies in a thread of its own, at times only when more is there than has to be.
    """
    return peak_of_steps(graphopt.optimize(model, inputs, passes=[], backend="aot_eager", **options), inputs)


def peak_of_steps(opt: Any, inputs: Any) -> int:
    """See `measured`."""
    optimizer = torch.optim.AdamW(opt.parameters())

    def train() -> None:
        zoo.loss_of(zoo.call(opt, inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(FIRST_CALLS + 1):
        train()
    states = [value for state in optimizer.state.values() for value in state.values()]
    given = [t for t in (inputs.values() if isinstance(inputs, dict) else inputs) if t is not None]
    return min(peak_and_rest(train)[0] for _ in range(STEPS)) + sum(
        map(own_bytes, (*opt.parameters(), *opt.buffers(), *states, *given))
    )


def own_bytes(tensor: Tensor) -> int:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes
