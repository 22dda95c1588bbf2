"""What each rank does for `test_memory`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import graphopt
from graphopt.frontend.running import FIRST_CALLS
from tests import zoo
from tests.measure import peak_and_rest

BATCH = 8
MODELS = ("bert", "llama", "cnn")


def work(rank: int) -> dict[str, int]:
    """Bytes that a step under `mesh=` allocates at its peak, beside what exists before it."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for name in MODELS:
        torch.manual_seed(0)
        model, inputs = zoo.make(name, BATCH)
        opt = graphopt.optimize(model, inputs, passes=[], backend="aot_eager", mesh=mesh)
        optimizer = torch.optim.AdamW(opt.parameters())

        def train(opt: Any = opt, optimizer: Any = optimizer, inputs: Any = inputs) -> None:
            zoo.loss_of(zoo.call(opt, inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(FIRST_CALLS + 1):
            train()
        found[name] = peak_and_rest(train)[0]
    return found
