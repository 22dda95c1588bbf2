"""What users find under `graphopt`, and what they are told when they pass something else."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import nn

import graphopt
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
    with pytest.raises(graphopt.CaptureError, match=r"bind arguments.* call it with the arguments that forward\(\) takes"):
        graphopt.optimize(Two(), (torch.ones(2, 3),), backend="aot_eager")


def test_an_optimizer_by_name_is_refused() -> None:
    with pytest.raises(graphopt.InputError, match=r"optimizer must be the torch\.optim\.Optimizer .* not 'adamw'"):
        graphopt.optimize(nn.Linear(3, 3), (torch.ones(2, 3),), 0.7, optimizer="adamw")  # type: ignore[arg-type]


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
