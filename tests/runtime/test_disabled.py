import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp

import graphopt
from tests import zoo


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
