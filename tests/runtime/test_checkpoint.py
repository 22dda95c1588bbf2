"""Checkpoints: a run that was stopped goes on bit-equal, and a state that does not fit changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp, RunLora, Vcas
from hypothesis import HealthCheck, given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import graphopt
from graphopt import InputError, MergeController, SelectionController
from graphopt.planner import product_times
from graphopt.runtime.plain_values import to_plain
from graphopt.runtime.state_file import read_state, write_state
from tests import zoo
from tests.rules import MEASURED
from tests.runtime.comparing import same
from tests.runtime.uneven import batches


@dataclass
class Run:
    """Everything that a script makes before its loop."""

    model: nn.Module
    opt: graphopt.OptimizedModule
    optimizer: torch.optim.Optimizer
    after_step: list[Callable[[Any], Any]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)

    def step(self, batch: Any) -> None:
        self.opt(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for adapt in self.after_step:
            adapt(batch)

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


def mlp(seed: int, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    model = zoo.MLP(width=16)
    model.second = nn.Sequential(model.second, nn.Dropout(dropout))  # type: ignore[assignment]
    return model


def optimized(model: nn.Module, **options: Any) -> graphopt.OptimizedModule:
    return graphopt.optimize(model, batches(1)[0], backend="aot_eager", **options)


def selecting(seed: int) -> Run:
    model = mlp(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    opt = optimized(model, budget=0.8, passes=MEASURED, optimizer=optimizer)
    controller = SelectionController(opt, optimizer, every=2, tolerance=0.0)
    return Run(model, opt, optimizer, [controller.after_step], [controller])


def sampling(seed: int) -> Run:
    model = mlp(seed)
    opt = optimized(model, budget=graphopt.Budget(variance=1.0), passes=[Vcas(every=3, alpha=0.2, beta=0.5)])
    assert opt.controller is not None
    return Run(model, opt, torch.optim.Adam(model.parameters(), lr=1e-2), [opt.controller.after_step])


def sampling_at_fixed_ratios(seed: int) -> Run:
    model = mlp(seed)
    opt = optimized(model, passes=[Vcas(keep_rows=0.5, keep_tokens=0.7)])
    return Run(model, opt, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def compressing(seed: int, schedule: str) -> Run:
    model = mlp(seed)
    rewrite = Lsp(subspace=5, nonzeros=2, check_every=3, threshold=0.3, iterations=3, schedule=schedule)
    opt = optimized(model, passes=[rewrite])
    return Run(model, opt, opt.make_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1))


class Adapted(nn.Module):
    """A layer with adapters behind one without."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.drop = nn.Linear(5, 16), nn.Linear(16, 3), nn.Dropout(0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.above(self.drop(torch.tanh(self.below(x)))), labels)


def reordering(seed: int) -> Run:
    torch.manual_seed(seed)
    model = get_peft_model(Adapted(), LoraConfig(r=2, target_modules=["below", "above"]))
    opt = optimized(model, passes=[RunLora()])
    controller = MergeController(opt, every=2)
    return Run(model, opt, torch.optim.AdamW(model.parameters(), lr=1e-2), [lambda _: controller.after_step()], [controller])


CASES: dict[str, Callable[[int], Run]] = {
    "greentrainer": selecting,
    "vcas": sampling,
    "vcas-fixed": sampling_at_fixed_ratios,
    "lsp": lambda seed: compressing(seed, "sequential"),
    "lsp-layerwise": lambda seed: compressing(seed, "layerwise"),
    "runlora": reordering,
}


STEPS = {"greentrainer": 5, "vcas": 7, "vcas-fixed": 3, "lsp": 5, "lsp-layerwise": 5, "runlora": 3}


def ratios_of(opt: graphopt.OptimizedModule) -> Any:
    return () if opt.controller is None else opt.controller.ratios


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_after_every_step_it_goes_on_bit_equal(case: str, tmp_path: Path) -> None:
    path, expected = tmp_path / "state", []
    whole = CASES[case](0)
    torch.manual_seed(1)
    start = torch.get_rng_state()
    for batch in batches(STEPS[case]):
        whole.step(batch)
        expected.append(whole.weights())
    run = CASES[case](0)
    torch.set_rng_state(start)
    for k, batch in enumerate(batches(STEPS[case])):
        run.step(batch)
        assert same(run.weights(), expected[k]), f"step {k}"
        weights, random_state = run.weights(), torch.get_rng_state()
        run.opt.save_state(path, run.optimizer)
        run = CASES[case](2 + k)
        run.opt.load_state(path, run.optimizer)
        run.model.load_state_dict(weights)
        torch.set_rng_state(random_state)
        if case == "vcas":  # its calibrations are at steps 3, 6, ... on that step's batch and the one before
            held = read_state(path)["parts"]["vcas"]["recent"]
            assert same(held, ((batch, {}),) if k % 3 == 1 else ())
    assert run.opt.selected == whole.opt.selected
    assert ratios_of(run.opt) == ratios_of(whole.opt)
    if case == "greentrainer":
        assert any(r.changed for r in whole.held[0].history)
        assert [r.gain for r in run.held[0].history] == [r.gain for r in whole.held[0].history]
    if case == "vcas":
        assert ratios_of(whole.opt)
        assert [a.rows for a in run.opt.controller.history] == [a.rows for a in whole.opt.controller.history]
        assert run.opt.controller.flops_saved == whole.opt.controller.flops_saved
    if case in ("lsp", "lsp-layerwise"):
        assert any(w.fits > 1 for w in run.opt.states["lsp"].weights.values())


