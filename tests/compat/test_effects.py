"""Models with operators that AOTAutograd keeps in order by effect tokens."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphopt.passes import Vcas
from torch import Tensor, nn
from torch._higher_order_ops.effects import has_effects
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt.capture import capture
from tests.measure import planned_peak


class Factor(torch.autograd.Function):
    """Its backward has an operator with an effect."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (z,) = ctx.saved_tensors
        return gradient * (torch.linalg.cholesky(z @ z.t() + torch.eye(len(z))) @ z)


class Kernel(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.second = way, nn.Linear(4, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.second(torch.tanh(self.first(x)))
        if self.way == "backward":
            return Factor.apply(z)  # type: ignore[no-any-return]
        kernel = z @ z.t() + torch.eye(len(x))
        if self.way == "several":
            return torch.linalg.inv(kernel).sum() + torch.linalg.cholesky(kernel).sum() + torch.linalg.solve(kernel, z).sum()
        return torch.linalg.cholesky(kernel if self.way == "cholesky" else x[:1, :1] - kernel).sum()


@pytest.mark.parametrize("way", ["cholesky", "several", "backward"])
def test_checks_of_factorisations_leave_a_model_one_graph(way: str) -> None:
    torch.manual_seed(0)
    model, x = Kernel(way), torch.randn(6, 4)
    reference = copy.deepcopy(model)
    opt = graphopt.optimize(model, (x,), budget=0.8, backend="aot_eager", fullgraph=True)
    opt(x).backward()
    reference(x).backward()
    with FlopCounterMode(display=False) as counter:
        opt(x).backward()
    assert counter.get_total_flops() == opt.report.step_flops
    model.zero_grad()
    opt(x).backward()
    assert 0 < len(opt.selected) < 4
    for name, parameter in reference.named_parameters():
        if name in opt.selected:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def test_the_trained_step_still_checks() -> None:
    """Where torch.compile's does; before torch 2.13 it does not."""
    model, x = Kernel("negative"), torch.randn(6, 4)
    opt = graphopt.optimize(model, (x,), budget=0.8, backend="aot_eager")

    def refusal(step: Callable[[Tensor], Any]) -> str:
        try:
            step(x)
        except torch.linalg.LinAlgError as error:
            return str(error)
        return ""

    assert refusal(opt) == refusal(torch.compile(copy.deepcopy(model), backend="aot_eager"))


def test_what_is_computed_again_is_beside_such_operators() -> None:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers(x)
            return self.layers(torch.linalg.cholesky(x @ x.t() + torch.eye(len(x))) @ x).square().mean()

    model, x = Deep(), torch.randn(64, 32)
    limit = int(0.7 * planned_peak(model, (x,)))
    opt = graphopt.optimize(model, (x,), budget=graphopt.Budget(memory=limit), backend="aot_eager")
    assert "recompute" in str(opt.report)
    opt(x).backward()


class Whitened(nn.Module):
    """Samples whose tokens are each made independent of the others."""

    def __init__(self, checked: bool) -> None:
        super().__init__()
        self.checked, self.first, self.second, self.head = checked, nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.second(torch.tanh(self.first(x))))
        spread = z.transpose(1, 2) @ z + torch.eye(4)
        factor = torch.linalg.cholesky(spread) if self.checked else torch.linalg.cholesky_ex(spread).L
        return self.head(torch.linalg.solve_triangular(factor, z.transpose(1, 2), upper=False).mean(-1)).square().mean()


@pytest.mark.parametrize("checked", [True, False])
def test_a_step_with_such_operators_is_not_sampled_and_says_what_to_do(checked: bool) -> None:
    torch.manual_seed(0)
    model, x = Whitened(checked), torch.randn(6, 5, 3)
    opt = graphopt.optimize(model, (x,), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    opt(x).backward()
    assert opt.last_step is not None
    ordered = checked and has_effects(torch.ops.aten._linalg_check_errors.default)  # not by torch 2.11, which may drop the check
    assert (opt.last_step.sampled_part == 1) is ordered
    assert ["cholesky_ex has none" in note for note in opt.report.notes] == [True] * ordered


def test_results_of_an_operator_with_an_effect_are_used() -> None:
    from torch._higher_order_ops.effects import _register_effectful_op
    from torch._library.effects import EffectType

    @torch.library.custom_op("graphopt_test::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        return x.clone()

    @torch.library.custom_op("graphopt_test::counted_twice", mutates_args=())
    def counted_twice(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), 2 * x

    counted.register_fake(torch.empty_like)
    counted_twice.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            one, two = counted_twice(counted(x))
            return (self.layer(one) * two).sum()

    handles = [_register_effectful_op(f"graphopt_test::{name}", EffectType.ORDERED) for name in ("counted", "counted_twice")]
    try:
        graph = capture(Net(), (torch.randn(3, 4),))
    finally:
        for handle in handles:
            handle.destroy()
    called = {str(node.target) for node in graph.graph.nodes}
    assert {"graphopt_test.counted.default", "graphopt_test.counted_twice.default"} <= called
    assert [desc.kind for desc in graph.inputs] == ["parameter", "parameter", "input", "tangent"]
