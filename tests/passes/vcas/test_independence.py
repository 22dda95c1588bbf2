"""Samples that are mixed are found, whatever the example batch and the weights happen to be; others are not accused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphopt.passes import Vcas
from graphopt.passes.vcas.independence import why_not_separable
from torch import Tensor, nn

import graphopt
from graphopt import PassError
from graphopt.calls import as_call, flatten_call
from graphopt.capture import capture_to_run
from tests import zoo
from tests.long_forms import long

Mix = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Residual blocks, and something between them."""

    def __init__(self, mix: Mix | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.gate = nn.Parameter(torch.zeros(()))
        self.mix = mix

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        for i, block in enumerate(self.blocks):
            hidden = hidden + block(hidden)
            if i == 1 and self.mix is not None:
                hidden = self.mix(self, hidden)
        losses = nn.functional.cross_entropy(self.last(hidden), y, reduction="none")
        return losses.mean() if weights is None else (losses * weights).sum()


def roll(_: Net, hidden: Tensor) -> Tensor:
    return hidden + hidden.roll(1, 0)


def gated(net: Net, hidden: Tensor) -> Tensor:
    return hidden + net.gate * hidden.roll(1, 0)


def reason(model: nn.Module, inputs: Any) -> str:
    args, kwargs = as_call(inputs)
    graph = capture_to_run(model, args, kwargs)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return why_not_separable(graph, tensors, flatten_call(args, kwargs).tensors)


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(size, 5), torch.arange(size) % 3


@pytest.mark.parametrize("size", [2, 3, 8, *long(5, 11)])
def test_independent_samples_are_not_accused(size: int) -> None:
    assert reason(Net(), batch(size)) == ""


@pytest.mark.parametrize("name", ["bert", "llama", *long("t5-tied", "vit", "gpt2", "lora")])
def test_models_are_not_accused(name: str) -> None:
    dtype, options = torch.float64 if name == "llama" else torch.float32, {"layers": 1} if name == "bert" else {}
    assert reason(*zoo.make(name, 6, dtype, dropout=True, **options)) == ""


def test_samples_that_are_not_together_are_refused() -> None:
    """A recurrent layer flattens (time, batch): its rows are sorted by time."""
    assert "not together" in reason(*zoo.make("lstm", 6))


def test_autocast_is_no_reason() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert reason(Net(), batch()) == ""


@pytest.mark.parametrize(
    ("mix", "rows"),
    [(roll, "random"), (gated, "random"), (gated, "equal"), (gated, "weightless"), *long((roll, "equal"), (roll, "weightless"))],
)
def test_an_operator_that_is_not_separable_is_found_in_any_batch(mix: Mix, rows: str) -> None:
    x, y = batch()
    inputs: tuple[Tensor, ...] = (x, y)
    if rows == "equal":
        inputs = (torch.ones(8, 5), torch.zeros(8, dtype=torch.int64))
    elif rows == "weightless":
        inputs = (x, y, torch.zeros(8))
    assert "not linear and separable" in reason(Net(mix), inputs) or "do not add up" in reason(Net(mix), inputs)


class Clipped(torch.autograd.Function):
    """Clips each entry of the gradient: samples stay apart, but twice the gradient is not twice the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.5, 0.5)


@pytest.mark.parametrize("size", [2, 8])
def test_a_gradient_that_is_clipped_on_the_way_is_not_scaled(size: int) -> None:
    assert "clamp" in reason(Net(lambda _, hidden: Clipped.apply(hidden)), batch(size))


def test_what_only_an_inputs_gradient_shows_not_to_be_separable_is_found() -> None:
    class Above(Net):
        def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
            return super().forward(x + x.roll(1, 0), y, weights)

    x, y = batch()
    assert reason(Above(), (x.requires_grad_(), y))


def test_embeddings_scaled_by_frequency_are_refused() -> None:
    model = nn.Sequential(
        nn.Embedding(40, 5, scale_grad_by_freq=True), nn.Linear(5, 5), nn.GELU(), nn.Linear(5, 1), nn.Flatten(0)
    )
    assert "embedding_dense_backward" in reason(model, (torch.arange(8),))


def test_instance_norm_is_no_batch_norm() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    assert reason(Images(), (torch.randn(6, 3, 8, 8),)) == ""


@pytest.mark.parametrize(
    "mix",
    [lambda _, h: h + h.sort(0).values, lambda _, h: h + h.cumsum(0), lambda _, h: h + (h @ h.T).softmax(-1) @ h],
    ids=["sort", "cumsum", "attention over the batch"],
)
def test_what_cannot_be_tried_is_a_reason_and_no_crash(mix: Mix) -> None:
    found = reason(Net(mix), batch())
    assert found
    assert "\n" not in found


def test_a_model_of_logits_alone_is_sampled() -> None:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.GELU())])
    x = torch.randn(7, 6)
    opt = graphopt.optimize(model, (x,), passes=[Vcas(keep_rows=0.5, keep_tokens=0.5)], backend="aot_eager")
    opt(x).square().sum().backward()
    assert opt.report.step_flops < opt.report.full_step_flops


def test_an_output_beside_the_loss_does_not_stop_sampling() -> None:
    class Two(Net):
        def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Any:
            left, right = self.blocks[0](self.first(x)).chunk(2, -1)
            return nn.functional.cross_entropy(left, y), right

    assert reason(Two(), batch()) == ""


def test_the_verdict_is_renewed_when_the_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.norm(self.first(x)))).square().mean()

    torch.manual_seed(0)
    model, x = Images(), torch.randn(8, 3, 8, 8)
    model.norm.eval()
    opt = graphopt.optimize(model, (x,), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    opt(x).backward()
    assert opt.report.step_flops < opt.report.full_step_flops
    model.norm.train()
    model.zero_grad()
    warnings: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("graphopt.runtime.fallback"), "warning", lambda text, *args: warnings.append(text % args)
    )
    opt(x).backward()
    assert len(warnings) == 1
    assert "batch_norm" in warnings[0]
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).backward()
    for a, b in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad)


def test_an_example_of_one_sample_is_refused_with_what_to_do() -> None:
    x, y = batch()
    with pytest.raises(PassError, match="a batch of 1. Pass an example of at least 2 samples"):
        graphopt.optimize(Net(), (x[:1], y[:1]), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")


def test_passes_that_do_not_go_together_are_refused() -> None:
    model, inputs = Net(), batch()
    with pytest.raises(PassError, match="more than once"):
        graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5), Vcas(keep_rows=0.5)])
    with pytest.raises(graphopt.BudgetError, match="fixed ratios"):
        graphopt.optimize(model, inputs, budget=graphopt.Budget(variance=0.1), passes=[Vcas(keep_rows=0.5)])
    with pytest.raises(PassError, match="keep_rows or keep_tokens"):
        graphopt.optimize(model, inputs, passes=[Vcas()])


def test_half_precision_does_not_overflow_where_eager_does_not() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            return (self.layers(x).float().square().mean((1, 2)) * weights).sum()

    torch.manual_seed(0)
    model, x, weights = Wide().half(), (torch.randn(8, 64, 16) * 20).half(), torch.ones(8)
    weights[4:] = 1e-3
    opt = graphopt.optimize(model, (x, weights), passes=[Vcas(keep_tokens=0.2)], backend="aot_eager")
    for _ in range(60):
        model.zero_grad()
        opt(x, weights).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
