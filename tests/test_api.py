"""What users find under `graphopt`, and what they are told when they pass something else."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import graphopt
from graphopt import InputError
from graphopt.calls import batch_dims_of, flatten_call
from graphopt.runtime.disabled import DisabledModule
from tests.messages import warnings_of


def test_what_users_need_and_nothing_else_is_found() -> None:
    names = dir(graphopt)
    assert {"optimize", "prepare", "analyze", "pareto", "plan", "Budget", "TrainerCallback", "SelectionController"} <= set(names)
    assert set(graphopt.__all__) <= set(names)
    found = {name: getattr(graphopt, name) for name in names}
    assert [name for name, value in found.items() if inspect.ismodule(value)] == ["errors", "passes", "testing"]
    assert all(inspect.getdoc(value) for name, value in found.items() if name != "__version__")
    with pytest.raises(AttributeError, match="optimise"):
        graphopt.optimise  # noqa: B018


def test_torch_is_loaded_when_it_is_needed() -> None:
    program = (
        "import sys, graphopt; dir(graphopt); assert 'torch' not in sys.modules; graphopt.optimize; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert importlib.import_module("graphopt.api").pareto is graphopt.pareto


@pytest.mark.parametrize("call", [graphopt.optimize, graphopt.analyze, graphopt.pareto])
@pytest.mark.parametrize("model", ["bert", None, nn.Linear])
def test_what_is_no_module_is_named(call: Any, model: Any) -> None:
    with pytest.raises(graphopt.InputError, match=r"torch\.nn\.Module, not (str|NoneType|type)"):
        call(model, (torch.ones(2, 3),))


class Two(nn.Module):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) - y).square().mean()


def test_a_missing_argument_is_named_for_what_it_is() -> None:
    with pytest.raises(graphopt.CaptureError, match="missing 1 required .*'y'. Remedy: pass a batch that it takes"):
        graphopt.optimize(Two(), (torch.ones(2, 3),), backend="aot_eager")


@pytest.mark.parametrize("place", ["meta", "fake"])
def test_a_batch_without_values_is_refused(place: str) -> None:
    inside = torch.device("meta") if place == "meta" else FakeTensorMode()
    with inside:
        batch = {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}
    with pytest.raises(InputError, match="the example input 'x' has no values .*pass a batch as the model is called with"):
        graphopt.optimize(Two(), batch, backend="aot_eager")
    if place == "meta":
        assert graphopt.analyze(Two(), batch).flops.step > 0


@pytest.mark.parametrize("budget", [{"flops": 0.5}, {"memory": "1GiB"}])
def test_tensors_without_a_size_cannot_be_counted(budget: dict[str, Any]) -> None:
    model, x = torch.nn.Sequential(torch.nn.LazyLinear(16), torch.nn.Linear(16, 1)), torch.randn(4, 8)
    with pytest.raises(InputError, match=r"0\.weight has no size before the model has run: call the model on a batch once"):
        graphopt.optimize(model, (x,), budget=graphopt.Budget(**budget), loss=torch.sum, backend="aot_eager")
    graphopt.optimize(model, (x,), loss=torch.sum, backend="aot_eager")(x).sum().backward()
    assert model[0].weight.grad is not None
    norm = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LazyBatchNorm1d())
    with pytest.raises(InputError, match=r"1\.running_mean has no size before the model has run"):
        graphopt.optimize(norm, (x,), loss=torch.sum, backend="aot_eager")


def test_an_optimizer_by_name_is_refused(tmp_path: Path) -> None:
    model, batch, name = nn.Linear(3, 3), (torch.ones(2, 3),), "adamw"
    opt = graphopt.optimize(model, batch, loss=torch.sum, backend="aot_eager")
    off = DisabledModule(model, graphopt.Budget(), "it was asked for")
    for call in (
        lambda: graphopt.optimize(model, batch, 0.7, optimizer=name),  # type: ignore[arg-type]
        lambda: opt.reselect(batch, name),  # type: ignore[arg-type]
        lambda: opt.save_state(tmp_path / "state", name),  # type: ignore[arg-type]
        lambda: off.save_state(tmp_path / "state", name),  # type: ignore[arg-type]
    ):
        with pytest.raises(graphopt.InputError, match=r"optimizer must be the torch\.optim\.Optimizer .* not 'adamw'"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_loss_or_a_mesh_of_another_type_is_refused() -> None:
    model, batch = nn.Linear(3, 3), (torch.ones(2, 3),)
    for call in (graphopt.optimize, graphopt.analyze):
        with pytest.raises(graphopt.InputError, match="loss= must be a function .*, not 'mse'"):
            call(model, batch, loss="mse")  # type: ignore[arg-type]
    with pytest.raises(graphopt.InputError, match="mesh must be a DeviceMesh, not 2"):
        graphopt.optimize(model, batch, mesh=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("passes", "text"), [("auto", "place and size"), ([GreenTrainer(rule="greentrainer")], "random gradients")]
)
def test_a_batch_without_a_loss_is_warned_of(passes: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    example = (torch.randn(6, 5),)
    with warnings_of() as warned:
        graphopt.optimize(model, example, 0.7, passes, backend="aot_eager")
    assert len(warned) == 1
    assert "labels" in warned[0]
    assert "loss=" in warned[0]
    assert text in warned[0]
    with warnings_of() as warned:
        graphopt.optimize(model, example, 0.7, passes, backend="aot_eager", loss=lambda output: output.square().mean())
        graphopt.optimize(model, example, 1.0, backend="aot_eager")
    assert warned == []


class Merging(nn.Module):
    """Adds its adapter to the weight for inference, as loralib's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.merged = False

    def train(self, mode: bool = True) -> Self:
        if self.merged == mode:
            with torch.no_grad():
                self.base.weight += -self.adapter.weight if mode else self.adapter.weight
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return (y if self.merged else y + self.adapter(x)).square().mean()


