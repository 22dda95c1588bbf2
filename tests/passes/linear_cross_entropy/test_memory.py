"""The number of chunks where memory is limited."""

from __future__ import annotations

import copy

import torch
from graphopt.passes import LinearCrossEntropy, Recompute

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.frontend.running import FIRST_CALLS
from graphopt.planner.memory_limit import MemoryLimit
from tests.measure import peak_and_rest
from tests.passes.linear_cross_entropy.test_technique import LanguageModel, batch


def test_a_limit_is_met_by_as_few_chunks_as_it_needs() -> None:
    """4 x 64 logits of 400 numbers each and their gradients are most of a step; nothing is recomputed or left untrained."""
    inputs = batch(4, 64, 400)
    eager = LanguageModel(vocabulary=400)
    eager(*inputs).backward()
    peaks, chunks = [], []
    free = graphopt.optimize(copy.deepcopy(eager), inputs, backend="aot_eager")
    free(*inputs).backward()
    assert free.last_step is not None
    whole = MemoryLimit(0, "aot_eager").peak_of(free.last_step.graph, 4)
    for part in (0.9, 0.3, 0.2):
        model = copy.deepcopy(eager)
        model.zero_grad()
        limit = int(part * whole)
        opt = graphopt.optimize(model, inputs, graphopt.Budget(memory=limit), backend="aot_eager")
        opt(*inputs).backward()
        assert opt.last_step is not None
        peaks.append(MemoryLimit(0, "aot_eager").peak_of(opt.last_step.graph, 4))
        assert peaks[-1] <= limit
        assert list(opt.report.passes) == ["linear_cross_entropy"]
        chunks.append(opt.report.sections["linear_cross_entropy"]["chunks"]["head.weight"])
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert chunks == [2, 4, 8]


def test_the_predicted_peak_is_what_the_allocator_says() -> None:
    for form in ("mean", "returned", "smoothed"):
        inputs = batch(4, 64, 400, ignored=20)
        opt = graphopt.optimize(LanguageModel(form, vocabulary=400), inputs, passes=[LinearCrossEntropy(8)], backend="aot_eager")

        def step(opt: graphopt.OptimizedModule = opt, inputs: tuple[torch.Tensor, ...] = inputs) -> None:
            output = opt(*inputs)
            (output[0] if isinstance(output, tuple) else output).backward()
            opt.zero_grad()

        for _ in range(FIRST_CALLS + 1):  # the first ones keep the state of the random numbers, too
            step()
        assert opt.last_step is not None
        memory = step_memory(opt.last_step.graph, "aot_eager", None)
        measured = peak_and_rest(step)[0]
        assert abs(memory.peak_bytes - memory.static_bytes - measured) <= 0.01 * measured


def test_a_chunk_of_its_own_number_is_kept() -> None:
    inputs = batch(4, 64, 400)
    passes = [Recompute(), LinearCrossEntropy(2)]
    opt = graphopt.optimize(LanguageModel(vocabulary=400), inputs, graphopt.Budget(memory="1GiB"), passes, backend="aot_eager")
    opt(*inputs).backward()
    assert opt.report.sections["linear_cross_entropy"]["chunks"] == {"head.weight": 2}
