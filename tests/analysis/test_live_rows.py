"""Live rows: what the graph says of a weight's gradient, against the rows that eager autograd hands to its layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from graphopt.analysis.live_rows import Rows, live_parts
from tests import zoo

B, T, D = 3, 6, 10
"""Samples, tokens and features of the models that are written here."""


class Norm(nn.Module):
    """RMSNorm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rows_there_are(model: nn.Module, inputs: Any) -> dict[str, float]:
    """By parameter, the part of the rows of its layer's output whose gradient is not zero everywhere."""
    seen: dict[nn.Module, list[Tensor]] = {}

    def watch(module: nn.Module, _: Any, output: Tensor) -> None:
        rows = torch.zeros(output.shape[:-1], dtype=torch.bool)
        seen.setdefault(module, []).append(rows)

        def note(gradient: Tensor) -> None:
            rows.copy_(gradient.ne(0).any(-1))

        if output.requires_grad:
            output.register_hook(note)

    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.LayerNorm, Norm))}
    handles = [layer.register_forward_hook(watch) for layer in layers.values()]
    zoo.loss_of(zoo.call(model, inputs)).backward()
    for handle in handles:
        handle.remove()
    parts = {name: torch.cat([r.flatten() for r in seen[m]]).double().mean().item() for name, m in layers.items() if m in seen}
    return {f"{name}.{own}": part for name, part in parts.items() for own, _ in layers[name].named_parameters(recurse=False)}


def both(model: nn.Module, inputs: Any) -> tuple[dict[str, float], dict[str, float]]:
    """By parameter, what the graph says and what there is, in double precision."""
    cast = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
    inputs = {k: cast(v) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(map(cast, inputs))
    model = zoo.without_dropout(model).double().train()
    said, there = live_parts(graphopt.analyze(model, inputs).graph), rows_there_are(model, inputs)
    names = [name for name in there if name in said]
    assert names
    return {name: said[name] for name in names}, {name: there[name] for name in names}


def assert_live_parts_hold(model: nn.Module, inputs: Any, exactly: bool = False) -> dict[str, float]:
    """See that the graph never says fewer rows than there are; `exactly`: nor more. Returns what it says."""
    said, there = both(model, inputs)
    if exactly:
        assert said == pytest.approx(there)
    else:
        assert {name: (said[name], there[name]) for name in said if said[name] < there[name] - 1e-9} == {}
    return said


# Models of transformers.


def reads_one_token(said: dict[str, float], layers: str, all_tokens: tuple[str, ...], tokens: int) -> None:
    """See that of the last of two layers what `all_tokens` names learns from all of them and the rest from one."""
    last = {name.removeprefix(f"{layers}.1."): part for name, part in said.items() if name.startswith(f"{layers}.1.")}
    assert last == pytest.approx({name: 1 if name.startswith(all_tokens) else 1 / tokens for name in last})
    assert {part for name, part in said.items() if name.startswith(f"{layers}.0.")} == {1.0}


def test_a_bert_that_classifies_has_one_live_row_per_sample_above_its_last_attention() -> None:
    model, inputs = zoo.make("bert", B)
    said = assert_live_parts_hold(model, inputs, exactly=True)
    reads_one_token(said, "bert.encoder.layer", ("attention.self.key", "attention.self.value"), tokens=12)
    assert said["bert.pooler.dense.weight"] == said["classifier.weight"] == 1.0


def test_a_vit_reads_its_class_token() -> None:
    said = assert_live_parts_hold(*zoo.make("vit", B), exactly=True)
    reads_one_token(said, "vit.layers", ("layernorm_before", "attention.k_proj", "attention.v_proj"), tokens=5)
    assert said["vit.layernorm.weight"] == pytest.approx(1 / 5)


def test_a_distilbert_reads_its_first_token() -> None:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(dim=16, hidden_dim=24, n_layers=2, n_heads=2, vocab_size=zoo.VOCABULARY)
    inputs = {"input_ids": zoo.tokens(B), "labels": torch.randint(0, 2, (B,))}
    said = assert_live_parts_hold(DistilBertForSequenceClassification(config), inputs, exactly=True)
    reads_one_token(said, "distilbert.transformer.layer", ("attention.k_lin", "attention.v_lin"), tokens=12)


def test_every_row_of_a_causal_model_is_live() -> None:
    model, inputs = zoo.make("llama", B)
    assert set(live_parts(graphopt.analyze(model, inputs).graph).values()) == {1.0}
    there = rows_there_are(model, inputs)
    assert min(there.values()) == pytest.approx(
        11 / 12
    )  # a last token has nothing to predict, which its label says, not the graph


def test_a_token_that_is_found_in_the_batch_may_be_any() -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                         vocab_size=zoo.VOCABULARY, pad_token_id=0)  # fmt: skip
    assert_live_parts_hold(
        LlamaForSequenceClassification(config), {"input_ids": zoo.tokens(B), "labels": torch.randint(0, 2, (B,))}
    )


