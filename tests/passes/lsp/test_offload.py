"""The layer-wise schedule: bit for bit the sequential one, whatever the resources take."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from graphopt.passes import Lsp
from graphopt.passes.lsp.offload import Durations, Offload, Worker, transition_layer
from hypothesis import given, strategies as st
from torch import Tensor, nn

import graphopt
from graphopt.errors import GraphoptError
from tests.long_forms import long


class Deep(nn.Module):
    """Layers, the last of which is too small to be compressed."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return nn.functional.cross_entropy(self.head(x), labels)


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(6, 8, generator=generator), torch.randint(2, (6,), generator=generator)


def made(schedule: str, backend: Any = "aot_eager", depth: int = 4, **options: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Deep(depth)
    rewrite = Lsp(subspace=4, nonzeros=2, criterion="flops", schedule=schedule, check_every=5, iterations=2, **options)
    opt = graphopt.optimize(model, batch(0), passes=[rewrite], backend=backend)
    return model, opt, opt.make_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def train(opt: Any, optimizer: Any, steps: range, between: Any = None) -> None:
    for i in steps:
        opt(*batch(i)).backward()
        if between is not None:
            between(i)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def sequential() -> tuple[dict[int, dict[str, Tensor]], dict[str, Any]]:
    """The sequential schedule's weights after every step, and its optimizer's state after the first."""
    model, opt, optimizer = made("sequential")
    states, first = {}, {}
    for i in range(8):
        train(opt, optimizer, range(i, i + 1))
        states[i] = copy.deepcopy(model.state_dict())
        first = first or copy.deepcopy(optimizer.state_dict())
    return states, first


@pytest.fixture(scope="module")
def expected(sequential: tuple[dict[int, dict[str, Tensor]], dict[str, Any]]) -> dict[int, dict[str, Tensor]]:
    return sequential[0]


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def delayed(offload: Offload, seed: int, longest: float = 0.004) -> None:
    """Random delays before every task of every resource."""
    generator = random.Random(seed)
    for worker in (offload.out, offload.host, offload.back):
        submit = worker.submit

        def later(site: Any, call: Any, submit: Any = submit) -> Future[Any]:
            seconds = generator.random() * longest
            return submit(site, lambda: (time.sleep(seconds), call())[1])

        worker.submit = later  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def running() -> tuple[nn.Module, Any]:
    model, opt, _ = made("layerwise")
    return model, opt


Layerwise = tuple[nn.Module, Any, Any]


@pytest.fixture
def after_one_step(sequential: tuple[dict[int, dict[str, Tensor]], dict[str, Any]], running: tuple[nn.Module, Any]) -> Layerwise:
    """The layer-wise schedule in the state that the sequential one was in."""
    (states, first), (model, opt) = sequential, running
    opt.train()
    model.zero_grad()
    model.load_state_dict(states[0])
    optimizer = opt.make_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    optimizer.load_state_dict(copy.deepcopy(first))
    return model, opt, optimizer


@pytest.mark.parametrize("seed", [*range(20), *long(*range(20, 200))])
def test_delays_change_no_bit(seed: int, after_one_step: Layerwise, expected: dict[int, dict[str, Tensor]]) -> None:
    """Many schedules, never a stale weight: two steps from a state that the sequential schedule was in."""
    model, opt, optimizer = after_one_step
    delayed(optimizer.offload, seed)
    train(opt, optimizer, range(1, 4))
    optimizer.synchronize()
    assert same(model, expected[3])


def test_checks_and_steps_follow_the_sequential_schedule(expected: dict[int, dict[str, Tensor]]) -> None:
    model, opt, optimizer = made("layerwise")
    for i in range(8):
        train(opt, optimizer, range(i, i + 1))
        optimizer.synchronize()
        assert same(model, expected[i]), i


def test_under_inductor_nothing_is_dropped_or_reordered() -> None:
    losses, orders = [], []
    for schedule, backend in (("sequential", "aot_eager"), ("layerwise", "inductor")):
        _, opt, optimizer = made(schedule, backend, depth=2)
        if optimizer.offload is not None:
            produced = optimizer.offload.produced
            optimizer.offload.produced = lambda name, g, produced=produced: (orders.append(name), produced(name, g))
        train(opt, optimizer, range(4))
        losses.append(float(opt(*batch(9))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # products of other layouts round otherwise
    names = [f"layers.{i}.weight" for i in range(2)][::-1]
    assert orders == names * 3  # the first step checks


def test_a_weight_waits_for_its_own_update_alone(after_one_step: Layerwise) -> None:
    model, opt, optimizer = after_one_step
    train(opt, optimizer, range(1, 2))
    seen = []
    apply = optimizer.offload._apply
    optimizer.offload._apply = lambda name, *rest: (seen.append(name), apply(name, *rest))
    assert set(optimizer.offload.pending) == set(opt.states["lsp"].weights)
    blocked = threading.Event()
    last = "layers.3.weight"
    waiting = optimizer.offload.pending[last]
    late: Future[Any] = Future()
    optimizer.offload.pending[last] = dataclasses.replace(waiting, sent=late)
    thread = threading.Thread(target=lambda: (opt(*batch(2)), blocked.set()))
    thread.start()
    while len(seen) < 3:
        time.sleep(0.001)
    assert seen == [f"layers.{i}.weight" for i in range(3)]
    assert not blocked.is_set()
    late.set_result(waiting.sent.result())
    thread.join(10)
    assert seen[-1] == last
    assert blocked.is_set()


def test_what_reads_the_weights_otherwise_sees_the_updates(
    after_one_step: Layerwise, expected: dict[int, dict[str, Tensor]]
) -> None:
    model, opt, optimizer = after_one_step
    train(opt, optimizer, range(1, 2))
    assert optimizer.offload.pending
    assert same(model, expected[1])  # state_dict
    train(opt, optimizer, range(2, 3))
    reference = Deep()
    reference.load_state_dict(expected[2])
    assert torch.equal(model(*batch(7)), reference(*batch(7)))
    train(opt, optimizer, range(3, 4))
    opt.eval()
    reference.load_state_dict(expected[3])
    with torch.no_grad():
        assert torch.equal(opt(*batch(7)), reference(*batch(7)))


def reference_after(steps: int) -> dict[str, Tensor]:
    model, opt, optimizer = made("sequential")
    train(opt, optimizer, range(steps))
    return copy.deepcopy(model.state_dict())


def test_modules_inside_wait_too_and_copies_and_pickles_are_free_of_hooks(
    after_one_step: Layerwise, expected: dict[int, dict[str, Tensor]]
) -> None:
    model, opt, optimizer = after_one_step
    train(opt, optimizer, range(1, 2))
    state = model.layers.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(v, expected[1]["layers." + k]) for k, v in state.items())
    train(opt, optimizer, range(2, 3))
    x = batch(5)[0]
    wanted = nn.functional.linear(x, expected[2]["layers.2.weight"], expected[2]["layers.2.bias"])
    assert torch.equal(model.layers[2](x), wanted)  # type: ignore[index]
    assert same(pickle.loads(pickle.dumps(model)), expected[2])
    assert same(copy.deepcopy(model), expected[2])


def test_a_new_shape_is_captured_while_updates_wait(after_one_step: Layerwise, expected: dict[int, dict[str, Tensor]]) -> None:
    model, opt, optimizer = after_one_step
    train(opt, optimizer, range(1, 2))
    assert optimizer.offload.pending
    x, labels = batch(2)
    opt(x[:1], labels[:1])  # a batch of 1 has a capture of its own
    assert same(model, expected[1])


@pytest.mark.usefixtures("_only_new_objects")
def test_the_last_updates_survive_the_optimizer(expected: dict[int, dict[str, Tensor]]) -> None:
    model, opt, optimizer = made("layerwise")
    train(opt, optimizer, range(2))
    del opt, optimizer
    gc.collect()
    assert same(model, expected[1])


def test_restored_weights_are_not_updated_once_more(after_one_step: Layerwise, expected: dict[int, dict[str, Tensor]]) -> None:
    model, opt, optimizer = after_one_step
    train(opt, optimizer, range(1, 3))
    model.load_state_dict(expected[0])
    assert not optimizer.offload.pending
    opt(*batch(4))
    assert same(model, expected[0])


def test_projectors_that_change_meanwhile_do_not_touch_updates_under_way() -> None:
    results = []
    for schedule in ("sequential", "layerwise"):
        model, opt, optimizer = made(schedule)
        (opt(*batch(0)) + opt(*batch(1))).backward()  # fitted, and installed after the step
        optimizer.step()
        optimizer.zero_grad()
        train(opt, optimizer, range(2, 4))
        results.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(v, results[1][k]) for k, v in results[0].items())


def test_another_optimizer_takes_over_from_the_first(after_one_step: Layerwise, expected: dict[int, dict[str, Tensor]]) -> None:
    model, opt, optimizer = after_one_step
    train(opt, optimizer, range(1, 2))
    second = opt.make_optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    assert same(model, expected[1])
    second.load_state_dict(optimizer.state_dict())
    train(opt, second, range(2, 4))
    assert same(model, expected[3])


@pytest.mark.parametrize("schedule", ["sequential", "layerwise"])
@pytest.mark.usefixtures("_only_new_objects")
def test_two_optimizers_share_the_weights(schedule: str) -> None:
    model, opt, _ = made(schedule)
    del _
    gc.collect()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    halves = [opt.make_optimizer(torch.optim.AdamW, half, lr=1e-2) for half in (matrices[:2], matrices[2:])]
    whole, other, one = made("sequential")
    one = other.make_optimizer(torch.optim.AdamW, [p for p in whole.parameters() if p.dim() == 2], lr=1e-2)
    for i in range(7):
        opt(*batch(i)).backward()
        other(*batch(i)).backward()
        for optimizer in (*halves, one):
            optimizer.step()
        for optimizer in (*halves, one):
            optimizer.zero_grad()
    assert opt.states["lsp"].steps == other.states["lsp"].steps == 7
    assert same(model, whole.state_dict())


def test_a_state_loaded_between_backward_and_step_is_what_the_step_goes_on_from() -> None:
    results = []
    for schedule in ("sequential", "layerwise"):
        model, opt, optimizer = made(schedule)
        train(opt, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict())
        train(opt, optimizer, range(2, 4))
        opt(*batch(4)).backward()
        optimizer.load_state_dict(state)
        optimizer.step()
        results.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(v, results[1][k]) for k, v in results[0].items())


