"""The joint program against brute force on small random problems."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from dataclasses import replace

import pytest

from graphopt.planner.costs import BackwardCosts
from graphopt.planner.problem import Problem, TensorBytes, evaluate
from graphopt.planner.solver import quiet, solve
from tests.forked import ended


def random_problem(seed: int) -> Problem:
    """A chain of three segments with five tensors, two of which can be compressed."""
    rng = random.Random(seed)
    segment = (2, 2, 1, 1, 0)
    classes = [(1 << k, rng.randint(5, 30)) for k in range(5)]
    classes += [((1 << 5) - (1 << k), rng.randint(5, 30)) for k in range(1, 5)]  # the dY chain down to k
    tensors = tuple(
        TensorBytes(
            gradient=rng.randint(5, 20),
            state=2 * rng.randint(5, 20),
            segment=segment[k],
            compressed=rng.randint(1, 4) if k % 2 else None,
            compressed_flops=rng.randint(-4, 8) if k % 2 else 0,
        )
        for k in range(5)
    )
    segments = tuple((rng.randint(10, 60), rng.randint(5, 15)) for _ in range(3))
    costs = BackwardCosts(tuple("abcde"), rng.randint(20, 60), tuple(classes), tuple(f for m, f in classes if m.bit_count() == 1))
    importance = tuple(rng.uniform(0.1, 1) for _ in range(5))
    held = tuple(rng.randint(0, 40) if seed % 2 else 0 for _ in range(3))
    return Problem(costs, importance, tensors, segments, held, 100, 0.75)


def all_choices(problem: Problem) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    def subsets(items: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [s for n in range(len(items) + 1) for s in itertools.combinations(items, n)]

    return [
        (train, small, recomputed)
        for train in subsets(tuple(range(5)))
        if train
        for small in subsets(tuple(k for k in train if problem.tensors[k].compressed is not None))
        for recomputed in subsets((0, 1, 2))
    ]


def value_of(problem: Problem, train: tuple[int, ...], small: tuple[int, ...]) -> float:
    lost = (1 - problem.kept_value) * sum(problem.importance[k] for k in small)
    return sum(problem.importance[k] for k in train) - lost


@pytest.mark.parametrize("seed", range(12))
def test_the_program_finds_what_brute_force_finds(seed: int) -> None:
    problem = random_problem(seed)
    known = [(c, *evaluate(problem, *c)) for c in all_choices(problem)]
    rng = random.Random(seed + 100)
    full_flops, full_peak = evaluate(problem, range(5), (), ())
    for _ in range(4):
        flops, memory = rng.uniform(0.5, 1.1) * full_flops, rng.uniform(0.5, 1.0) * full_peak
        flops_limit, memory_limit = int(flops), int(memory)
        fitting = [value_of(problem, c[0], c[1]) for c, f, p in known if f <= flops_limit and p <= memory_limit]
        found = solve(problem, flops_limit, memory_limit)
        assert (found is None) == (not fitting)
        if found is not None:
            assert (found.step_flops, found.peak_bytes) == evaluate(problem, found.train, found.compressed, found.recomputed)
            assert found.step_flops <= flops_limit
            assert found.peak_bytes <= memory_limit
            assert value_of(problem, found.train, found.compressed) == pytest.approx(max(fitting), rel=1e-3)


def without_compression(problem: Problem) -> Problem:
    return replace(problem, tensors=tuple(replace(tensor, compressed=None) for tensor in problem.tensors))


@pytest.mark.parametrize("seed", range(6))
def test_the_smallest_memory_is_that_of_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    found = solve(problem, smallest_memory=True)
    assert found is not None
    assert found.peak_bytes == min(evaluate(problem, *c)[1] for c in all_choices(problem))


def test_exact_means_come_first() -> None:
    problem = random_problem(3)
    flops, peak = evaluate(problem, range(5), (), ())
    free = solve(problem)
    assert free is not None
    assert (free.train, free.compressed, free.recomputed) == ((0, 1, 2, 3, 4), (), ())
    exact = without_compression(problem)
    recomputed = solve(exact, memory_limit=evaluate(exact, range(5), (), (0, 1, 2))[1], train_all=True)
    assert recomputed is not None
    assert len(recomputed.train) == 5
    assert not recomputed.compressed


def test_what_is_decided_is_trained_and_nothing_else() -> None:
    problem = replace(without_compression(random_problem(4)), importance=(0.0, 1.0, 0.0, 1.0, 0.0))
    for options in ({}, {"smallest_memory": True}):
        found = solve(problem, train_all=True, **options)  # type: ignore[arg-type]
        assert found is not None
        assert found.train == (1, 3)


def test_flops_are_kept_to_the_last_one() -> None:
    """Of three tensors that cost 10^9, two and a FLOP less are affordable: less than what HiGHS tells from two."""
    costs = BackwardCosts(("a", "b", "c"), 10**9, tuple((1 << k, 10**9) for k in range(3)), (10**9,) * 3)
    problem = Problem(costs, (1.0, 1.0, 1.0), (TensorBytes(1, 1, 0),) * 3, ((1, 1),), (0,), 1)
    found = solve(problem, flops_limit=3 * 10**9 - 1)
    assert found is not None
    assert found.step_flops == 2 * 10**9


def test_segments_without_flops_are_computed_again_only_where_memory_needs_it() -> None:
    costs = BackwardCosts(("a",), 10, ((1, 10),), (10,))
    problem = Problem(costs, (1.0,), (TensorBytes(1, 1, 0),), ((50, 0), (40, 0)), (0, 0), 1)
    for limit, recomputed in ((None, ()), (200, ()), (60, (0,))):
        found = solve(problem, memory_limit=limit)
        assert found is not None
        assert found.recomputed == recomputed


def test_two_threads_leave_the_standard_output_where_it_was() -> None:
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with quiet():
            first_in.set()
            second_in.wait(0.2)  # it is let in only later
        first_out.set()

    def second() -> None:
        first_in.wait()
        with quiet():
            second_in.set()
            first_out.wait()

    before, saved = os.fstat(1), os.dup(1)
    threads = [threading.Thread(target=run) for run in (first, second)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert os.path.samestat(os.fstat(1), before)
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def fails_inside(close: str) -> None:
    """What fails inside fails as it would."""
    print("text that is not written yet")
    exec(close, {"os": os, "sys": sys})
    try:
        with quiet():
            raise OSError("inside")
    except OSError as error:
        os._exit(str(error) != "inside")


@pytest.mark.parametrize("close", ["os.close(1)", "os.close(1); sys.stdout = None", "sys.stdout.close()", "sys.stdout = None"])
def test_where_there_is_no_standard_output_nothing_is_silenced(close: str) -> None:
    assert ended(fails_inside, close) == 0
