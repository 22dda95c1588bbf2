"""Copies and pickles of optimised models, and their state as libraries save it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer
from torch import Tensor, nn

import graphopt
from graphopt.compat.dynamo import graphs_compiled
from graphopt.runtime.disabled import DisabledModule


class Layers(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().mean()


class InEagerMode(Layers):
    """The last layer runs outside of what is compiled, and trains the first one."""

    @torch.compiler.disable
    def last(self, x: Tensor) -> Tensor:
        return self.a(x).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(self.a(x)))


class Extra(Layers):
    def get_extra_state(self) -> Any:
        return {"version": 2}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def pickled(opt: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_train_what_is_selected_in_eager_mode_too(copied: Callable[[nn.Module], Any]) -> None:
    x = torch.randn(4, 8)
    opt = graphopt.optimize(InEagerMode(), (x,), passes=[GreenTrainer(train=("b.weight",))], backend="aot_eager")
    opt(x).backward()
    other = copied(opt)
    other.zero_grad()
    other(x).backward()
    assert [name for name, p in other.named_parameters() if p.grad is not None] == ["b.weight"]


def test_merges_of_an_unpickled_model_are_measured_after_its_first_step() -> None:
    x = torch.randn(4, 4)
    opt = graphopt.optimize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), (x,), 0.9, backend="aot_eager")
    opt = pickle.loads(pickle.dumps(opt))
    with pytest.raises(graphopt.GraphoptError, match="run a step first"):
        opt.recheck_merges()
    opt(x).sum().backward()
    assert not opt.recheck_merges()


def test_a_pickle_has_no_step() -> None:
    """Its compiled code cannot be pickled where it came from torch's cache on disk."""
    x = torch.randn(4, 8)
    opt = graphopt.optimize(Layers(), (x,), budget=0.8, backend="aot_eager")
    opt(x).backward()
    for name in (b"RegionStep", b"GraphModule"):
        assert name not in pickle.dumps(opt)


def test_an_unpickled_model_knows_its_selection_and_goes_on_from_a_state(tmp_path: Path) -> None:
    x, file = torch.randn(4, 8), tmp_path / "state.safetensors"
    opt = graphopt.optimize(Layers(), (x,), budget=0.8, backend="aot_eager")
    opt(x).backward()
    opt.save_state(file)
    other = pickled(opt)
    assert other.selected == opt.selected
    with pytest.raises(graphopt.GraphoptError, match="run a step first"):
        _ = other.report
    other.load_state(file)
    other(x).backward()
    assert other.report.verdict == opt.report.verdict
    assert not pickled(opt).reselect((x,)).changed


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_a_model_that_runs_as_torch_compile_has_it_is_compiled_as_well(copied: Callable[[nn.Module], Any]) -> None:
    other = copied(DisabledModule(Layers(), graphopt.Budget(), "nothing of it can be planned", "aot_eager", compiles=True))
    before = graphs_compiled()
    other(torch.randn(4, 8)).backward()
    assert graphs_compiled() == before + 1


def test_extra_state_is_saved_and_loaded_as_the_models_own() -> None:
    model = Extra()
    opt = graphopt.optimize(model, (torch.randn(4, 8),), backend="aot_eager")
    assert opt.state_dict().keys() == model.state_dict().keys()
    opt.load_state_dict(opt.state_dict())
    assert model.seen == {"version": 2}


def test_a_model_of_several_graphs_is_recorded_without_keeping_a_copy_of_it() -> None:
    class Two(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x).square().mean()

    def weights() -> int:
        gc.collect()
        return sum(type(held) is nn.Parameter and held.shape == (237, 237) for held in gc.get_objects())

    model, x = Two(237), torch.randn(4, 237)
    for _ in range(2):
        graphopt.optimize(model, (x,), backend="aot_eager")
    assert weights() == 2


class Masked(nn.Module):
    """Few tokens have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.relu(self.layer(self.embed(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_an_unpickled_model_that_leaves_out_rows_without_labels_goes_on() -> None:
    ids = torch.randint(50, (8, 64))
    labels = torch.where(torch.arange(64) < 6, ids, -100)
    opt = graphopt.optimize(Masked(), (ids, labels), backend="aot_eager")
    assert "dead_rows" in opt.plan.decisions
    torch.testing.assert_close(pickled(opt)(ids, labels), opt(ids, labels))
