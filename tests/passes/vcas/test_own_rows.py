"""Samples that are picked by number, as `x[torch.arange(batch), positions]` does: below a boundary they have other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphopt.passes import DeadRows, Vcas, run_pass
from graphopt.passes.vcas import ROWS
from torch import Tensor, nn

import graphopt
from graphopt import PassError
from graphopt.analysis.batch_dims import carries_batch
from graphopt.calls import as_call
from graphopt.capture import capture_to_run
from graphopt.graph import TrainingGraph
from tests.draws import eager_gradients, expectation
from tests.long_forms import long
from tests.zoo import tokens

Pool = Callable[[Tensor, Tensor], Tensor]

BATCH, LENGTH = 6, 8


def numbers(hidden: Tensor) -> Tensor:
    return torch.arange(len(hidden))


class Pooled(nn.Module):
    """A layer for each token, some tokens of each sample, and layers above them."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 5)
        self.third, self.head = nn.Linear(5, 5), nn.Linear(5, 2)
        self.pool = pool
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.third(self.pool(hidden, positions)))).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, 3, dtype=torch.float64, generator=generator)
    return x, torch.tensor([4, 0, 7, 2, 0, 5])


def marked(hidden: Tensor, positions: Tensor) -> Tensor:
    marked = hidden.clone()
    marked[numbers(hidden), positions] = 1.0
    return marked


def without_some(hidden: Tensor, positions: Tensor) -> Tensor:
    kept = hidden.clone()
    kept[torch.arange(LENGTH) == positions[:, None]] = 0.0
    return kept


def of_samples_and_tokens(hidden: Tensor, _: Tensor) -> Tensor:
    samples = torch.arange(hidden.shape[0] * LENGTH).view(-1, LENGTH)[:, ::2]
    return hidden.flatten(0, 1)[samples]


OWN: dict[str, Pool] = {
    "one of each": lambda h, at: h[numbers(h), at],
    "the last": lambda h, at: h[numbers(h), -1] * at[:, None],
    "several of each": lambda h, at: h[numbers(h)[:, None], torch.stack([at, (at + 3) % LENGTH], 1)],
    "one after the other": lambda h, at: h[numbers(h)[:, None].expand(-1, 2).reshape(-1), at.repeat_interleave(2)],
    "of 32 bits, from a start": lambda h, at: h[torch.arange(0, len(h), dtype=torch.int32).long(), at],
    "tokens by a sample's number": lambda h, at: h[numbers(h), numbers(h)],
    "tokens first": lambda h, at: h.transpose(0, 1)[at, numbers(h)],
    "gathered": lambda h, at: h.gather(0, numbers(h)[:, None, None].expand_as(h)),
    "selected": lambda h, at: h.index_select(0, numbers(h)),
    "overwritten": marked,
    "by truth values": without_some,
    "flattened": of_samples_and_tokens,
}  # fmt: skip


def assert_unbiased_at_all_boundaries(model: nn.Module, inputs: Any, before: tuple[Any, ...] = (), single: float = 1.0) -> None:
    """One boundary keeps half of the rows, then two of them keep fewer and fewer; the first is above what is picked."""
    graph = capture_to_run(model, *as_call(inputs))
    for rewrite in before:
        graph, report = run_pass(rewrite, graph, [site.name for site in rewrite.applicable(graph)])
        assert report.changes.changed
    sites = [site.name for site in Vcas().applicable(graph) if site.name.startswith(ROWS)]
    exact = eager_gradients(model, inputs)
    largest = max(float(g.abs().max()) for g in exact.values())
    for ratios in ({sites[0]: 0.5}, {sites[0]: 5 / 6, sites[-1]: 0.5}):
        rewritten, report = run_pass(Vcas(), graph, ratios)
        assert set(report.changes.changed) == set(ratios)
        assert report.step_flops_after < report.step_flops_before
        mean = expectation(rewritten, model, inputs)
        assert mean.keys() == exact.keys()
        for key, gradient in exact.items():
            torch.testing.assert_close(mean[key], gradient, rtol=1e-9 * single, atol=1e-10 * single * largest)


@pytest.mark.parametrize("name", OWN)
def test_samples_that_are_picked_by_their_own_numbers_are_unbiased_over_all_draws(name: str) -> None:
    model, inputs = Pooled(OWN[name]), batch()
    assert_unbiased_at_all_boundaries(model, inputs)
    opt = graphopt.optimize(model, inputs, passes=[Vcas(keep_rows=0.5)], backend="aot_eager")
    opt(*inputs).backward()
    assert opt.last_step is not None
    assert opt.last_step.sampled_part < 1
    assert not opt.report.notes


