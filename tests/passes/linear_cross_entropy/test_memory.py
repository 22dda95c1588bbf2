"""The number of chunks where memory is limited."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from graphopt.passes import LinearCrossEntropy, Recompute, run_pass
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphopt
from graphopt.analysis.step_memory import step_memory
from graphopt.capture import capture_to_run
from graphopt.frontend.running import FIRST_CALLS
from graphopt.planner.memory_limit import MemoryLimit
from graphopt.planner.product_times import ProductTimes
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


def test_a_head_that_is_left_whole_stays_whole_in_the_graph_for_any_batch() -> None:
    """It was computed in one chunk there, after a smaller batch: elsewhere that took 24 % more than the limit."""
    inputs = batch(4, 64, 400)
    opt = graphopt.optimize(LanguageModel(vocabulary=400), inputs, graphopt.Budget(memory="1GiB"), backend="aot_eager")

    def peak() -> int:
        def step() -> None:
            opt(*inputs).backward()
            opt.zero_grad()

        for _ in range(FIRST_CALLS + 1):
            step()
        return peak_and_rest(step)[0]

    planned = peak()
    opt(*batch(3, 64, 400)).backward()
    opt.zero_grad()
    assert abs(peak() - planned) <= 2**10
    assert opt.last_step is not None
    assert all(node.target is not torch.ops.graphopt.by_tokens.default for node in opt.last_step.graph.graph.nodes)


class Two(nn.Module):
    """A head of 400 classes, and one of 20."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.large, self.small = nn.Embedding(400, 8), nn.Linear(8, 400), nn.Linear(8, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(ids).flatten(0, 1)
        loss = nn.functional.cross_entropy(self.large(hidden), labels.flatten())
        return loss + nn.functional.cross_entropy(self.small(hidden), labels.flatten() % 20)


@pytest.mark.parametrize("passes", ["auto", [LinearCrossEntropy()]], ids=["auto", "named"])
def test_a_graph_for_any_batch_has_those_heads_in_chunks_that_were_worth_it(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.LEAST_BYTES", 500_000)
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.FEWEST_TOKENS", 8)
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.SLOWER", 1e3)
    opt = graphopt.optimize(Two(), batch(8, 32, 400, 0), passes=passes, backend="aot_eager")
    changed = []
    for samples in (8, 3, 2, 8):
        opt(*batch(samples, 32, 400, 0)).backward()
        assert opt.last_step is not None
        changed.append([c for report in opt.last_step.reports for c in report.changes.changed])
    assert changed == [["large.weight"]] * 4


def test_chunks_are_those_of_the_plan_however_fast_the_machine_is_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine, or one that goes on from a checkpoint, added up other chunks: not to the bit."""
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.LEAST_BYTES", 500_000)
    monkeypatch.setattr("graphopt.passes.linear_cross_entropy.technique.FEWEST_TOKENS", 8)
    monkeypatch.setattr(ProductTimes, "peak", 1e12)
    planned = []
    for bandwidth in (1e13, 1e10):
        monkeypatch.setattr(ProductTimes, "bandwidth", bandwidth)
        planned.append(graphopt.optimize(Two(), batch(8, 32, 400, 0), passes=[LinearCrossEntropy()], backend="aot_eager"))
    fast, slow = planned
    chunks = []
    for opt in (slow, fast):
        opt(*batch(8, 32, 400, 0)).backward()
        chunks.append(opt.report.sections.get("linear_cross_entropy"))
    fast.save_state(tmp_path / "plan")
    slow.load_state(tmp_path / "plan")
    slow(*batch(8, 32, 400, 0)).backward()
    assert chunks == [None, {"chunks": {"large.weight": 32}}]
    assert slow.report.sections["linear_cross_entropy"] == chunks[1]


def test_small_heads_stay_whole_in_the_graph_for_any_batch() -> None:
    opt = graphopt.optimize(Two(), batch(8, 32, 400, 0), passes=[LinearCrossEntropy()], backend="aot_eager")
    for samples in (8, 3, 8):
        opt(*batch(samples, 32, 400, 0)).backward()
        assert opt.last_step is not None
        assert not opt.last_step.reports[0].changes.changed


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


@pytest.mark.parametrize(("flops_per_byte", "chunks"), [(1.0, 4), (1e4, 2)])
def test_where_memory_is_slow_fewer_chunks_and_more_recomputation_are_chosen(
    flops_per_byte: float, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk adds its part to the weight's gradient: on a GPU, many chunks took longer than the rest of a step."""
    monkeypatch.setattr(ProductTimes, "peak", 1e12)
    monkeypatch.setattr(ProductTimes, "bandwidth", 1e12 / flops_per_byte)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=2048, use_cache=False))
    ids = torch.randint(0, 2048, (4, 64))
    inputs = {"input_ids": ids, "labels": ids.clone()}
    whole = MemoryLimit(0, "aot_eager").peak_of(graphopt.analyze(model, inputs, backend="aot_eager").graph, 4)
    opt = graphopt.optimize(model, inputs, graphopt.Budget(memory=int(0.8 * whole)), backend="aot_eager")
    assert opt.report.sections["linear_cross_entropy"]["chunks"] == {"lm_head.weight": chunks}
    assert ("recompute" in opt.report.passes) == (chunks == 2)
    assert len(opt.selected) == len(list(model.parameters()))
    opt(**inputs).loss.backward()
    assert opt.last_step is not None
    assert MemoryLimit(0, "aot_eager").peak_of(opt.last_step.graph, 4) <= 0.8 * whole


def test_what_is_as_wide_as_logits_is_computed_again_as_before() -> None:
    """Activations of as many numbers as there are classes are seen as matrices, too, and keep their marks."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = ([torch.nn.Linear(16, 96), torch.nn.Linear(96, 16)] for _ in "four")
            self.blocks = torch.nn.ModuleList(torch.nn.ModuleList(block) for block in blocks)
            self.head = torch.nn.Linear(16, 96)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            for wide, narrow in self.blocks:  # type: ignore[misc]
                x = x + narrow(torch.tanh(0.5 * wide(x)) * 0.5)
            return torch.nn.functional.cross_entropy(self.head(x).view(-1, 96), labels.view(-1))

    graph = capture_to_run(Wide(), (torch.randn(8, 32, 16), torch.randint(0, 96, (8, 32))), {}, 0)
    again, _ = run_pass(Recompute(), graph, [site.name for site in Recompute().applicable(graph)])
    both, report = run_pass(LinearCrossEntropy(4), again, ["head.weight"])
    assert report.changes.changed == ("head.weight",)
    least, kept, all_kept = (step_memory(g.clone(), "aot_eager", None).peak_bytes for g in (both, again, graph))
    assert least <= kept < 0.7 * all_kept
