"""Adapters tied to their surroundings in unusual ways: no legal order changes a gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphopt.passes import RunLora, run_pass
from graphopt.passes.runlora.rewrite import legal_orders, refusal
from graphopt.passes.runlora.sites import find_lora_sites
from torch import Tensor, nn

import graphopt
from graphopt.capture import capture
from graphopt.testing import check_pass, compiled


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


class Repeated(nn.Module):
    """One layer with its adapter, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(32, 4) / 6), nn.Parameter(torch.randn(4, 32) / 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x @ self.weight + x @ self.down @ self.up)
        return x.square().mean()


@pytest.mark.parametrize("turned", [lambda w: w.transpose(0, 1), lambda w: w.mT, lambda w: w.permute(1, 0)])
def test_weights_are_found_however_the_model_transposes_them(turned: Callable[[Tensor], Tensor]) -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 6), requires_grad=False)
            self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(32, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ turned(self.weight) + 2 * (x @ turned(self.down) @ turned(self.up))).square().sum()

    model, x = Turned(), torch.randn(64, 6)
    (layer,) = find_lora_sites(capture(model, (x,), {})).layers
    assert (layer.name, layer.unmergeable) == ("weight", "")
    for order in ("forward2+backward5", "forward1+backward3"):
        check_pass(RunLora(order), model, (x,), ["weight"])


def test_a_layer_that_is_used_several_times_is_reordered_each_time() -> None:
    model, x = Repeated(), torch.randn(64, 32)
    names = [layer.name for layer in find_lora_sites(capture(model, (x,), {})).layers]
    assert names == ["weight", "weight #2", "weight #3", "weight #4"]
    check_pass(RunLora("forward2+backward5"), model, (x,), names)
    opt = graphopt.optimize(model, (x,), passes=[RunLora("forward2+backward5")], backend="aot_eager")
    opt(x).backward()
    assert opt.last_step is not None
    assert set(opt.last_step.reports[0].changes.changed) == set(names)


class Adapted(nn.Module):
    """A layer with two adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).requires_grad_(False)
        self.first = nn.ParameterList([torch.randn(2, 6) / 3, torch.randn(6, 2) / 3])
        self.second = nn.ParameterList([torch.randn(2, 6) / 3, torch.randn(6, 2) / 3])

    def forward(self, x: Tensor) -> Tensor:
        added = [nn.functional.linear(nn.functional.linear(x, a), b) for a, b in (self.first, self.second)]
        return torch.tanh(self.layer(x) + 2 * added[0] + added[1] / 2)


def test_two_adapters_of_a_layer_train_with_batches_of_other_shapes() -> None:
    """The rows of a product are then a symbol of the compiled step, which one operator of the rewrite is given."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted(), nn.Linear(6, 3)).double()
    batches = [torch.randn(n, length, 6, dtype=torch.float64) for n, length in ((8, 40), (2, 3), (4, 7))]
    opt = graphopt.optimize(model, (batches[0],), loss=lambda y: y.square().sum(), backend="aot_eager")
    for x in batches:
        found = []
        for step in (opt, model):
            model.zero_grad(set_to_none=True)
            step(x).square().sum().backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        torch.testing.assert_close(*found)


def test_under_a_limit_on_memory_orders_are_chosen_for_other_lengths_too(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), Adapted(), nn.Linear(6, 3))
    batches = [torch.randn(n, length, 6) for n, length in ((8, 40), (5, 20), (4, 7))]
    peak = graphopt.analyze(model, (batches[0],), loss=lambda y: y.square().sum(), backend="aot_eager").memory.peak_bytes
    budget = graphopt.Budget(memory=2 * peak)
    opt = graphopt.optimize(model, (batches[0],), budget, loss=lambda y: y.square().sum(), backend="aot_eager")
    for x in batches:
        opt(x).square().sum().backward()
        assert opt.last_step is not None
        assert any(report.name == "runlora" and report.changes.changed for report in opt.last_step.reports)
    assert not [str(w.message) for w in recwarn if "graphopt" in str(w.message) or "rewritten" in str(w.message)]


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
