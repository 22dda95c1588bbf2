"""`prepare`: a loop of the user's own, unchanged, is the same as without, but for what the budget cuts."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from graphopt.passes import Vcas
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

import graphopt
from graphopt.errors import BudgetError, InputError, PassError
from graphopt.integrations.prepare import Prepared, prepare
from tests.integrations.trainer_runs import classifier, points, same, weights

Loop = Callable[[nn.Module, torch.optim.Optimizer, Any], list[float]]


def loader(count: int = 14) -> Any:
    return DataLoader(points(count), batch_size=4, shuffle=True)  # draws its order from the global generator


def prepared(model: nn.Module, budget: Any = None, data: Any = None, **options: Any) -> Prepared:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return prepare(model, optimizer, loader() if data is None else data, budget, **{"backend": "aot_eager", **options})


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> list[float]:
    losses = []
    for _ in range(2):
        for batch in data:
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def with_everything(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> list[float]:
    """Accumulation, clipping, a schedule, a GradScaler, and an evaluation."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=4)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=2.0**8), []
    for _ in range(2):
        for i, batch in enumerate(data):
            loss = model(**batch)["loss"] / 2
            scaler.scale(loss).backward()
            losses.append(loss.item())
            if i % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
        model.eval()
        with torch.no_grad():
            losses.append(model(**batch)["loss"].item())
        model.train()
    return losses


@pytest.mark.parametrize("loop", [plainly, with_everything])
def test_without_passes_every_weight_is_the_plain_loops_to_the_bit(loop: Loop, warnings: list[str]) -> None:
    plain, ours = classifier(), classifier()
    torch.manual_seed(3)
    expected = loop(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), loader())
    torch.manual_seed(3)
    training = prepared(ours, passes=[])
    model, optimizer, data = training
    found = loop(model, optimizer, data)
    assert found == expected
    assert same(plain, ours)
    assert model is ours
    assert type(optimizer) is torch.optim.AdamW
    assert training.numbers()["graphopt/original_steps"] == 0
    assert warnings == []


@pytest.mark.parametrize(("loop", "selections"), [(plainly, [4, 8]), (with_everything, [2, 4])])
def test_a_flops_budget_trains_what_fits_and_selects_every_epoch(loop: Loop, selections: list[int], monkeypatch: Any) -> None:
    seen: list[int] = []
    steps: list[int] = []
    reselect = graphopt.OptimizedModule.reselect
    monkeypatch.setattr(graphopt.OptimizedModule, "reselect", lambda *a, **k: seen.append(len(steps)) or reselect(*a, **k))
    model = classifier(dropout=0.0)
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    training = prepare(model, optimizer, loader(), 0.7, backend="aot_eager")
    loop(*training)
    assert seen == selections  # 4 batches an epoch, of which the second loop accumulates two
    assert training.report.flops_ratio <= 0.7
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert training.opt is not None
    assert training.opt.selected <= moved < set(before)
    numbers = training.numbers()  # the first selection takes the gradients of a batch, which counts as one of the 8 steps
    assert numbers["graphopt/flops_saved"] == pytest.approx(1 - numbers["graphopt/flops_ratio"] - 1 / 8, abs=0.01)


def test_a_model_in_eval_mode_trains_under_the_plan() -> None:
    """As `from_pretrained` leaves it, and a loop without `model.train()` keeps it."""
    model = classifier().eval()
    before = weights(model)
    training = prepared(model, 0.7)
    plainly(*training)
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert 0 < len(moved) < len(before)
    assert training.numbers()["graphopt/original_steps"] == 0
    assert not model.training


def test_a_sampler_adapts() -> None:
    model = classifier(width=32, dropout=0.0)
    data = DataLoader(points(64), batch_size=16)
    training = prepared(model, graphopt.Budget(variance=2.0), data, passes=[Vcas(every=4, alpha=0.4, beta=0.8)])
    plainly(*training)
    assert training.opt is not None
    assert len(training.opt.controller.history) == 2


def test_adapters_in_half_precision_are_looked_at_again(monkeypatch: Any) -> None:
    looks: list[int] = []
    monkeypatch.setattr("graphopt.integrations.training_steps.MERGES_EVERY", 3)
    monkeypatch.setattr(graphopt.OptimizedModule, "recheck_merges", lambda self: looks.append(1))
    plainly(*prepared(classifier()))
    assert len(looks) == 2


def test_an_epoch_that_goes_on_in_its_middle_is_a_whole_one() -> None:
    training = prepared(classifier(dropout=0.0), 0.7, loader(16))
    divided = Accelerator(cpu=True).prepare(training.loader)
    once(training, skip_first_batches(divided, 3))
    assert training._steps.due is not None
    assert training._steps.due.every == len(divided) == 4


@pytest.mark.parametrize("split", [False, True])
def test_an_epoch_is_as_long_as_accelerate_makes_it(split: bool) -> None:
    """It divides the loader after `prepare`, among processes, or each batch among them."""
    data = loader(16)
    training = prepared(classifier(dropout=0.0), 0.7, data)
    Accelerator(cpu=True)
    divided = prepare_data_loader(data, num_processes=2, process_index=0, split_batches=split)
    once(training, divided)
    assert training._steps.due is not None
    assert training._steps.due.every == len(divided) == (4 if split else 2)


