"""A small model with compressed gradients, and what trains it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from graphopt.passes import Lsp
from torch import Tensor, nn

import graphopt
from tests import zoo


def data(count: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 5, generator=generator), torch.arange(size) % 3) for _ in range(count)]


def made(dtype: torch.dtype = torch.float64, make: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = zoo.MLP(width=16).to(dtype)
    rewrite = Lsp(**{"subspace": 5, "nonzeros": 2, "criterion": "flops", **options.pop("lsp", {})})
    batch = (data(1)[0][0].to(dtype), data(1)[0][1])
    opt = graphopt.optimize(model, batch, passes=[rewrite], backend="aot_eager")
    return model, opt, opt.make_optimizer(make, **{"lr": 1e-2, **options})


def train(opt: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for x, labels in batches:
        loss = opt(x.to(next(opt.parameters()).dtype), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def compressed_reference(model: nn.Module, opt: Any, total: Any) -> dict[str, Tensor]:
    """P'GQ of eager's gradients, with the installed projectors."""
    reference = copy.deepcopy(model)
    reference.zero_grad()
    total(reference).backward()
    weights = dict(reference.named_parameters())
    return {name: w.subspace.compress(weights[name].grad) for name, w in opt.states["lsp"].weights.items()}