@cache
def trained(case: str) -> Run:
    """A run after two steps; tests leave it as it is, or put it back."""
    run = CASES[case](0)
    for batch in batches(2):
        run.step(batch)
    return run


def everything(run: Run, before: Any = None) -> Any:
    """All that a state could change; times that were measured after `before`, as the whole process does, are left out."""
    parts = {name: part.snapshot() for name, part in run.opt._parts().items() if part is not None}
    if before is not None:
        known = before[1]["captures"]["product_times"]
        times = parts["captures"]["product_times"]
        parts["captures"]["product_times"] = {  # in the same order: it says nothing
            key: {name: times[key][name] for name in names if name in times[key]} for key, names in known.items() if key in times
        }
    plan = {f.name: getattr(run.opt.plan, f.name) for f in fields(run.opt.plan)} | {
        "passes": None,
        "budget": None,
        "memory": None,
    }
    return copy.deepcopy((to_plain(plan), parts, run.optimizer.state_dict(), run.weights()))


def refused(run: Run, path: Path, optimizer: Any, message: str) -> None:
    before = everything(run)
    with pytest.raises(InputError, match=message) as refusal:
        run.opt.load_state(path, optimizer)
    assert str(path) in str(refusal.value)
    assert same(everything(run, before), before)


def test_states_of_other_runs_are_refused_with_the_reason(tmp_path: Path) -> None:
    path, cases = tmp_path / "state", ("greentrainer", "vcas", "lsp", "lsp-layerwise", "runlora")
    selecting, sampling, compressing, layerwise, reordering = (trained(case) for case in cases)

    def saved(run: Run, optimizer: Any = None) -> Path:
        run.opt.save_state(path, optimizer)
        return path

    refused(selecting, saved(reordering), None, "of another model: that had no parameter first.weight, and this one has first")
    refused(selecting, saved(sampling), None, r"another budget \(variance=1.0; this model has flops=0.8\).*optimize\(\) with the")
    refused(layerwise, saved(compressing), None, r"lsp by Lsp.*schedule='sequential'.* has lsp .*schedule='layerwise'")
    refused(sampling, saved(sampling), sampling.optimizer, r"without an optimizer.*save_state\(path, optimizer\)")
    saved(sampling, sampling.optimizer)
    refused(
        sampling,
        path,
        torch.optim.SGD(sampling.model.parameters()),
        "saved with torch.optim.adam.Adam, and this optimizer is torch.optim.sgd.SGD",
    )
    backwards = torch.optim.Adam(list(sampling.model.parameters())[::-1])
    refused(sampling, path, backwards, "another order: make it as it was")
    refused(sampling, path, torch.optim.Adam([sampling.model.third.bias]), "other parameters")
    another = SelectionController(selecting.opt, None, every=9)
    saved(selecting)
    del another
    refused(selecting, path, None, "controllers SelectionController, SelectionController, and this model has the controllers Sel")
    selecting.held[0].due.every = 7
    refused(selecting, path, None, "controllers")
    saved(selecting)
    selecting.held[0].due.every = 2
    refused(selecting, path, None, "every=7, and this model's has every=2")
    path.write_bytes(path.read_bytes()[:-1])
    refused(selecting, path, None, "is damaged")


def test_a_smaller_subspace_and_a_wider_model_are_refused(tmp_path: Path) -> None:
    run, path = trained("lsp"), tmp_path / "state"
    run.opt.save_state(path)
    tree = read_state(path)
    tree["plan"]["passes"][0] = tree["plan"]["passes"][0].replace("subspace=5", "subspace=4")
    write_state(path, tree)
    refused(run, path, None, r"lsp by Lsp\(subspace=4, .*; this model has lsp by Lsp\(subspace=5, ")
    tree["parameters"]["first.weight"] = (32, 5)
    write_state(path, tree)
    refused(run, path, None, r"that had first.weight of shape \(32, 5\), and this one has first.weight of shape \(16, 5\)")


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    return [at, *(place for key, value in inner for place in places(value, (*at, key)))]