def test_rows_of_a_conv_net_are_all_live() -> None:
    model, inputs = zoo.make("cnn", B, torch.float64)
    assert set(assert_live_parts_hold(model, inputs, exactly=True).values()) == {1.0}
    assert set(live_parts(graphopt.analyze(model, inputs).graph).values()) == {1.0}


# Models written here: a body, from tokens to tokens, and what is read of it.

Body = Callable[["Reading", Tensor], Tensor]


class Reading(nn.Module):
    """Reads a part of what a body makes of tokens."""

    def __init__(self, body: Body, read: Callable[[Tensor], Tensor], top: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(5))
        self.norms = nn.ModuleList(Norm(D) for _ in range(3))
        self.top = nn.Linear(D, 3) if top else nn.Identity()
        self.body, self.read = body, read

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.top(self.read(self.body(self, x)))).square().sum()


def mlp(m: Reading, x: Tensor) -> Tensor:
    return m.layers[1](F.gelu(m.layers[0](x)))


def parts_of(body: Body, read: Callable[[Tensor], Tensor], exactly: bool = True, top: bool = True) -> dict[str, float]:
    """By layer of the body, what is said of its weight."""
    said = assert_live_parts_hold(Reading(body, read, top), (torch.randn(B, T, D),), exactly)
    return {name.removesuffix(".weight"): part for name, part in said.items() if name.endswith("weight") and "top" not in name}


@pytest.mark.parametrize(
    ("read", "part"),
    [
        (lambda x: x[:, -1], 1 / 6),
        (lambda x: x[:, :1].squeeze(1), 1 / 6),
        (lambda x: x[:, ::2], 1 / 2),
        (lambda x: x[:, 2:5].mean(1), 1 / 2),
        (lambda x: x.narrow(1, 1, 4), 2 / 3),
        (lambda x: x[:1], 1 / 3),
        (lambda x: x.flatten(0, 1)[:3], 1 / 6),
        (lambda x: x[:, 0] * x[:, 0, :1], 1 / 6),
        (lambda x: x.mean(1), 1),
        (lambda x: x, 1),
        (lambda x: x[:, :, ::2].repeat(1, 1, 2), 1),  # columns are not rows
    ],
)
def test_what_is_read_is_live_down_to_the_first_layer(read: Callable[[Tensor], Tensor], part: float) -> None:
    assert parts_of(mlp, read) == pytest.approx({"layers.0": part, "layers.1": part})


def test_rows_in_one_read_of_several_are_all_taken_to_be_live() -> None:
    parts = parts_of(mlp, lambda x: x[:, 0] + x[:, 1], exactly=False)
    assert min(parts.values()) >= 1 / 3


def test_layers_that_are_read_at_different_tokens_have_one_row_each() -> None:
    parts = parts_of(lambda m, x: m.layers[0](x)[:, 0] + m.layers[1](x)[:, 3], lambda x: x)
    assert parts == pytest.approx({"layers.0": 1 / 6, "layers.1": 1 / 6})


