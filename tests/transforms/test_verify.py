import copy

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

import graphopt
from graphopt import PassError, TorchVersionError
from graphopt.capture import capture
from graphopt.compat import require_supported_torch
from graphopt.specialise import specialise
from graphopt.transforms.verify import verify
from tests import zoo
from tests.messages import warnings_of


def mlp_graph():  # type: ignore[no-untyped-def]
    model, inputs = zoo.make("mlp", 4)
    return capture(model, inputs).clone()


def test_a_captured_graph_is_consistent() -> None:
    for name in ("mlp", "bert", "cnn"):
        model, inputs = zoo.make(name, 4)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        verify(capture(model, args, kwargs))


def test_a_wrong_recorded_shape_is_found() -> None:
    graph = mlp_graph()
    node = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.relu.default)
    node.meta["val"] = node.meta["val"].t()
    with pytest.raises(PassError, match="relu"):
        verify(graph)


def test_a_node_that_cannot_run_is_found() -> None:
    graph = mlp_graph()
    node = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.addmm.default)
    node.args = (node.args[0], node.args[2], node.args[1])
    with pytest.raises(PassError, match="cannot run"):
        verify(graph)


@pytest.mark.parametrize("fault", ["shape", "argument", "operator"])
def test_what_is_wrong_is_found_beside_what_was_checked_before(fault: str) -> None:
    before = mlp_graph()
    graph = before.clone()
    verify(graph, before)
    relu = next(n for n in graph.graph.nodes if n.target is torch.ops.aten.relu.default)
    if fault == "shape":
        relu.meta["val"] = relu.meta["val"].t()
    elif fault == "argument":
        relu.args = (next(n for n in graph.placeholders if n.meta["val"].dim() == 1),)
    else:
        relu.target = torch.ops.aten.sum.default
    with pytest.raises(PassError, match="relu"):
        verify(graph, before)


class Queue(nn.Module):
    """Features of earlier batches, written where a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.key = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(8, 4).requires_grad_(False)
        self.register_buffer("queue", torch.randn(4, 24))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.second(torch.relu(self.first(x))) @ self.queue.clone()
        with torch.no_grad():
            place = int(self.place)
            self.queue[:, place : place + len(x)] = self.key(x).t()
            self.place[0] = (place + len(x)) % 24
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


def test_numbers_that_are_read_off_tensors() -> None:
    """Reports and limits on memory failed: they are unknown where tensors have no memory."""
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    peak = graphopt.analyze(Queue(), (x,), backend="aot_eager").memory.peak_bytes
    for budget in (graphopt.Budget(flops=0.8), graphopt.Budget(memory=int(0.98 * peak))):
        model = Queue()
        eager = copy.deepcopy(model)
        opt = graphopt.optimize(model, (x,), budget=budget, backend="aot_eager")
        assert "trained" in str(opt.report)
        opt(x).backward()
        eager(x).backward()
        for name, p in eager.named_parameters():
            if name in opt.selected:
                torch.testing.assert_close(model.get_parameter(name).grad, p.grad)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))


class Loop(nn.Module):
    """Features that a loop of the graph makes, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            _, x = while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, h * 0.5 + 0.1), (torch.tensor(0), x))
        return nn.functional.cross_entropy(self.layers(x), labels)


@pytest.mark.parametrize("limit", ["flops", "memory"])
def test_a_loop_in_the_graph_is_rewritten_with_the_rest(limit: str) -> None:
    """Nothing around it was rewritten, and the budget was exceeded with a warning: torch traces loops with sizes that vary."""
    torch.manual_seed(0)
    model, batch = Loop(), (torch.randn(6, 8), torch.randint(0, 3, (6,)))
    eager, peak = copy.deepcopy(model), graphopt.analyze(model, batch, backend="aot_eager").memory.peak_bytes
    budget = graphopt.Budget(flops=0.7) if limit == "flops" else graphopt.Budget(memory=int(0.95 * peak))
    with warnings_of() as warned:
        opt = graphopt.optimize(model, batch, budget, backend="aot_eager")
        opt(*batch).backward()
    assert not warned
    assert opt.last_step is not None
    eager(*batch).backward()
    for name, p in eager.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad if name in opt.selected else None)


def test_specialised_graphs_are_static_and_have_the_batch() -> None:
    static = specialise(mlp_graph(), 7)
    assert not static.symbolic
    verify(static)
    inputs = [n.meta["val"] for d, n in zip(static.inputs, static.placeholders, strict=True) if d.kind == "input"]
    assert [tuple(v.shape) for v in inputs] == [(7, 5), (7,)]
    with pytest.raises(PassError, match="not valid for a batch of 1"):
        specialise(mlp_graph(), 1)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "2.14.0", "3.0.0"])
def test_torch_outside_the_supported_range_is_refused(version: str) -> None:
    with pytest.raises(TorchVersionError, match="pip install"):
        require_supported_torch(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_supported_versions(version: str) -> None:
    require_supported_torch(version)
