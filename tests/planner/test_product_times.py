"""Measured times are kept on disk: what is damaged counts as nothing, and processes do not lose each other's."""

from __future__ import annotations

import json
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import graphopt
from graphopt.planner import product_times
from graphopt.planner.product_times import ProductTimes, machine
from graphopt.planner.step_time import machine_times
from tests import zoo
from tests.forked import FORKED, ended

GOOD = {"4x4x4": 0.5, "combine 2x2 of 4x4": 1, "copy 16": 1e-6}


def times(path: Path) -> ProductTimes:
    return ProductTimes(torch.device("cpu"), torch.float32, path)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(product_times, "_adopted", {})  # what state files of other tests brought
    return tmp_path / "graphopt" / "product_times.json"


def test_what_was_measured_is_known_to_the_next_process(path: Path) -> None:
    measured = times(path).product(4, 5, 6)
    assert measured > 0
    assert times(path).product(4, 5, 6) == measured
    assert {file.name for file in path.parent.iterdir()} == {"product_times.json", "product_times.lock"}


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", "7", "[" * 100_000, '{"a": ' * 100_000, '{"KEY": 3}', '{"KEY": {"4x4x4": "fast"}}',
        '{"KEY": {"4x4x4": true}}',
        '{"KEY": {"4x4x4": NaN}}', '{"KEY": {"4x4x4": Infinity}}', '{"KEY": {"4x4x4": 0}}', '{"KEY": {"4x4x4": -1}}',
        '{"KEY": {"4x4x4": [1]}}', '{"KEY": {"other": 1}}', '{"other": {"4x4x4": null}}', "\0",
    ],
    ids=lambda damage: repr(damage[:30]),
)  # fmt: skip
def test_what_is_damaged_counts_as_nothing(damage: str, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(damage.replace("KEY", times(path).key))
    assert 0 < times(path).product(4, 4, 4) < 0.5
    assert json.loads(path.read_text())[times(path).key].keys() == {"4x4x4"}


def test_what_is_whole_is_used(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({times(path).key: GOOD}))
    assert times(path).product(4, 4, 4) == 0.5


def test_a_folder_in_the_place_of_the_file_or_of_its_folder_changes_nothing(path: Path) -> None:
    path.mkdir(parents=True)
    assert times(path).product(4, 4, 4) > 0
    assert path.is_dir()
    assert times(path / "file" / "there").product(4, 4, 4) > 0


def write(path: Path, rows: int, both: Barrier) -> None:
    """Measurements at the same time as another process's, which has time to write after this one has read what is there."""
    read = product_times._read

    def slowly(path: Path) -> dict[str, dict[str, float]]:
        known = read(path)
        time.sleep(1e-3)
        return known

    product_times._read = slowly
    found = times(path)
    found._measure = lambda call: 1.0  # type: ignore[method-assign]
    both.wait(60)
    for i in range(40):
        found.product(rows, i, 1)


def test_two_processes_that_write_lose_nothing(path: Path) -> None:
    both = FORKED.Barrier(2)
    writers = [FORKED.Process(target=write, args=(path, rows, both)) for rows in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    assert [writer.exitcode for writer in writers] == [0, 0]
    (known,) = json.loads(path.read_text()).values()
    assert len(known) == 80


def mixed() -> None:
    """Settings that torch's old functions cannot tell of, and a plan under them."""
    keys = [machine(torch.device("cpu"), torch.float32)]
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # from here on, torch's old functions raise
    keys.append(machine(torch.device("cpu"), torch.float32))
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    keys.append(machine(torch.device("cpu"), torch.float32))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten(0), torch.nn.Linear(8, 1), torch.nn.Flatten(0))
    graphopt.optimize(model, (torch.randn(2, 4),), backend="aot_eager", loss=lambda out: out.sum())
    assert len(set(keys)) == 3


def test_times_are_of_the_settings_under_which_they_are_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parent.parent))
    monkeypatch.setattr(product_times, "_by_device", {})
    device, threads, precision = torch.device("cpu"), torch.get_num_threads(), torch.get_float32_matmul_precision()
    for of in (product_times.product_times, machine_times):
        before = of(device, torch.float32)
        try:
            torch.set_num_threads(threads + 1)
            more_threads = of(device, torch.float32)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
            other_precision = of(device, torch.float32)
        finally:
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)
        assert of(device, torch.float32) is before
        found = (before, more_threads, other_precision, of(device, torch.float64))
        assert len({times.key for times in found if times is not None}) == 4


def test_the_processor_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = times(Path("nowhere")).key
    monkeypatch.setattr(product_times, "_processor", lambda: "another")
    assert times(Path("nowhere")).key != before


def test_settings_that_torch_has_no_one_word_for_are_told_apart() -> None:
    assert ended(mixed) == 0


def test_times_of_earlier_versions_are_not_read(path: Path) -> None:
    """Some were of fake tensors."""
    name = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({f"{name} {torch.get_num_threads()} threads, torch {torch.__version__}, torch.float32": GOOD}))
    assert times(path).product(4, 4, 4) != GOOD["4x4x4"]


def test_products_are_computed_where_orders_are_chosen_while_a_graph_is_compiled(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors are timed as nothing, and under autocast products of float32 are those of bfloat16."""
    found: list[tuple[type, object, bool]] = []

    def measure(self: ProductTimes, call: object) -> float:
        found.append((type(torch.ones(1)), _get_current_dispatch_mode(), torch.is_autocast_enabled("cpu")))
        return 1.0

    monkeypatch.setenv("XDG_CACHE_HOME", str(path.parent.parent))
    monkeypatch.setattr(product_times, "_by_device", {})
    monkeypatch.setattr(ProductTimes, "_measure", measure)
    with torch.autocast("cpu", torch.bfloat16):
        opt = graphopt.optimize(zoo.Adapted(), (torch.randn(16, 4),), passes=["runlora"], backend="aot_eager")
        opt(torch.randn(16, 4)).backward()
        times(path).product(3, 3, 3)
    assert len(found) > 1
    assert set(found) == {(Tensor, None, False)}