def test_a_layer_that_is_used_twice_has_no_fewer_than_the_rows_of_both_uses() -> None:
    parts = parts_of(lambda m, x: m.layers[0](torch.tanh(m.layers[0](x))), lambda x: x[:, 0], exactly=False)
    assert parts["layers.0"] == pytest.approx(1 / 3)  # of as many rows as one use has


def test_nothing_is_live_where_nothing_is_read() -> None:
    assert set(parts_of(mlp, lambda x: x[:, T:].sum(1)).values()) == {0.0}


def test_tensors_that_are_transposed_in_between_keep_their_rows() -> None:
    parts = parts_of(lambda m, x: m.layers[1](torch.tanh(m.layers[0](x).transpose(0, 1))), lambda x: x[2])
    assert parts == pytest.approx({"layers.0": 1 / 6, "layers.1": 1 / 6})


def residual(m: Reading, x: Tensor) -> Tensor:
    x = x + m.layers[1](F.silu(m.layers[0](m.norms[0](x))))
    return m.norms[2](x + m.layers[3](F.gelu(m.layers[2](m.norms[1](x)))))


def test_a_norm_by_hand_is_never_said_to_have_fewer_rows_than_there_are() -> None:
    """Whatever lies below one may be said to be live as a whole: the gradient of its mean is expanded along the features."""
    assert parts_of(residual, lambda x: x[:, 0], exactly=False)["norms.2"] == pytest.approx(1 / T)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(D), -1) @ v


def by_bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2).flatten(2) for t in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v).unflatten(-1, (2, -1)).transpose(1, 2)


@pytest.mark.parametrize(
    ("attend", "read"),
    [
        (by_hand, lambda x: x[:, 0]),
        (by_bmm, lambda x: x[:, 1:4]),
        (F.scaled_dot_product_attention, lambda x: x[:, 0]),
        (F.scaled_dot_product_attention, lambda x: x[:, 1:4]),
    ],
)
def test_of_attention_the_queries_of_unread_tokens_are_dead_and_keys_and_values_are_not(
    attend: Callable[..., Tensor], read: Callable[[Tensor], Tensor]
) -> None:
    def attention(m: Reading, x: Tensor) -> Tensor:
        x = m.layers[4](x)
        q, k, v = (m.layers[i](x).unflatten(-1, (2, -1)).transpose(1, 2) for i in range(3))
        return x + m.layers[3](attend(q, k, v).transpose(1, 2).flatten(2))

    part = read(torch.zeros(B, T, D)).numel() / (B * T * D)
    expected = {"layers.0": part, "layers.1": 1, "layers.2": 1, "layers.3": part, "layers.4": 1}
    assert parts_of(attention, read) == pytest.approx(expected)


# Where rows are mixed, or meet the sizes of other tensors.


class Noisy(torch.autograd.Function):
    """Adds to the gradient, in every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * ctx.saved_tensors[0]


class Clamped(Noisy):
    """Has a gradient of at least 0.1 in every row."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(0.1, 1.0)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over tokens": lambda x: torch.softmax(x, 1),
    "norm over tokens and features": lambda x: F.layer_norm(x, (T, D)),
    "product over tokens": lambda x: torch.ones(T, T, dtype=x.dtype) @ x,
    "sum over tokens": lambda x: x + x.sum(1, keepdim=True),
    "noise in the gradient": lambda x: Noisy.apply(x),
    "clamped gradient": lambda x: Clamped.apply(x),
    "tokens and features change places": lambda x: x.transpose(1, 2).reshape(-1, T, D),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_makes_them_all_live(name: str) -> None:
    parts = parts_of(lambda m, x: MIXING[name](mlp(m, x)), lambda x: x[:, 0], exactly=False)
    assert set(parts.values()) == {1.0}


STRADDLING: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of 12": lambda x: x.reshape(-1, 5, 12)[:, 0],
    "rows of 15": lambda x: x.reshape(-1, 4, 15)[:, 3],
    "rows of 2": lambda x: x.reshape(-1, 30, 2)[:, 3],
    "transposed rows of 12": lambda x: x.transpose(1, 2).reshape(-1, 5, 12)[:, 0],
}


