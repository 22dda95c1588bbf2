"""Boundaries: where blocks begin, found from structure alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from graphopt.passes.vcas.boundaries import Boundary, find_boundaries, longest_run
from hypothesis import given, strategies as st
from torch import Tensor, nn

from graphopt.analysis.batch_dims import BatchDim, NoRows, batch_dim
from graphopt.calls import as_call
from graphopt.capture import capture, capture_to_run
from graphopt.transforms.symbolic_zeros import for_loss_alone
from tests import zoo
from tests.long_forms import long


def boundaries_of(model: nn.Module, inputs: Any) -> tuple[Boundary, ...]:
    return find_boundaries(for_loss_alone(capture_to_run(model, *as_call(inputs))))


BLOCKS = {
    "mlp": ["third", "second", "first"],
    "bert": ["bert.encoder.layer.1", "bert.encoder.layer.0"],
    "vit": ["vit.layers.1", "vit.layers.0"],
    "llama": ["lm_head", "model.layers.1", "model.layers.0"],
    "gpt2": ["transformer.wte", "transformer.h.1", "transformer.h.0"],
}


@pytest.mark.parametrize(
    ("name", "dropout"),
    [  # an MLP and Llama have no dropout
        *(("mlp", False), ("bert", True), ("llama", False), ("gpt2", True)),
        *long(("bert", False), ("vit", True), ("vit", False), ("gpt2", False)),
    ],
)
def test_blocks_have_a_boundary_each(name: str, dropout: bool) -> None:
    names, options = BLOCKS[name], {} if name in ("mlp", "bert") else {"layers": 2}
    found = boundaries_of(*zoo.make(name, 6, dropout=dropout, **options))
    assert [b.name for b in found] == names
    assert [b.parent for b in found] == [None, *range(len(names) - 1)]
    counts = [len(b.parameters) for b in found]
    assert counts == sorted(counts, reverse=True)


def test_names_are_not_looked_at() -> None:
    class Renamed(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            for i, child in enumerate(model.children()):
                setattr(self, f"x{i}", child)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            hidden = torch.relu(self.x1(torch.relu(self.x0(x))))
            return nn.functional.cross_entropy(self.x2(hidden), labels)

    model, inputs = zoo.make("mlp", 6)
    assert [b.name for b in boundaries_of(Renamed(model), inputs)] == ["x2", "x1", "x0"]


def test_an_encoder_and_its_decoder_are_two_branches() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=16, d_ff=24, num_layers=2, num_heads=2, d_kv=8, vocab_size=50, decoder_start_token_id=0)
    model = zoo.without_dropout(T5ForConditionalGeneration(config)).train()
    found = boundaries_of(model, {"input_ids": zoo.tokens(6) % 50, "labels": zoo.tokens(6, 5) % 50})
    names = [b.name for b in found]
    for side in ("encoder", "decoder"):
        mine = [b for b in found if b.name.startswith(f"{side}.block")]
        assert len(mine) >= 2, names
        for upper, lower in itertools.pairwise(mine):
            assert set(lower.parameters) < set(upper.parameters) or upper.parent == lower.parent
    assert any(not set(a.parameters) & set(b.parameters) for a in found for b in found)


def test_a_frozen_bottom_still_ends_in_whole_blocks() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, vocab_size=zoo.VOCABULARY
    )
    model, (_, inputs) = BertForSequenceClassification(config), zoo.make("bert", 6)
    for name, parameter in model.named_parameters():
        if "embeddings" in name:
            parameter.requires_grad_(False)
    assert [b.name for b in boundaries_of(model, inputs)] == [f"bert.encoder.layer.{i}" for i in (2, 1, 0)]


@given(st.integers(0, 3), st.integers(1, 4), st.integers(2, 6), st.integers(0, 3))
def test_the_longest_run_is_found(before: int, period: int, count: int, after: int) -> None:
    pattern = [f"p{i}" for i in range(period)]
    kinds = [f"a{i}" for i in range(before)] + pattern * count + [f"z{i}" for i in range(after)]
    assert longest_run(kinds) == (before, period, count)


def test_nothing_repeats() -> None:
    assert longest_run([]) is None
    assert longest_run(["a", "b", "c"]) is None


def test_where_the_batch_is() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            pairs = hidden.flatten(1) @ hidden.flatten(1).T
            return (hidden.flatten(0, 1) ** 2).sum() + pairs.sum() + hidden.transpose(0, 1).exp().sum()

    graph = capture(Net(), (torch.randn(6, 3, 4),))
    dims: dict[str, Any] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            try:
                dims[node.name] = batch_dim(graph, value)
            except NoRows:
                dims[node.name] = "pairs"
    assert "pairs" in dims.values()
    assert BatchDim(0, 1) in dims.values()
    assert BatchDim(0, 3) in dims.values()
    assert BatchDim(1, 1) in dims.values()
    assert None in dims.values()
