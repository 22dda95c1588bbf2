"""Heads in chunks as Inductor compiles them: for batches of several sizes, with the peak that is predicted."""

from __future__ import annotations

import copy

import torch
from graphopt.passes import LinearCrossEntropy

import graphopt
from graphopt.analysis.step_memory import step_memory
from tests.measure import peak_and_rest
from tests.passes.linear_cross_entropy.test_technique import LanguageModel, batch


def test_gradients_and_the_predicted_peak() -> None:
    torch.manual_seed(0)
    model, inputs = LanguageModel("returned", vocabulary=400), batch(4, 64, 400, ignored=20)
    eager = copy.deepcopy(model)
    opt = graphopt.optimize(model, inputs, passes=[LinearCrossEntropy(8)], outputs="loss")
    for step, (samples, tokens) in enumerate(((4, 64), (3, 50), (7, 33))):
        inputs = batch(samples, tokens, 400, ignored=20)
        for run in (opt, eager):
            run.zero_grad()
            run(*inputs)[0].backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert opt.last_step is not None
        assert opt.last_step.reports[0].changes.changed == ("head.weight",)
        if step == 0:
            memory = step_memory(opt.last_step.graph, "inductor", None)

            def again(inputs: tuple[torch.Tensor, ...] = inputs) -> None:
                opt(*inputs)[0].backward()
                opt.zero_grad()

            again()
            measured = peak_and_rest(again)[0]
            assert abs(memory.peak_bytes - memory.static_bytes - measured) <= 0.01 * measured
    assert opt.counters.compilations == 2
    assert not opt.report.notes