@pytest.mark.parametrize("name", STRADDLING)
@pytest.mark.parametrize("below", [lambda x: x, lambda x: torch.softmax(F.layer_norm(x, (D,)), -1)])
def test_rows_that_end_within_those_of_a_layer_are_not_miscounted(name: str, below: Callable[[Tensor], Tensor]) -> None:
    parts_of(lambda m, x: below(mlp(m, x)), STRADDLING[name], exactly=False, top=False)


def test_rows_are_not_miscounted_by_a_sum_over_parts_of_them() -> None:
    def spread(m: Reading, x: Tensor) -> Tensor:
        return m.layers[1](torch.tanh(m.layers[0](x)))[..., :3, None].expand(-1, -1, -1, 4).reshape(-1, 12, T)

    parts_of(spread, lambda x: x[:, 1], exactly=False, top=False)


Step = Callable[[Tensor], Tensor]


class Steps(nn.Module):
    """Functions one after another, with their modules."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return torch.tanh(x).square().sum()


class Residual(nn.Module):
    """x + W gelu(x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(F.gelu(x))


@st.composite
def random_steps(draw: st.DrawFn) -> list[Step]:
    """Mostly what computes row by row, with reads, views and what mixes rows in between."""
    tokens, width = T, 4
    steps: list[Step] = [nn.Linear(width, width)]
    for _ in range(draw(st.integers(2, 5))):
        kind = draw(st.sampled_from(["linear", "tanh", "residual", "norm", "read", "read", "view", "swap", "softmax", "widen"]))
        if kind == "linear":
            wider = draw(st.sampled_from([2, 3, 4, 6]))
            steps.append(nn.Linear(width, wider))
            width = wider
        elif kind == "tanh":
            steps.append(torch.tanh)
        elif kind == "residual":
            steps.append(Residual(width))
        elif kind == "norm":
            over_all = nn.LayerNorm((tokens, width), elementwise_affine=False)
            steps.append(draw(st.sampled_from([nn.LayerNorm(width), Norm(width), over_all])))
        elif kind == "softmax":
            dim = draw(st.sampled_from([1, 2]))
            steps.append(lambda x, dim=dim: torch.softmax(x, dim))  # type: ignore[misc]
        elif kind == "read":
            start, step = draw(st.integers(0, tokens - 1)), draw(st.integers(1, 2))
            stop = draw(st.integers(start + 1, tokens))
            steps.append(lambda x, start=start, stop=stop, step=step: x[:, start:stop:step])  # type: ignore[misc]
            tokens = len(range(start, stop, step))
        elif kind == "swap":
            steps.append(lambda x: x.transpose(1, 2))
            tokens, width = width, tokens
        elif kind == "widen":
            steps.append(lambda x: x.unsqueeze(-1).expand(-1, -1, -1, 2).flatten(2))
            width *= 2
        else:
            other = draw(st.sampled_from([n for n in range(1, tokens * width + 1) if tokens * width % n == 0]))
            tokens, width = tokens * width // other, other
            steps.append(lambda x, shape=(tokens, width): x.reshape(-1, *shape))  # type: ignore[misc]
    return steps


@given(random_steps())
@settings(max_examples=15)
def test_no_stack_of_layers_and_reads_has_more_live_rows_than_are_said(steps: list[Step]) -> None:
    torch.manual_seed(0)
    assert_live_parts_hold(Steps(steps), (torch.randn(B, T, 4),))


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_the_part_of_rows_is_that_of_the_elements_they_stand_for(inner: int, size: int, data: st.DataObject) -> None:
    kept = data.draw(st.tuples(st.integers(0, size), st.integers(0, size), st.integers(1, 3)))
    rows = Rows(inner, size, kept)
    elements = torch.zeros(2, size, inner)
    elements[:, slice(*kept)] = 1
    assert rows.part == pytest.approx(elements.mean().item())
