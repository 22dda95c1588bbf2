"""The default backend, end to end: Inductor's kernels, dropout in the graph, a few optimizer steps."""

import subprocess
import sys

import pytest
import torch
from graphopt.passes import Recompute
from torch import nn

import graphopt
from graphopt.analysis.flop_formulas import node_flops
from tests import zoo
from tests.long_forms import long


@pytest.mark.parametrize("name", ["cnn", *long("mlp", "bert", "t5-tied")])
def test_compiled_training_follows_eager_training_of_the_same_tensors(name: str) -> None:
    model, inputs = zoo.make(name, 4)
    opt = graphopt.optimize(zoo.in_one_block(model), inputs, budget=0.6)
    reference = zoo.in_one_block(zoo.make(name, 4)[0])
    for parameter_name, parameter in reference.named_parameters():
        parameter.requires_grad_(parameter_name in opt.selected)
    losses = []
    for module in (opt, reference):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
        for _ in range(3):
            loss = zoo.loss_of(zoo.call(module, inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-3)
    flops = opt.flops
    step = opt.last_step
    assert step is not None
    compiled = sum(node_flops(node) for halves in step.halves for graph in halves for node in graph.graph.nodes)
    assert compiled <= flops.forward + flops.cost(opt.selected)


def test_dropout_is_drawn_anew_and_a_seed_reproduces_a_run() -> None:
    losses, x = [], torch.randn(4, 6)
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 1), nn.Flatten(0))
        opt = graphopt.optimize(model, (x,), budget=0.9)
        torch.manual_seed(3)
        losses.append([opt(x).square().sum().item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


FRESH = """
import torch, graphopt
from tests import zoo
model, inputs = zoo.make("cnn", 4)
zoo.loss_of(zoo.call(graphopt.optimize(model, inputs), inputs)).backward()
print(sum(p.grad is not None for p in model.parameters()))
"""


def test_pooling_compiles_in_a_process_that_has_not_used_inductor_yet() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 0


@pytest.mark.parametrize("name", ["mlp", *long("bert")])
def test_a_sampled_backward_is_the_same_with_and_without_fusion(name: str) -> None:
    gradients = []
    for backend in ("inductor", "aot_eager"):
        model, inputs = zoo.make(name, 8)  # a boundary is between blocks
        rewrite = graphopt.passes.vcas.Vcas(keep_rows=0.5, keep_tokens=0.5, seed=3)
        opt = graphopt.optimize(model, inputs, passes=[rewrite], backend=backend)
        zoo.loss_of(zoo.call(opt, inputs)).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    largest = max(float(g.abs().max()) for g in gradients[1].values() if g is not None)
    for parameter, gradient in gradients[1].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[0][parameter], gradient, rtol=1e-3, atol=1e-4 * largest)


def test_computed_again_dropout_is_what_the_forward_drew() -> None:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Dropout(0.3), nn.Linear(24, 6), nn.Dropout(0.3))  # noqa: E731
    model = nn.Sequential(*(block() for _ in range(3)), nn.Linear(6, 1), nn.Flatten(0)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    segments = [site.name for site in Recompute().applicable(graphopt.analyze(model, (x,)).graph)]
    opt = graphopt.optimize(model, (x,), passes=[Recompute(segments=tuple(segments))])
    assert opt.report.passes == ["recompute"]

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return opt(x).square().sum()

    loss().backward()
    directions = [(p, torch.randn_like(p)) for p in model.parameters()]
    values = []
    for shift in (1e-6, -2e-6):
        with torch.no_grad():
            for parameter, direction in directions:
                parameter += shift * direction
        values.append(loss().item())
    slope = sum(float((p.grad * direction).sum()) for p, direction in directions if p.grad is not None)
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)