def test_training_stops_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    file, data = tmp_path / "graphopt.safetensors", list(loader())
    batches = (data[:3] + data[:3], data[1:] + data[1:])
    options: dict[str, Any] = {"budget": 0.7, "data": data, "reselect_every": 4}
    whole = prepared(classifier(dropout=0.0), **options)
    once(whole, batches[0])
    first = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
    whole.save_state(file)
    once(whole, batches[1])

    resumed = prepared(classifier(dropout=0.0), **options)
    resumed.model.load_state_dict(first[0])
    resumed.optimizer.load_state_dict(first[1])
    resumed.load_state(file)
    once(resumed, batches[1])
    assert same(whole.model, resumed.model)
    assert resumed.opt is not None
    assert whole.opt is not None
    assert resumed.opt.selected == whole.opt.selected
    again = 1 / 12  # the resumed run has measured gradients once more
    assert resumed.numbers()["graphopt/flops_saved"] == pytest.approx(whole.numbers()["graphopt/flops_saved"] - again)
    with pytest.raises(InputError, match="no file"):
        resumed.load_state(tmp_path / "nowhere")


def once(training: Prepared, batches: list[dict[str, Tensor]]) -> None:
    model, optimizer, _ = training
    for batch in batches:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_can_be_prepared_anew_and_had_back() -> None:
    model = classifier()
    first = prepared(model, 0.7)
    once(first, list(loader(4)))
    optimizer = first.optimizer
    second = prepare(model, optimizer, None, 0.9, backend="aot_eager")
    once(second, list(loader(8)))
    assert first.numbers()["graphopt/flops_ratio"] <= 0.7
    assert second.numbers()["graphopt/flops_ratio"] > 0.7
    first.detach()
    assert "forward" in vars(model)
    second.detach()
    assert "forward" not in vars(model)
    assert len(optimizer._optimizer_step_post_hooks) == 0
    assert "2 steps" in repr(second)


class Broken(nn.Module):
    """Its graph breaks, and parts that torch.compile leaves to eager mode drop gradients by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.below(x).relu()
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(self.above(hidden), y)


BROKEN = torch.randn(16, 8), torch.randint(4, (16,))


def without_gradient(model: nn.Module) -> int:
    model.zero_grad()
    model(*BROKEN).backward()
    return sum(p.grad is None for p in model.parameters())


def test_a_model_that_is_detached_trains_everything_again() -> None:
    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = prepare(model, optimizer, None, 0.6, backend="aot_eager")
    assert without_gradient(model)
    assert training.opt is not None
    training.opt.drop_unselected()
    training.detach()
    assert not without_gradient(model)
    training.opt(*BROKEN)
    assert without_gradient(model)  # it is used again


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_is_prepared_anew_forgets_the_earlier_plan(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no new one can be made, and the model itself runs."""

    def unable(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no plan")

    model = Broken()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = weakref.ref(prepare(model, optimizer, None, 0.6, backend="aot_eager"))
    assert without_gradient(model)
    first().opt.drop_unselected()
    optimizer.step()
    if fails:
        monkeypatch.setattr("graphopt.integrations.asked.optimize", unable)
    second = prepare(model, optimizer, None, None, backend="aot_eager")
    assert not without_gradient(model)
    assert (second.opt is None) is fails
    gc.collect()
    assert first() is None  # no hook of the optimizer keeps it


def test_data_without_a_length_and_a_loss_outside_of_the_model() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([(row["x"], row["labels"]) for row in points()])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    training = prepared(model, 0.7, DataLoader(Stream(), batch_size=4))
    before = weights(model)
    for x, labels in training.loader:
        nn.functional.cross_entropy(training.model(x), labels).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert 0 < len(moved) < len(before)


def test_what_can_be_told_without_a_batch_is_told_at_once() -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, error in (
        ((model, optimizer, [], 1.5), BudgetError),
        ((model, optimizer, [], 0.5, ["nonsense"]), PassError),
        (("model", optimizer, [], 0.5), InputError),
        ((model, model.parameters(), [], 0.5), InputError),
        ((model, optimizer, optimizer, 0.5), InputError),
        ((model, torch.optim.SGD(classifier().parameters()), [], 0.5), InputError),
    ):
        with pytest.raises(error):
            prepare(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="reselect_every"):
        prepare(model, optimizer, [], 0.5, reselect_every=0)
    assert "forward" not in vars(model)
    training = prepare(model, optimizer, [], 0.01, backend="aot_eager")
    with pytest.raises(InputError, match="first batch"):
        training.report  # noqa: B018
    with pytest.raises(BudgetError, match=r"[Ss]mallest"):
        model(**{key: value[None] for key, value in points(1)[0].items()})


@pytest.mark.parametrize("first", [False, True])
def test_a_model_that_is_sharded_is_for_optimize(first: bool) -> None:
    """A forward finds weights that the call has gathered and will give up: torch's own error came in the backward."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = classifier()
        if first:
            fully_shard(model)
        prepared(model, 0.7)
        if not first:
            fully_shard(model)
        with pytest.raises(InputError, match="optimize"):
            model(**next(iter(loader())))
    finally:
        torch.distributed.destroy_process_group()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHOPT_DISABLE", "1")
    plain, ours = classifier(), classifier()
    torch.manual_seed(3)
    plainly(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), loader())
    torch.manual_seed(3)
    plainly(*prepared(ours, 0.5))
    assert same(plain, ours)


def test_arguments_without_a_name_reach_a_forward_that_takes_any_number() -> None:
    """They were put under the names of the signature: `masks` was empty then, and another loss was trained."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: Tensor, *masks: Tensor, **options: Tensor) -> Tensor:
            found = self.layer(x)[:, 0]
            for mask in masks:
                found = found * mask
            return (found - options["labels"]).square().mean()

    x, mask, labels = torch.randn(6, 8), torch.randint(0, 2, (6,)), torch.randn(6)
    model, reference = Masked(), Masked()
    reference.load_state_dict(model.state_dict())
    training, _, _ = prepared(model, data=[(x, mask, labels)])
    loss = training(x, mask, labels=labels)
    loss.backward()
    expected = reference(x, mask, labels=labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)