def test_a_copy_that_fails_is_made_again() -> None:
    results = []
    for failing in (False, True):
        model, opt, optimizer = made("layerwise")
        transfer = optimizer.offload.transfer
        send = transfer.to_device
        calls = []

        def once(*args: Any, calls: list[int] = calls, send: Any = send, failing: bool = failing) -> Any:
            calls.append(1)
            if failing and len(calls) == 3:
                raise MemoryError("no room")
            return send(*args)

        transfer.to_device = once
        train(opt, optimizer, range(3))
        results.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(v, results[1][k]) for k, v in results[0].items())


def test_penalties_on_weights_are_scaled_and_clipped_with_the_rest() -> None:
    model, opt, optimizer = made("layerwise")
    weight = opt.states["lsp"].weights["layers.2.weight"]
    train(opt, optimizer, range(1))
    (opt(*batch(1)) + 100 * model.layers[2].weight.square().sum()).backward()  # type: ignore[index, union-attr]
    assert model.layers[2].weight.grad is None  # type: ignore[index, union-attr]
    torch.nn.utils.clip_grad_norm_(optimizer.parameters(), 1e-6)
    assert float(weight.variable.grad.norm()) <= 1e-6  # type: ignore[union-attr]


_EXIT = """
from tests.passes.lsp.test_offload import batch, made
model, opt, optimizer = made("layerwise")
for _ in range(3):
    opt(*batch(0)).backward()
print("done")
"""


