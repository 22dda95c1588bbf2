"""Adapters tied to their surroundings in unusual ways: no legal order changes a gradient."""

from __future__ import annotations

import pytest
import torch
from graphopt.passes import RunLora, run_pass
from graphopt.passes.runlora.rewrite import legal_orders, refusal
from graphopt.passes.runlora.sites import find_lora_sites
from torch import Tensor, nn

from graphopt.capture import capture
from graphopt.testing import compiled


class Odd(nn.Module):
    """A layer whose adapter is tied to its surroundings in an unusual way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.below = nn.Linear(6, 32)
        self.weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(32, 24)), nn.Parameter(torch.randn(24, 32))
        self.other = nn.Parameter(torch.randn(6, 32))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        raw, x = x, torch.tanh(self.below(x))
        hidden = x @ self.down
        if self.kind == "detached input":
            return (x @ self.weight + x.detach() @ self.down @ self.up).square().sum()
        if self.kind == "hidden used elsewhere":
            return (x @ self.weight + hidden @ self.up).square().sum() + hidden.abs().mean()
        if self.kind == "detached hidden":
            return (x @ self.weight + hidden.detach() @ self.up).square().sum()
        if self.kind == "one of two detached":
            rest = (x @ self.other.T @ self.other).detach()
            return (x @ self.weight + hidden @ self.up + rest).square().sum()
        if self.kind == "weight used twice":
            x = x.detach()
            return (x @ self.weight + x @ self.down @ self.up + torch.tanh(raw @ self.other) @ self.weight).square().sum()
        if self.kind == "up is the weight":
            x = x.detach()
            return (x @ self.weight + x @ self.down @ self.down.T @ self.weight).square().sum()
        if self.kind == "zero":
            return (x @ self.weight + x @ (self.down * 0.0) @ self.up).square().sum()
        if self.kind == "mean":
            stacked = torch.stack([x, 2 * x], 1)
            return (stacked @ self.weight + stacked @ self.down @ self.up).mean(1).square().sum()
        raise AssertionError(self.kind)


@pytest.mark.parametrize(
    "kind",
    ["detached input", "hidden used elsewhere", "detached hidden", "one of two detached", "weight used twice", "up is the weight",
     "zero", "mean"],
)  # fmt: skip
def test_unusual_surroundings_keep_their_gradients_in_every_order(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Odd(kind).double(), torch.randn(40, 6, dtype=torch.float64)
    model(x).backward()
    exact = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    graph = capture(model, (x,))
    layers = find_lora_sites(graph).layers
    orders = {order for layer in layers for order in legal_orders(layer)} | {None}
    for order in orders:
        names = [layer.name for layer in layers if order is None or refusal(layer, order) == ""]
        model.zero_grad()
        rewritten, _ = run_pass(RunLora(order), graph, names)
        compiled(rewritten, model, (x,), {}, "aot_eager")()[0].backward()
        for name, parameter in model.named_parameters():
            if name in exact:
                torch.testing.assert_close(parameter.grad, exact[name], msg=lambda m, n=name, o=order: f"{n}, {o}: {m}")
