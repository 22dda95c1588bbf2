import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphopt.passes import GreenTrainer, Lsp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import graphopt
from graphopt import InputError, PassError
from graphopt.analysis.flop_formulas import ADDED_FORMULAS
from graphopt.analysis.flops import flop_profile
from graphopt.runtime.bounded_cache import BoundedCache
from tests import zoo


class Sentences(nn.Module):
    """Classifies sequences of any length whose rows are mixed, with dropout if asked; returns its loss in a dict."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.config = {"dropout": dropout}
        self.embed, self.mixed, self.head = nn.Embedding(zoo.VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(self.embed(input_ids))
        hidden = torch.softmax(hidden @ hidden.transpose(1, 2), -1) @ torch.tanh(self.mixed(hidden))
        return {"loss": F.cross_entropy(self.head(hidden.mean(1)), labels)}


def optimized(name: str = "mlp", budget: float | None = 0.6):  # type: ignore[no-untyped-def]
    model, inputs = zoo.make(name, 4)
    return model, inputs, graphopt.optimize(model, inputs, budget=budget, backend="aot_eager")


def classifier(dropout: float = 0.0) -> tuple[Sentences, dict[str, Tensor], graphopt.OptimizedModule]:
    """One of whose tensors some are not trained."""
    model, inputs = Sentences(dropout), {"input_ids": zoo.tokens(4), "labels": torch.randint(0, 2, (4,))}
    opt = graphopt.optimize(model, inputs, budget=0.7, backend="aot_eager")
    assert 2 < len(opt.selected) < len(list(model.parameters()))
    return model, inputs, opt


def test_it_shares_tensors_keys_and_attributes_with_the_model() -> None:
    model, _, opt = classifier()
    assert list(opt.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(opt.parameters(), model.parameters(), strict=True))
    assert opt.config is model.config
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    opt.load_state_dict(state)
    assert all(not p.any() for p in model.parameters())


@pytest.mark.parametrize("whole", [lambda opt: opt, lambda opt: nn.Sequential(opt, nn.Linear(1, 1))])
@pytest.mark.parametrize("ran", [False, True])
def test_torch_compile_of_what_holds_an_optimised_model(whole: Any, ran: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.randn(3, 4)
    opt = graphopt.optimize(model, (x,), budget=0.7, backend="aot_eager")
    if ran:
        opt(x).sum().backward()
    outer = whole(opt)
    compiled = torch.compile(outer, backend="aot_eager")
    for _ in range(3):
        model.zero_grad()
        found = compiled(x)
        found.square().mean().backward()
        torch.testing.assert_close(found, outer(x))
    assert {name for name, p in model.named_parameters() if p.grad is not None} == opt.selected
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), outer(x))


def test_what_is_optimised_already_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), torch.randn(3, 4)
    opt = graphopt.optimize(model, (x,), budget=0.9, backend="aot_eager")
    with pytest.raises(InputError, match="it is optimised already.*Pass the model"):
        graphopt.optimize(opt, (x,), backend="aot_eager")
    with pytest.raises(InputError, match="cannot be analysed: it is optimised already"):
        graphopt.analyze(opt, (x,))
    with pytest.raises(InputError, match="its part 1 is optimised already"):
        graphopt.optimize(nn.Sequential(nn.Linear(4, 4), opt), (x,), backend="aot_eager")
    graphopt.optimize(model, (x,), budget=0.8, backend="aot_eager")(x).sum().backward()


def test_parts_of_a_sequence_are_found_as_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    opt = graphopt.optimize(model, (torch.randn(3, 4),), backend="aot_eager")
    assert (len(opt), opt[0], opt[-1], list(opt)) == (3, model[0], model[2], list(model))

    class Named(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return self["b"](self["a"](x))

    named = graphopt.optimize(Named({"a": nn.Linear(4, 4), "b": nn.Linear(4, 1)}), (torch.randn(3, 4),), backend="aot_eager")
    assert (list(named), "a" in named, "c" in named) == (["a", "b"], True, False)
    other = graphopt.optimize(nn.Linear(4, 1), (torch.randn(3, 4),), backend="aot_eager")
    assert other
    for wrong in (len, list, lambda model: model[0], lambda model: "a" in model):
        with pytest.raises(TypeError):
            wrong(other)


def test_eval_mode_runs_the_plan_without_dropout_and_no_grad_the_model_itself() -> None:
    model, inputs, opt = classifier(dropout=0.1)
    with torch.no_grad():
        zoo.call(opt, inputs)
    assert opt.last_step is None
    opt.eval()
    assert not model.training
    assert not opt.training
    reference = copy.deepcopy(model)
    outputs = [zoo.call(module, inputs) for module in (opt, reference)]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        output["loss"].backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if name in opt.selected:
            torch.testing.assert_close(parameter.grad, expected[name].grad)
        else:
            assert parameter.grad is None, name
    assert opt.last_step is not None
    opt.train()
    assert all(m.training for m in model.modules())
    losses = {float(zoo.call(opt, inputs)["loss"].detach()) for _ in range(3)}
    assert len(losses) == 3  # dropout
    model.eval()
    assert not opt.training


def test_a_second_size_is_compiled_once_for_all_and_nothing_is_traced() -> None:
    _, inputs, opt = classifier()
    counters = opt.counters

    def added_by(*calls: Any) -> int:
        before = counters.compilations
        for call in calls:
            call()
        return counters.compilations - before

    def batch(size: int) -> Any:
        return lambda: zoo.call(opt, zoo.rows(inputs, size))["loss"].backward()

    def longer() -> None:
        opt(input_ids=zoo.tokens(4, 9), labels=inputs["labels"])

    assert added_by(batch(4)) == 1
    assert added_by(batch(3)) <= 1
    assert added_by(batch(2), batch(4), batch(3)) == 0
    assert added_by(longer) <= 1
    assert added_by(longer) == 0
    assert added_by(batch(1)) <= 1
    assert added_by(batch(1)) == 0
    assert (counters.captures, opt.model_runs) == (1, 0)


def test_a_flop_counter_around_a_call_that_compiles_counts_the_step_alone() -> None:
    model, inputs = zoo.make("mlp", batch=4)
    opt = graphopt.optimize(model, inputs, passes=[Lsp(subspace=2, nonzeros=1, criterion="flops")], backend="aot_eager")
    optimizer = opt.make_optimizer(torch.optim.AdamW)
    opt(*inputs).backward()  # the first step fits projectors
    optimizer.step()
    for batch in (4, 3):
        with FlopCounterMode(display=False, custom_mapping=ADDED_FORMULAS) as counter:
            opt(*zoo.rows(inputs, batch)).backward()
        assert opt.last_step is not None
        assert counter.get_total_flops() == flop_profile(opt.last_step.graph).step


def test_a_flop_counter_around_a_call_that_is_traced_counts_the_step_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(11, 11), torch.nn.Tanh(), torch.nn.Linear(11, 1))
    opt = graphopt.optimize(model, (torch.randn(6, 11),), backend="aot_eager")
    with FlopCounterMode(display=False) as counter:
        opt(torch.randn(1, 11)).square().sum().backward()
    assert opt.model_runs == 0
    assert counter.get_total_flops() == 2 * 11 * (11 + 11 + 3)  # forward, and the first weight, the last, and between them


class Repeated(nn.Module):
    """Draws numbers in a region that its backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda x: F.dropout(self.first(x), 0.5).relu(), x, use_reentrant=False)).square().sum()