def test_the_process_ends_quietly_with_updates_under_way() -> None:
    run = subprocess.run([sys.executable, "-c", _EXIT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


def test_gradients_that_were_clipped_or_summed_are_updated_anew() -> None:
    results = []
    for schedule in ("sequential", "layerwise"):
        model, opt, optimizer = made(schedule)

        def clip(i: int, optimizer: Any = optimizer, opt: Any = opt) -> None:
            if i % 2:
                opt(*batch(100 + i)).backward()
            torch.nn.utils.clip_grad_norm_(optimizer.parameters(), 0.01)

        train(opt, optimizer, range(6), clip)
        results.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(v, results[1][k]) for k, v in results[0].items())


def test_a_worker_that_fails_says_so_in_step_and_nothing_is_half_applied() -> None:
    model, opt, optimizer = made("layerwise")
    train(opt, optimizer, range(2))
    optimizer.synchronize()
    before, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.moments)
    update = optimizer.offload.update

    def failing(name: str, gradient: Tensor) -> Any:
        if name == "layers.2.weight":
            raise MemoryError("no room")
        return update(name, gradient)

    optimizer.offload.update = failing
    with pytest.raises(GraphoptError, match=r"layers\.2\.weight on the host failed, and no weight was changed: no room"):
        train(opt, optimizer, range(2, 3))
    assert same(model, before)
    assert all(torch.equal(m.first, moments[n].first) and m.step == moments[n].step for n, m in optimizer.moments.items())
    optimizer.offload.update = update
    optimizer.zero_grad()
    train(opt, optimizer, range(2, 4))
    reference, other, second = made("sequential")
    train(other, second, range(4))
    assert same(model, copy.deepcopy(reference.state_dict()))


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20), st.sets(st.sampled_from("abcdef")))
def test_workers_serve_in_order_until_one_below_the_transition_layer_waits(sites: list[str], newest: set[str]) -> None:
    worker = Worker("test", newest)
    order: list[int] = []
    running, started = threading.Event(), threading.Event()
    first = worker.submit("first", lambda: (running.set(), started.wait(5)))
    assert running.wait(5)
    futures = [worker.submit(site, lambda i=i: order.append(i)) for i, site in enumerate(sites)]
    started.set()
    for future in [first, *futures]:
        future.result(5)
    waiting, wanted = list(enumerate(sites)), []
    while waiting:
        wanted.append(waiting.pop(-1 if any(site in newest for _, site in waiting) else 0)[0])
    assert order == wanted


def test_threads_end_with_the_optimizer() -> None:
    _, opt, optimizer = made("layerwise")
    train(opt, optimizer, range(2))
    optimizer.synchronize()
    workers = [optimizer.offload.out, optimizer.offload.host, optimizer.offload.back]
    threads = [thread for worker in workers for thread in worker._thread._threads]
    assert len(threads) == 3
    del optimizer, opt, workers
    gc.collect()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("durations", "expected_layer"),
    [
        (Durations(0.0, 0.0, 0.0, 1.0), 0),
        (Durations(1.0, 2.0, 1.0, 100.0), 0),
        (Durations(1.0, 2.0, 1.0, 4.0), 10),
        (Durations(1.0, 2.0, 1.0, 10.0), 7),
        (Durations(1.0, 2.0, 1.0, 0.0), 10),
    ],
)
def test_the_transition_layer_is_the_papers_clamped(durations: Durations, expected_layer: int) -> None:
    assert transition_layer(10, durations) == expected_layer