def changed(tree: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """A tree with one entry of it changed, or left out where `change` returns `LEFT_OUT`."""
    if not place:
        return change(tree)
    items = dict(tree.items() if isinstance(tree, dict) else enumerate(tree))
    items[place[0]] = changed(items[place[0]], place[1:], change)
    if items[place[0]] is LEFT_OUT:
        del items[place[0]]
    return items if isinstance(tree, dict) else type(tree)(items.values())


LEFT_OUT = object()
WRONG: list[Any] = [
    LEFT_OUT, None, True, -1, 3, 0.5, float("nan"), "x", [], {}, (), [1], ("a", 1), {"a": 1}, {0: {}}, torch.zeros(0),
    torch.ones(5, 5), torch.full((16, 2), 99, dtype=torch.int32), torch.zeros(5056, dtype=torch.uint8),
]  # fmt: skip


@pytest.mark.parametrize("case", ["greentrainer", "vcas", "lsp-layerwise"])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_state_with_a_wrong_entry_is_loaded_as_a_whole_or_not_at_all(case: str, data: st.DataObject, tmp_path: Path) -> None:
    run, path = trained(case), tmp_path / "state"
    run.opt.save_state(path, run.optimizer)
    tree, before = read_state(path), everything(run)
    place = data.draw(st.sampled_from(places(tree)[1:]))
    write_state(path, changed(tree, place, lambda _: data.draw(st.sampled_from(WRONG))))
    try:
        run.opt.load_state(path, run.optimizer)
    except InputError:
        assert same(everything(run, before), before)
    else:  # it could have been so
        write_state(path, tree)
        run.opt.load_state(path, run.optimizer)
        assert same(everything(run, before), before)


def test_the_times_of_the_checkpoint_decide_where_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = trained("runlora"), tmp_path / "state"
    run.opt.save_state(path)
    times = product_times.used_times()
    assert times
    monkeypatch.setattr(product_times, "_by_device", {})
    monkeypatch.setattr(product_times, "_adopted", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(product_times.ProductTimes, "_measure", None)  # nothing is measured from here on
    run = CASES["runlora"](1)
    run.opt.load_state(path)
    for batch in batches(2):
        run.step(batch)
    assert product_times.used_times() == times


def test_steps_that_were_compiled_by_other_times_are_compiled_again(tmp_path: Path) -> None:
    run, path = CASES["runlora"](1), tmp_path / "state"
    run.step(batches(1)[0])
    run.opt.save_state(path)
    compiled = run.opt.report.compilations
    run.opt.load_state(path)
    run.step(batches(1)[0])
    assert run.opt.report.compilations == compiled
    tree = read_state(path)
    times = tree["parts"]["captures"]["product_times"]
    original = copy.deepcopy(times)
    for name, value in (("no product", 1.0), ("2x3x4", 0.0), ("2x3x4", float("nan"))):
        times["a machine"] = {name: value}
        write_state(path, tree)
        refused(run, path, None, "no positive number of seconds of a product")
    del times["a machine"]
    for seconds in times.values():
        seconds.update({name: 2 * value for name, value in seconds.items()})
    write_state(path, tree)
    run.opt.load_state(path)
    run.step(batches(1)[0])
    assert run.opt.report.compilations == compiled + 1
    product_times.adopt_times(original)


def test_projectors_that_wait_for_the_end_of_a_step_are_kept() -> None:
    subspaces = trained("lsp").opt.states["lsp"]
    assert subspaces is not None
    weight, before = subspaces.weights["second.0.weight"], subspaces.snapshot()
    drawn, size = subspaces._drawn(weight.shape, torch.device("cpu"), torch.float32), subspaces.rewrite.subspace
    weight.next, weight.skipped = (drawn, torch.rand(size, size)), 3
    waiting = copy.deepcopy(subspaces.snapshot())
    subspaces.prepare(before)()
    assert (weight.next, weight.skipped) == (None, 0)
    subspaces.prepare(waiting)()
    assert weight.skipped == 3
    assert same(subspaces.snapshot(), waiting)
    subspaces.prepare(before)()


def test_a_value_that_no_file_can_hold_is_named(tmp_path: Path) -> None:
    run, path = trained("greentrainer"), tmp_path / "state"
    run.optimizer.param_groups[0]["hook"] = print
    try:
        with pytest.raises(InputError, match=r"optimizer.state.param_groups\[0\].hook is of type builtin_function"):
            run.opt.save_state(path, run.optimizer)
    finally:
        del run.optimizer.param_groups[0]["hook"]
    assert not path.exists()


def test_an_optimizer_that_fails_while_it_loads_is_as_it_was(tmp_path: Path) -> None:
    class Failing(torch.optim.Adam):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            raise KeyError("boom")

    run, path = trained("vcas"), tmp_path / "state"
    optimizer = Failing(run.model.parameters(), lr=0.5)
    run.opt.save_state(path, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    refused(run, path, optimizer, "no state of this Failing .*boom.*as it was when the state was saved")
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_weights_are_no_part_of_it_and_keys_stay_the_models(tmp_path: Path) -> None:
    run, path = trained("greentrainer"), tmp_path / "state"
    run.opt.save_state(path)
    assert list(run.opt.state_dict()) == list(run.model.state_dict())
    assert path.stat().st_size < 20_000
    with torch.no_grad():
        run.model.get_parameter("third.bias").add_(1)
    weights = run.weights()
    run.opt.load_state(path)
    assert same(run.weights(), weights)
