"""Recurrent layers: compiled step by step, or left to eager mode where that is not worth it."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions

import graphopt
from graphopt.compat import recurrent
from graphopt.frontend import planning_graph
from tests.messages import warnings_of


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)[0].sum(1)
        torch._dynamo.graph_break()
        return self.head(hidden).square().mean()


def test_many_steps_of_a_recurrent_layer_are_told_of_and_can_be_left_to_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "MANY_STEPS", 7)
    recurrent.warn_of_many_steps.cache_clear()
    torch.manual_seed(0)
    model, other = Recurrent(), Recurrent()
    x = torch.randn(4, 7, 8)
    with warnings_of() as texts:
        graphopt.optimize(model, (x[:, :6],), backend="aot_eager")
        assert not texts
        for _ in range(2):
            graphopt.optimize(model, (x,), backend="aot_eager")
    assert len(texts) == 1
    assert "7 times its cell" in texts[0]
    other.layer.forward = types.MethodType(torch.compiler.disable(type(other.layer).forward), other.layer)
    recurrent.warn_of_many_steps.cache_clear()
    with warnings_of() as texts:
        opt = graphopt.optimize(other, (x,), backend="aot_eager", verify=True)
        assert all(p.grad is None for p in other.parameters())
        opt(x).backward()
    assert not [text for text in texts if "step by step" in text]
    ours = {n: p.grad.clone() for n, p in other.named_parameters() if p.grad is not None}
    other.zero_grad()
    other(x).backward()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_torch_compile_of_a_recurrent_model_keeps_no_other_of_its_class_from_being_planned(compiled_first: bool) -> None:
    def compile_another() -> None:
        torch.compile(Recurrent(), backend="aot_eager")(x).backward()

    torch._dynamo.reset()
    x = torch.randn(4, 6, 8)
    if compiled_first:
        compile_another()
    opt = graphopt.optimize(Recurrent(), (x,), budget=0.7, backend="aot_eager")
    if not compiled_first:
        compile_another()
    opt(x).backward()
    assert opt.last_step is not None
    assert opt.report.flops_ratio <= 0.7
    assert not opt.report.notes


class Tagged(nn.Module):
    """A layer before and after a recurrent one."""

    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, 8), kind(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens))[0].sum(1)).square().mean()


def tokens(length: int) -> Tensor:
    return torch.randint(0, 11, (4, length))


def assert_gradients_of_eager(opt: Any, model: nn.Module, batch: Tensor) -> None:
    """And every parameter has one."""
    model.zero_grad()
    opt(batch).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    model(batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad)


def cells(opt: Any) -> int:
    """Products in the graphs of the last step."""
    return sum(node.target is torch.ops.aten.mm.default for graph in opt.last_step.graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_long_layer_is_left_to_eager_mode_where_nothing_is_limited(kind: Any) -> None:
    torch.manual_seed(0)
    model = Tagged(kind)
    opt = graphopt.optimize(model, (tokens(recurrent.LONG),), backend="aot_eager", verify=True)
    for length in (recurrent.LONG, 40, 30):
        assert_gradients_of_eager(opt, model, tokens(length))
        assert cells(opt) < 10
    assert any("layer.weight_ih_l0" in note for note in opt.report.notes)


@pytest.mark.parametrize("options", [{"budget": 0.5}, {"fullgraph": True}])
def test_a_long_layer_is_compiled_where_a_limit_is_kept_or_one_graph_asked_for(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Tagged()
    opt = graphopt.optimize(model, (tokens(recurrent.LONG),), backend="aot_eager", **options)
    opt(tokens(recurrent.LONG)).backward()
    assert opt.report.flops_ratio <= options.get("budget", 1.0)
    assert cells(opt) > recurrent.LONG
    assert not opt.report.notes


def test_each_further_length_compiles_no_further_layer() -> None:
    torch.manual_seed(0)
    model = Tagged()
    opt = graphopt.optimize(model, (tokens(5),), backend="aot_eager")
    compilations = []
    for length in (5, 6, 7, 9, 8, 11, 4):
        assert_gradients_of_eager(opt, model, tokens(length))
        compilations.append(opt.report.compilations)
    assert compilations[0] == 1
    assert compilations[3:] == [compilations[3]] * 4


def test_threads_that_plan_at_once_keep_to_their_own_rule_and_leave_torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    before, planned, tokens_of_both = decompositions._rnn_helper, {}, tokens(recurrent.LONG)
    whole_plans, parts_plan = threading.Event(), threading.Event()
    rule = planning_graph.left_to_eager_mode

    @contextlib.contextmanager
    def meeting(long: bool) -> Iterator[None]:
        with rule(long):
            (parts_plan if long else whole_plans).set()
            if not long:
                parts_plan.wait(1)  # the other has to wait until this has ended
            yield

    def plan(name: str, **options: Any) -> None:
        planned[name] = graphopt.optimize(Tagged(nn.GRU), (tokens_of_both,), backend="aot_eager", **options)

    monkeypatch.setattr(planning_graph, "left_to_eager_mode", meeting)
    whole = threading.Thread(target=plan, args=("whole",), kwargs={"fullgraph": True})
    parts = threading.Thread(target=plan, args=("parts",))
    whole.start()
    assert whole_plans.wait(60)
    parts.start()
    for thread in (whole, parts):
        thread.join()
    assert decompositions._rnn_helper is before
    assert planned["parts"].report.notes
    assert not planned["whole"].report.notes


def test_a_model_that_is_a_long_recurrent_layer_is_told_how_it_would_be_compiled() -> None:
    with warnings_of() as texts:
        opt = graphopt.optimize(
            nn.GRU(8, 4, batch_first=True), (torch.randn(2, 30, 8),), backend="aot_eager", loss=lambda out: out[0].square().mean()
        )
    assert any("or pass a budget or fullgraph=True" in text for text in texts)
    opt(torch.randn(2, 30, 8))[0].square().mean().backward()
    assert all(p.grad is not None for p in opt.parameters())
