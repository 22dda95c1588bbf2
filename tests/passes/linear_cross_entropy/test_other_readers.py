"""Logits that more than the loss reads: auxiliary losses, penalties, teachers. Some of their tokens have no label."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from graphopt.passes import LinearCrossEntropy, run_pass
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from graphopt.capture import capture
from graphopt.ops.by_tokens import Program
from tests.passes.linear_cross_entropy.test_technique import LanguageModel, batch, checked

READ: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda logits, labels, teacher: logits.mean(),
    "square": lambda logits, labels, teacher: logits.square().mean(),
    "z-loss": lambda logits, labels, teacher: logits.logsumexp(-1).square().mean(),
    "sums of tokens": lambda logits, labels, teacher: logits.sum(-1).mean(),
    "one word": lambda logits, labels, teacher: logits[:, 0].mean(),
    "one word's probability": lambda logits, labels, teacher: F.log_softmax(logits, -1)[:, 0].mean(),
    "all probabilities": lambda logits, labels, teacher: F.log_softmax(logits, -1).mean(),
    "teacher": lambda logits, labels, teacher: F.kl_div(F.log_softmax(logits, -1), teacher.softmax(-1), reduction="batchmean"),
    "hidden by its own labels": lambda logits, labels, teacher: logits.square().sum(-1).masked_fill(labels == -100, 0).mean(),
    "hidden by other labels": lambda logits, labels, teacher: logits.square().sum(-1).masked_fill(labels == 5, 0).mean(),
    "other labels": lambda logits, labels, teacher: F.cross_entropy(logits, labels.roll(1)),
}


class Auxiliary(LanguageModel):
    def __init__(self, read: str) -> None:
        super().__init__()
        self.read, self.teacher = READ[read], nn.Linear(8, 40)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden, labels = torch.tanh(self.layer(self.embed(ids))).flatten(0, 1), labels.flatten()
        logits = self.head(hidden)
        return F.cross_entropy(logits, labels) + self.read(logits, labels, self.teacher(hidden).detach())


class Twice(LanguageModel):
    """Predicts two tokens by one head, the second from half of the batch."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(ids)))
        first = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return first + F.cross_entropy(self.head(hidden.sin())[:, ::2].flatten(0, 1), labels[:, ::2].flatten())


def test_losses_of_one_weight_are_divided_each_by_its_own_tokens() -> None:
    check = checked(Twice(), batch())
    assert check.report.changes.changed == ("head.weight", "head.weight #2")
    opt = graphopt.optimize(Twice(), batch(), passes=[LinearCrossEntropy(3)], backend="aot_eager")
    assert dict(opt.plan.passes[0].decide(opt.plan, opt.graph, opt.graph)[0]) == {"head.weight": 10, "head.weight #2": 5}


class Divided(LanguageModel):
    """Divides by the number of tokens, which is no size there."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.layer(self.embed(ids)))).flatten(0, 1)
        return F.cross_entropy(logits / logits.shape[0], labels.flatten())


def test_a_number_of_tokens_to_calculate_with_is_that_of_the_whole_batch() -> None:
    model, inputs = Divided().double(), batch()
    opt = graphopt.optimize(model, inputs, passes=[LinearCrossEntropy(3)], backend="aot_eager")
    for rows in (len(inputs[0]), 7, 5):
        part = [torch.cat([t, t])[:rows] for t in inputs]
        torch.testing.assert_close(opt(*part), model(*part))
        found, expected = (torch.autograd.grad(run(*part), list(model.parameters())) for run in (opt, model))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("read", READ)
def test_another_loss_of_the_same_logits(read: str) -> None:
    torch.manual_seed(0)
    model = Auxiliary(read).double()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, batch(), passes=[LinearCrossEntropy(4)], backend="aot_eager")
    for ignored in (0, 4):
        losses = []
        for run in (opt, eager):
            run.zero_grad()
            losses.append(run(*batch(ignored=ignored)))
            losses[-1].backward()
        torch.testing.assert_close(*losses)
        for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)
    assert opt.last_step is not None
    assert opt.last_step.reports[0].changes.changed == ("head.weight",)
    assert opt.counters.compilations == 1


@pytest.mark.parametrize("form", ["mean", "sum", "smoothed", "weighted smoothed sum", "soft capped", "shifted", "returned"])
def test_ignored_tokens_are_left_out_where_only_the_loss_reads_logits(form: str) -> None:
    rewritten, _ = run_pass(LinearCrossEntropy(4), capture(LanguageModel(form), batch(), symbolic=False), ["head.weight"])
    (node,) = rewritten.graph.find_nodes(op="call_function", target=torch.ops.graphopt.by_tokens.default)
    assert Program.of(node.args[0]).ignored == -100


def test_logits_that_are_returned_stay_as_they_are() -> None:
    """Where every token has a label, too: nothing is left out then, and rows were not copied."""
    model = LanguageModel("returned").double()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, batch(), passes=[LinearCrossEntropy(4)], backend="aot_eager")
    for ignored in (0, 4):
        torch.testing.assert_close(opt(*batch(ignored=ignored)), eager(*batch(ignored=ignored)))
    assert opt.last_step is not None
    assert opt.last_step.reports[0].changes.changed == ("head.weight",)


DRAWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weights of tokens": lambda logits, labels: (
        F.cross_entropy(logits, labels, reduction="none") * torch.rand(len(labels), dtype=logits.dtype)
    ).mean(),
    "a weight of the loss": lambda logits, labels: F.cross_entropy(logits, labels) * torch.rand((), dtype=logits.dtype),
    "dropout of logits": lambda logits, labels: F.cross_entropy(F.dropout(logits, 0.3), labels),
}


class Computing(LanguageModel):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(ids))).flatten(0, 1)
        return self.compute(self.head(hidden), labels.flatten())


@pytest.mark.parametrize("name", DRAWN)
def test_what_draws_random_numbers_is_left_whole(name: str) -> None:
    """Drawn once more, or chunk after chunk, they would be others than those of the loss, or of eager mode."""
    torch.manual_seed(0)
    model, inputs = Computing(DRAWN[name]).double(), batch()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, passes=[LinearCrossEntropy(4)], backend="aot_eager")
    losses = []
    for run in (opt, eager):
        torch.manual_seed(1)
        losses.append(run(*inputs))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    assert opt.last_step is not None
    assert opt.last_step.reports[0].changes.left_alone == {"head.weight": "random numbers are drawn in it"}
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_weights_of_samples_that_are_constants_of_forward() -> None:
    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels, reduction="none").view(3, -1)
        return (loss * torch.tensor([0.1, 0.5, 0.9], dtype=logits.dtype)[:, None]).mean()

    model, inputs = Computing(weighted), batch()
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, passes=[LinearCrossEntropy(4)], backend="aot_eager")
    for run in (opt, eager):
        run(*inputs).backward()
    assert opt.last_step is not None
    assert opt.last_step.reports[0].changes.changed == ("head.weight",)
    for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