def test_a_flop_counter_around_draws_that_are_repeated_counts_them_and_changes_nothing() -> None:
    model, x = Repeated(), torch.randn(4, 8)
    opt = graphopt.optimize(model, (x,), passes=[], backend="aot_eager")
    torch.manual_seed(0)
    opt(x).backward()
    expected = model.first.weight.grad
    opt.zero_grad()
    torch.manual_seed(0)
    with FlopCounterMode(display=False) as counter:
        opt(x).backward()
    torch.testing.assert_close(model.first.weight.grad, expected, rtol=0, atol=0)
    assert counter.get_total_flops() == 2 * 4 * 8 * (3 * 8 + 3 * 3)  # the first layer's product three times, the last's three


class Positions(nn.Module):
    """Adds numbers of torch's default type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.linspace(0, 1, x.shape[1], device=x.device)


def test_settings_of_torch_that_change_between_steps_take_effect() -> None:
    model, x = Positions(), torch.randn(3, 4)
    opt = graphopt.optimize(model, (x,), backend="aot_eager")
    assert opt(x).dtype == torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert opt(x).dtype == model(x).dtype == torch.float64
        torch.use_deterministic_algorithms(True)
        torch.testing.assert_close(opt(x), model(x))
        compilations = opt.counters.compilations
        assert compilations <= 3
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert opt(x).dtype == torch.float32
    assert (opt.counters.captures, opt.counters.compilations) == (1, compilations)


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: BoundedCache[int, int] = BoundedCache(3)
    for i in range(5):
        cache.put(i, i)
        cache.get(2)
    assert len(cache) == 3
    assert cache.get(0) is None
    assert cache.get(2) == 2
    monkeypatch.setattr("graphopt.frontend.running.PLANS", 2)
    model, inputs, opt = optimized("mlp")
    names = [name for name, _ in model.named_parameters()]
    for name in (*names[:3], names[0]):  # plans that are no longer kept are compiled again
        opt.adopt(replace(opt.plan, train=frozenset({name})))
        zoo.call(opt, inputs).backward()
        assert [n for n, p in model.named_parameters() if p.grad is not None] == [name]
    assert len(opt._running._compiled) == 2
    assert len(opt._running._steps) <= 2


def test_many_sizes_are_compiled_at_most_twice() -> None:
    _, (x, labels), opt = optimized("mlp")
    for size in range(2, 24):
        opt(x.repeat(size, 1)[:size], labels.repeat(size)[:size]).backward()
    assert (opt.counters.captures, opt.model_runs) == (1, 0)
    assert opt.counters.compilations <= 2


def test_freezing_and_unfreezing_between_steps_takes_effect() -> None:
    model, inputs, opt = optimized("mlp", None)
    zoo.call(opt, inputs).backward()
    model.zero_grad()
    model.second.requires_grad_(False)
    zoo.call(opt, inputs).backward()
    assert model.second.weight.grad is None
    assert model.first.weight.grad is not None
    model.zero_grad()
    model.second.requires_grad_(True)
    zoo.call(opt, inputs).backward()
    assert model.second.weight.grad is not None


def test_frozen_parameters_are_never_selected() -> None:
    model, inputs = zoo.make("mlp", 4)
    model.second.requires_grad_(False)
    opt = graphopt.optimize(model, inputs, budget=0.9, backend="aot_eager")
    assert opt.selected
    assert not any("second" in name for name in opt.selected)
    assert "second" not in " ".join(opt.report.cut)


def test_unselected_tensors_are_bit_identical_after_training() -> None:
    model, inputs, opt = classifier()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(opt.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        zoo.call(opt, inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in opt.selected)


def test_training_follows_eager_training_of_the_same_tensors() -> None:
    model, inputs, opt = classifier()
    reference = copy.deepcopy(model)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(name in opt.selected)
    losses = []
    for module in (opt, reference):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        for step in range(4):
            loss = zoo.call(module, zoo.rows(inputs, 4 - step % 2))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-4)


def test_dropout_has_eager_statistics_and_a_seed_reproduces_it() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(400))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.scale, 0.3)

    opt = graphopt.optimize(Dropped(), (torch.ones(50, 400),), backend="aot_eager")
    torch.manual_seed(7)
    first, second = opt(torch.ones(50, 400)), opt(torch.ones(50, 400))
    torch.manual_seed(7)
    again = opt(torch.ones(50, 400))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert (first == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    torch.testing.assert_close(first.max(), torch.tensor(1 / 0.7))
    first.sum().backward()
    assert torch.equal(opt.scale.grad, first.sum(0).detach())


def test_a_given_selection_and_unknown_passes() -> None:
    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, passes=[GreenTrainer(train=("third.bias",))], backend="aot_eager")
    zoo.call(opt, inputs).backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["third.bias"]
    for passes in (["nonsense"], "all", [GreenTrainer], [3]):
        with pytest.raises(PassError, match="greentrainer"):
            graphopt.optimize(model, inputs, passes=passes)
    with pytest.raises(graphopt.GraphoptError, match="backend"):
        graphopt.optimize(model, inputs, backend="tpu")


def test_a_callable_backend_gets_graph_and_inputs() -> None:
    seen = []

    def backend(module, inputs):  # type: ignore[no-untyped-def]
        seen.append(len(inputs))
        return module.forward

    model, inputs = zoo.make("mlp", 4)
    opt = graphopt.optimize(model, inputs, backend=backend)
    zoo.call(opt, inputs).backward()
    assert len(seen) == 2
    assert opt.report.backend == "backend"
