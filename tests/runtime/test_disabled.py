import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp

import graphopt
from tests import zoo
from tests.messages import warnings_of


def trained(opt: Any, batches: list[Any], controllers: list[Any], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for batch in batches:
        zoo.call(opt, batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        for controller in controllers:
            assert controller.after_step(batch) is None or not controller.history[-1].changed
    return opt.state_dict()


def test_user_code_runs_unchanged_and_trains_the_model_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, inputs = zoo.make("cnn", 4)
    reference = copy.deepcopy(model)
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1")
    monkeypatch.setattr("graphopt.runtime.captures.capture_to_run", None)  # nothing is traced
    opt = graphopt.optimize(model, inputs, budget=graphopt.Budget(flops=0.5, variance=0.1), verify=True)
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.01)
    assert type(optimizer) is torch.optim.AdamW
    controllers = [opt.controller, graphopt.SelectionController(opt, optimizer, every=1)]
    ours = trained(opt, [inputs, zoo.rows(inputs, 2), zoo.rows(inputs, 1)], controllers, optimizer)
    own = torch.optim.AdamW(reference.parameters(), lr=0.01)
    eager = trained(reference, [inputs, zoo.rows(inputs, 2), zoo.rows(inputs, 1)], [], own)
    assert all(torch.equal(ours[name], value) for name, value in eager.items())
    assert opt.selected == {name for name, _ in model.named_parameters()}
    assert "GRAPHOPT_DISABLE" in str(opt.report)
    assert opt.report.plan is not None
    assert not opt.report.plan.contributions
    assert graphopt.MergeController(opt, every=1).after_step() is False
    [path] = opt.dump(tmp_path)
    assert "GRAPHOPT_DISABLE" in json.loads(path.read_text())["notes"][0]
    with pytest.raises(graphopt.GraphoptError, match="GRAPHOPT_DISABLE"):
        _ = opt.flops
    opt.eval()
    assert not model.training


def test_compressed_gradients_have_an_ordinary_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.make("mlp", 4)
    monkeypatch.setenv("GRAPHOPT_DISABLE", "yes")
    opt = graphopt.optimize(model, inputs, passes=[Lsp(subspace=4, nonzeros=2)])
    optimizer = opt.make_optimizer(torch.optim.SGD, lr=0.1)
    zoo.call(opt, inputs).backward()
    optimizer.step()
    assert opt.controller is None


@pytest.mark.parametrize("value", ["", "0"])
def test_not_disabled(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GRAPHOPT_DISABLE", value)
    model, inputs = zoo.make("mlp", 4)
    assert type(graphopt.optimize(model, inputs, backend="aot_eager")) is graphopt.OptimizedModule


def test_as_a_backend_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1")
    model, inputs = zoo.make("mlp", 4)
    torch.compile(model, backend="graphopt", options={"budget": 0.5})(*inputs).backward()
    assert all(p.grad is not None for p in model.parameters())


def begun(monkeypatch: pytest.MonkeyPatch, off: bool, seed: int = 0) -> tuple[Any, Any, torch.optim.Optimizer]:
    """A model after one step, and its optimizer, in a run with or without GRAPHOPT_DISABLE."""
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1" if off else "")
    torch.manual_seed(seed)
    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, budget=0.6, backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=0.01)
    zoo.call(opt, inputs).backward()
    optimizer.step()
    optimizer.zero_grad()
    return opt, inputs, optimizer


@pytest.mark.parametrize("loads", [True, False])
def test_a_plan_outlives_a_run_that_is_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loads: bool) -> None:
    file = tmp_path / "state.safetensors"
    on, _, optimizer = begun(monkeypatch, off=False)
    on.adopt(replace(on.plan, train=frozenset({"first.bias"})))  # what another plan would not select
    on.save_state(file, optimizer)

    off, inputs, optimizer = begun(monkeypatch, off=True)
    with warnings_of("graphopt") as warned:
        if loads:
            off.load_state(file, optimizer)
        zoo.call(off, inputs).backward()
        optimizer.step()
        off.save_state(file, optimizer)
        off.save_state(file, optimizer)
    assert [("was not loaded" in text) for text in warned] == ([] if loads else [True])
    stepped = optimizer.state_dict()["state"]

    again, _, optimizer = begun(monkeypatch, off=False)
    with warnings_of("graphopt") as warned:
        again.load_state(file, optimizer)
    assert (warned, again.selected) == ([], {"first.bias"})
    torch.testing.assert_close(optimizer.state_dict()["state"], stepped)


def test_a_state_without_a_plan_leaves_the_plan_that_was_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    off, _, optimizer = begun(monkeypatch, off=True)
    off.save_state(file, optimizer)
    stepped = optimizer.state_dict()["state"]
    for switched_off in (True, False):
        opt, inputs, optimizer = begun(monkeypatch, off=switched_off)
        selected = opt.selected
        with warnings_of("graphopt") as warned:
            opt.load_state(file, optimizer)
        assert [("holds no plan" in text) for text in warned] == ([] if switched_off else [True])
        assert opt.selected == selected
        torch.testing.assert_close(optimizer.state_dict()["state"], stepped)
        zoo.call(opt, inputs).backward()


def test_what_is_no_state_of_the_model_is_refused_and_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    model, inputs = zoo.make("cnn", 4)
    graphopt.optimize(model, inputs, budget=0.6, backend="aot_eager").save_state(file)
    off, _, optimizer = begun(monkeypatch, off=True)
    with pytest.raises(graphopt.InputError, match="another model"):
        off.load_state(file, optimizer)
    off.save_state(file, optimizer)
    off.load_state(file, optimizer)


@pytest.mark.parametrize("version", [1, 99])
def test_a_plan_of_another_version_is_not_written_over(version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    opt, _, _ = begun(monkeypatch, off=False)
    with monkeypatch.context() as patch:
        patch.setattr("graphopt.runtime.state_file.VERSION", version)
        opt.save_state(file)
    written = file.read_bytes()
    off, _, optimizer = begun(monkeypatch, off=True)
    with pytest.raises(graphopt.InputError, match=f"version '{version}'.* would be lost here: give another path"):
        off.save_state(file, optimizer)
    assert file.read_bytes() == written