def test_with_rows_left_out_below_what_is_picked() -> None:
    assert_unbiased_at_all_boundaries(Pooled(OWN["one of each"]), batch(), (DeadRows(),))


def picks_below_a_boundary(graph: TrainingGraph) -> bool:
    """Whether rows are put back on fewer samples than the batch has."""
    found = [node for node in graph.graph.nodes if "index_put" in str(node.target)]
    return any(not carries_batch(graph, node.meta["val"]) for node in found)


@pytest.mark.parametrize("name", ["gpt2", *long("llama")])
def test_classifiers_that_read_the_last_token_of_each_text(name: str) -> None:
    """With as many classes as here the boundary is above the pooling."""
    from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 97, "num_labels": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2ForSequenceClassification(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, **dropout, **common))
    else:
        size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForSequenceClassification(LlamaConfig(max_position_embeddings=16, **size, **common))
    model.double()
    ids = tokens(BATCH, LENGTH).clamp(min=3)
    ids[1, 3:] = ids[4, 6:] = 0
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.arange(BATCH) * 5}
    graph = capture_to_run(model, *as_call(inputs))
    rewrite = Vcas(keep_rows=0.5)
    assert picks_below_a_boundary(run_pass(rewrite, graph, rewrite.ratios(graph))[0])
    assert_unbiased_at_all_boundaries(model, inputs, single=1e4)  # norms of llama compute in float32


NOT_OWN: dict[str, tuple[Pool, str]] = {
    "of one sample twice": (lambda h, at: h[torch.arange(len(h)) // 2, at], "index_put"),
    "in another order": (lambda h, at: h[torch.arange(len(h)).flip(0), at], "index_put"),
    "the second half": (lambda h, _: h[:, :2].flatten(0, 1)[torch.arange(len(h), 2 * len(h))], "index_put"),
    "numbers of the data": (lambda h, at: h[at.clamp(max=1)], "index_put"),
    "samples after tokens": (lambda h, at: h[numbers(h).expand(2, -1).reshape(-1), at.repeat(2)], "index_put"),
    "of samples and tokens": (lambda h, at: h.flatten(0, 1)[numbers(h) * LENGTH + at], "index_put"),
    "first rows of all": (lambda h, at: h.flatten(0, 1)[numbers(h)] * at[:, None], "index_put"),
    "of twice as many": (lambda h, _: h.flatten(0, 1)[torch.arange(len(h) * LENGTH)[: len(h)]], "index_put"),
    "gathered": (lambda h, at: h.gather(0, at[:, None, None].clamp(max=1).expand_as(h)), "scatter_add"),
    "selected": (lambda h, at: h.index_select(0, at.clamp(max=1)), "index_add"),
    "taken": (lambda h, at: h.take((numbers(h) * LENGTH + at)[:, None] * 5 + torch.arange(5)), "put"),
    "looked up": (lambda h, at: nn.functional.embedding(numbers(h) * LENGTH + at, h.flatten(0, 1)), "embedding_dense_backward"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_OWN)
def test_samples_that_may_be_others_are_refused_with_what_to_do(name: str) -> None:
    pool, operator = NOT_OWN[name]
    with pytest.raises(PassError, match=rf"cannot be sampled: aten.{operator}.* torch.arange\(batch size\)"):
        graphopt.optimize(Pooled(pool), batch(), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")


class Bags(nn.Module):
    """A classifier of bags of words."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(9, 5, mode=mode)
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 2)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.bags(ids))))).square().mean()


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_bags_of_embeddings_are_refused_before_their_kernel_reads_outside_of_the_rows_that_are_left(mode: str) -> None:
    with pytest.raises(PassError, match=r"cannot be sampled: aten._embedding_bag.* average what nn.Embedding gives"):
        graphopt.optimize(Bags(mode), (tokens(BATCH, 4) % 9,), passes=[Vcas(keep_rows=0.5)], backend="aot_eager")


def test_the_largest_of_bags_goes_by_rows_of_the_table() -> None:
    assert_unbiased_at_all_boundaries(Bags("max"), (tokens(BATCH, 4) % 9,))
