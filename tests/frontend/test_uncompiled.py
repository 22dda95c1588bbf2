"""Steps that Dynamo leaves to eager mode, and what goes on around compiled ones: gradients are as in eager mode all the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

import graphopt


class LossAndLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return nn.functional.cross_entropy(logits, y), logits


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def gradient(run: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the loss and the logits together."""
    run.zero_grad()
    loss, logits = run(x, y)
    (loss + logits.square().mean()).backward()
    return next(p.grad.clone() for p in run.parameters() if p.grad is not None)


def test_outputs_beside_the_loss_keep_their_gradients_where_nothing_is_compiled() -> None:
    model, x, y = LossAndLogits(), torch.randn(6, 8), torch.randint(0, 4, (6,))
    opt = graphopt.optimize(model, (x, y), backend="aot_eager")
    expected = gradient(model, x, y)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(gradient(opt, x, y), expected)
    torch.testing.assert_close(gradient(opt, x, y), expected)  # compiled


@torch._dynamo.config.patch(suppress_errors=True)
def test_new_sizes_are_compiled_where_errors_are_suppressed() -> None:
    opt = graphopt.optimize(stack(), (torch.randn(4, 8),), budget=0.7, backend="aot_eager")
    for size in (4, 4, 4, 6, 6):
        opt(torch.randn(size, 8)).sum().backward()
        assert opt.last_step is not None
    assert not opt.report.notes


def test_a_graph_break_elsewhere_is_not_held_against_a_model() -> None:
    @torch.compile(backend="eager")
    def metric(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    opt = graphopt.optimize(stack(), (torch.randn(4, 8),), budget=0.7, backend="aot_eager")
    opt(torch.randn(4, 8)).sum().backward()
    metric(torch.randn(3))
    opt(torch.randn(6, 8)).sum().backward()
    assert opt.last_step is not None
    assert not opt.last_step.broken


class Switched(nn.Module):
    """The layer before the last one goes to eager mode in the middle of training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.apart = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x))
        x = self.eager(x) if self.apart else torch.relu(self.layers[1](x))
        return self.layers[2](x).square().mean()

    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers[1](x))


def test_new_weights_of_what_runs_in_eager_mode_are_selected_or_not_as_the_old_ones() -> None:
    model, x, train = Switched(), torch.randn(4, 8), ("layers.0.weight", "layers.2.weight")
    opt = graphopt.optimize(model, (x,), passes=[GreenTrainer(train=train)], backend="aot_eager")
    for step in range(5):
        model.apart = step > 0
        model.zero_grad()
        opt(x).backward()
        assert tuple(name for name, p in model.named_parameters() if p.grad is not None) == train
        if step != 1:
            opt.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def test_a_step_that_fails_lets_its_batch_go() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1))
    good = torch.zeros(4, dtype=torch.long)
    opt = graphopt.optimize(model, (good,), backend="aot_eager")
    for _ in range(3):
        opt(good).sum().backward()
    bad = torch.full((4,), 99)
    gone = weakref.ref(bad)
    with pytest.raises(IndexError):
        opt(bad)
    del bad
    gc.collect()
    assert gone() is None


def test_inputs_that_disagree_train_where_nothing_of_the_model_can_be_planned() -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        @torch.compiler.disable
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x).mean() + self.layer(y).mean()

    model, inputs = Left(), (torch.randn(4, 5), torch.randn(3, 5))
    opt = graphopt.optimize(model, inputs, budget=0.7, backend="aot_eager")
    opt(*inputs).backward()
    assert model.layer.weight.grad is not None
    assert "nothing of the model can be planned" in str(opt.report)
