"""`prepare` with compressed gradients: what is returned steps them, and what holds the user's optimizer still works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from graphopt.passes import Lsp
from torch import nn

import graphopt
from graphopt.errors import InputError
from graphopt.integrations.prepare import Prepared, prepare
from graphopt.runtime.module import OptimizedModule
from tests import zoo
from tests.integrations.trainer_runs import same, weights


def prepared(model: nn.Module, budget: Any = None, **options: Any) -> Prepared:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return prepare(model, optimizer, None, budget, backend="aot_eager", **options)


LSP = Lsp(subspace=5, nonzeros=2, criterion="flops", check_every=3)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return zoo.MLP(width=16).double()


def compressed_loop(model: nn.Module, optimizer: Any, clear: Callable[[], None], parameters: Callable[[], Any]) -> None:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        clear()
        model(x, torch.arange(6) % 3).backward()
        nn.utils.clip_grad_norm_(parameters(), 0.5)
        optimizer.step()
        schedule.step()


def test_compressed_gradients_are_stepped_by_the_optimizer_that_is_returned() -> None:
    reference, model = mlp(), mlp()
    example = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(6) % 3)
    torch.manual_seed(7)
    opt = graphopt.optimize(reference, example, passes=[LSP], backend="aot_eager")
    own = opt.make_optimizer(torch.optim.AdamW, lr=1e-2)
    compressed_loop(opt, own, own.zero_grad, own.parameters)

    torch.manual_seed(7)
    training = prepared(model, passes=[LSP])
    _, optimizer, _ = training
    assert isinstance(optimizer, torch.optim.Optimizer)
    groups = lambda: [p for group in optimizer.param_groups for p in group["params"]]  # noqa: E731
    compressed_loop(model, optimizer, model.zero_grad, groups)  # which clears no compressed gradient
    assert training.report.sections["lsp"]["compressed"]
    assert not same(model, mlp())
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(reference)[name])

    saved = copy.deepcopy(optimizer.state_dict())
    again = prepared(mlp(), passes=[LSP])
    again.optimizer.load_state_dict(saved)  # before the first batch
    again.model.load_state_dict(model.state_dict())
    for run in (training, again):
        torch.manual_seed(8)
        compressed_loop(run.model, run.optimizer, run.model.zero_grad, run.optimizer.parameters)
    assert same(model, again.model)


def test_a_scheduler_that_was_made_before_schedules_compressed_gradients(recwarn: pytest.WarningsRecorder) -> None:
    model, hooks = mlp(), []
    users = torch.optim.AdamW(model.parameters(), lr=1e-2)
    users.register_step_post_hook(lambda *_: hooks.append(1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(users, 0.1)
    _, optimizer, _ = prepare(model, users, None, passes=[LSP], backend="aot_eager")
    for step in range(3):
        model(torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.1 ** (step + 1))
    assert len(hooks) == 3
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_an_optimizer_that_steps_compressed_gradients_is_not_prepared_again() -> None:
    """Its groups hold the compressed ones in the place of weights, which another plan would leave untrained."""
    model = mlp()
    users = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = prepare(model, users, None, passes=[LSP], backend="aot_eager")
    prepare(model, users, None, passes=[LSP], backend="aot_eager").detach()  # no gradient has been compressed yet
    training = prepare(model, users, None, passes=[LSP], backend="aot_eager")
    model(torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3).backward()
    training.optimizer.step()
    for optimizer in (users, training.optimizer):
        with pytest.raises(InputError, match="make a new one"):
            prepare(model, optimizer, None, 0.9, backend="aot_eager")


def test_compressed_gradients_do_not_gather_once_a_model_is_detached() -> None:
    model, batch = mlp(), (torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3)
    training = prepared(model, passes=[LSP])
    for _ in range(3):
        model.zero_grad()  # which does not reach them
        model(*batch).backward()
        training.optimizer.step()
        training.detach()
    assert all(p.grad is None for p in training.optimizer.parameters() if all(p is not own for own in model.parameters()))


def test_a_state_that_does_not_fit_is_refused_once_and_training_goes_on() -> None:
    model, batch = mlp(), (torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3)
    training = prepared(model, passes=[LSP])
    split = torch.optim.AdamW([{"params": [p]} for p in mlp().parameters()], lr=5.0)
    before = training.optimizer.param_groups[0]["lr"]
    with pytest.raises(InputError, match="the state has 6 parameter groups, this optimizer 1"):
        training.optimizer.load_state_dict(split.state_dict())
    assert training.optimizer.param_groups[0]["lr"] == before
    plain = torch.optim.AdamW(mlp().parameters(), lr=0.5)
    training.optimizer.load_state_dict(plain.state_dict())  # of gradients that were not compressed
    with pytest.raises(InputError, match="not the state of an optimizer with compressed gradients"):
        model(*batch)
    assert same(model, mlp())
    assert training.optimizer.param_groups[0]["lr"] == before
    model(*batch).backward()
    training.optimizer.step()
    assert all(w.changed is not None for w in training.opt.states["lsp"].weights.values())
    assert not same(model, mlp())


@pytest.mark.parametrize("refused", ["state", "wrapping"])
def test_a_first_batch_that_is_refused_leaves_the_optimizer_as_it_was(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3
    first = prepared(mlp(), passes=[LSP])
    compressed_loop(first.model, first.optimizer, first.model.zero_grad, first.optimizer.parameters)
    first.save_state(tmp_path / "good")
    saved = copy.deepcopy(first.optimizer.state_dict())
    (tmp_path / "damaged").write_text("damaged")

    def trained(fails: bool) -> nn.Module:
        model = mlp()
        training = prepared(model, passes=[LSP])
        training.optimizer.load_state_dict(copy.deepcopy(saved))
        users, groups = training.optimizer.inner, training.optimizer.param_groups
        if fails:
            with monkeypatch.context() as patched:
                if refused == "state":
                    training.load_state(tmp_path / "damaged")
                else:
                    patched.setattr(OptimizedModule, "check_wrapping", mock.Mock(side_effect=InputError("damaged DDP")))
                with pytest.raises(InputError, match="damaged"):
                    model(*batch)
            assert training.optimizer.inner is users
            assert training.optimizer.param_groups is users.param_groups is groups
        training.load_state(tmp_path / "good")
        torch.manual_seed(8)
        compressed_loop(model, training.optimizer, model.zero_grad, training.optimizer.parameters)
        return model

    assert same(trained(fails=True), trained(fails=False))


def test_where_nothing_is_compressed_the_optimizer_is_the_users(warnings: list[str]) -> None:
    plain, model = mlp(), mlp()
    inner = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    compressed_loop(plain, inner, inner.zero_grad, plain.parameters)
    where_memory_asks = Lsp(subspace=5, nonzeros=2, criterion="flops", weights=())
    training = prepared(model, graphopt.Budget(memory="1GiB"), passes=[where_memory_asks])
    compressed_loop(model, training.optimizer, training.optimizer.zero_grad, model.parameters)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(plain)[name])
    assert warnings == []
    assert training.optimizer.state_dict()["state"]


def test_hooks_on_its_state_are_called_before_and_after_the_first_batch() -> None:
    called: list[str] = []
    begun, training = prepared(mlp(), passes=[LSP]), prepared(mlp(), passes=[LSP])
    compressed_loop(begun.model, begun.optimizer, begun.model.zero_grad, begun.optimizer.parameters)
    state, optimizer = begun.optimizer.state_dict(), training.optimizer
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: called.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    for _ in range(2):
        called.clear()
        optimizer.load_state_dict(state)
        state = optimizer.state_dict()
        assert called == ["before loading", "after loading", "before saving", "after saving"]
        compressed_loop(training.model, optimizer, training.model.zero_grad, optimizer.parameters)
    assert training.report.sections["lsp"]["compressed"]