def test_a_model_in_eval_mode_is_left_as_its_own_train_makes_it() -> None:
    model, x = Merging().eval(), torch.randn(3, 4)
    before = model(x)
    graphopt.analyze(model, (x,), backend="aot_eager")
    assert model.merged
    assert not model.training
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("call", [graphopt.analyze, graphopt.optimize])
def test_a_batch_dimension_of_no_input_is_refused(call: Callable[..., object]) -> None:
    model, x = Merging(), torch.randn(3, 4)
    for inputs, name in (({"x": x}, "X"), ((x,), "x"), ((x,), 1)):
        with pytest.raises(InputError, match=f"batch_dim names {name!r}, which is no input of the example"):
            call(model, inputs, batch_dim={name: None}, backend="aot_eager")
    for dim in ("x", 0.5, {"x": "0"}):
        with pytest.raises(InputError, match="is no dimension. Give a whole number"):
            call(model, {"x": x}, batch_dim=dim, backend="aot_eager")
    graphopt.analyze(model, {"x": x}, batch_dim={"x": 0}, backend="aot_eager")
    graphopt.analyze(model, (x,), batch_dim={0: 0}, backend="aot_eager")


@pytest.mark.parametrize(
    ("loss", "returned"),
    [
        (lambda output: output.square().mean(1), r"a tensor of shape \(4,\)\. Remedy"),
        (lambda output: output.mean().item(), "a float"),
        (lambda output: output.detach().mean(), "that requires no gradient"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(loss: Any, returned: str) -> None:
    for options in ({"verify": True}, {"budget": 0.6}):
        with pytest.raises(InputError, match=rf"loss= must return .*{returned}"):
            graphopt.optimize(nn.Linear(3, 2), (torch.ones(4, 3),), backend="aot_eager", loss=loss, **options)


def test_the_batch_dimension_of_an_argument_is_that_of_all_tensors_in_it() -> None:
    inputs = {"x": torch.randn(4, 8), "pos": (torch.randn(8), {"more": torch.randn(8)}), "y": torch.randn(4)}
    for named in ({"pos": None}, {"pos.0": None, "pos.1": None}, {"pos": 3, "pos.0": None, "pos.1.more": None}):
        assert batch_dims_of(flatten_call((), inputs), named) == (0, None, None, 0)
    for placed in ({1: None}, {"1": None}, {1: 3, "1.0": None, "1.1": None}):
        assert batch_dims_of(flatten_call(tuple(inputs.values()), {}), placed) == (0, None, None, 0)
