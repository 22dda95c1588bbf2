"""Random chains of layers, rows of whose result are read: every gradient stays what it is."""

from __future__ import annotations

from typing import Any

import torch
from graphopt.passes import DeadRows
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import graphopt
from graphopt.testing import check_pass

SAMPLES, ROWS, MOST_ROWS, WIDTH = 2, 5, 9, 4

LAYERS = [
    "linear", "norm", "gelu", "softmax", "heads", "gate", "table", "attention", "mixture", "rms", "residual", "where", "pair",
    "transposed", "flat", "permuted", "sum", "cat", "half",
]  # fmt: skip
PICKS = ["first", "last", "two", "both", "hidden", "labels", "labels and logits"]


class Chain(nn.Module):
    """Layers in a row; `pick` says what of the result is read."""

    def __init__(self, layers: list[str], pick: str) -> None:
        super().__init__()
        self.layers, self.pick = layers, pick
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(len(layers)))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in layers)
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(MOST_ROWS, WIDTH)) for _ in layers)
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("labels", torch.tensor([-100, 1, -100, -100, 0]))

    def forward(self, x: Tensor) -> Any:
        for kind, linear, norm, table in zip(self.layers, self.linears, self.norms, self.tables, strict=True):
            x = layer(kind, x, linear, norm, table)
        if self.pick.startswith("labels"):
            logits = self.head(x)
            loss = F.cross_entropy(logits.flatten(0, 1), self.labels.expand(x.shape[0], -1).flatten(), reduction="sum")
            return (loss, logits) if self.pick == "labels and logits" else loss
        taken = {
            "first": lambda: x[:, 0], "last": lambda: x[:, -1], "two": lambda: x[:, 1:3].sum(1),
            "both": lambda: x[:, 0] * x[:, 1], "hidden": lambda: x[:, 2],
        }[self.pick]()  # fmt: skip
        loss = self.head(taken).square().sum()
        return (loss, x.detach()) if self.pick == "hidden" else loss


def layer(kind: str, x: Tensor, linear: Any, norm: Any, table: Tensor) -> Tensor:
    """One layer, on samples x rows x width."""
    table = table[: x.shape[1]]
    split = linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
    made = {
        "linear": lambda: linear(x),
        "norm": lambda: norm(x),
        "gelu": lambda: F.gelu(x),
        "softmax": lambda: linear(x).softmax(-1),
        "heads": lambda: (split * 2).transpose(1, 2).flatten(2),
        "gate": lambda: torch.sigmoid(linear(x)) * x,
        "table": lambda: x + table,
        "attention": lambda: F.scaled_dot_product_attention(split, split, split.tanh()).transpose(1, 2).flatten(2),
        "mixture": lambda: torch.softmax(table @ x.transpose(1, 2), -1) @ x,
        "rms": lambda: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * table[0],
        "residual": lambda: x + F.silu(linear(norm(x))),
        "where": lambda: torch.where(x > 0, x, linear(x)),
        "pair": lambda: (linear(x)[..., :2] * x[..., 2:]).repeat(1, 1, 2),
        "transposed": lambda: linear(x.transpose(0, 1)).transpose(0, 1),
        "flat": lambda: linear(x.reshape(-1, WIDTH)).reshape(x.shape),
        "permuted": lambda: (x.permute(2, 0, 1).contiguous() * 0.5).permute(1, 2, 0),
        "sum": lambda: x * x.sum(-1, keepdim=True).tanh(),
        "cat": lambda: torch.cat([x[..., 1:], x[..., :1]], -1),
        "half": lambda: linear(x.unsqueeze(1)).squeeze(1),
    }
    return made[kind]()


@given(layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4), pick=st.sampled_from(PICKS))
@example(layers=["attention", "transposed", "permuted"], pick="labels")  # samples come after their rows
@settings(max_examples=8)
def test_gradients_of_random_chains_are_exact(layers: list[str], pick: str) -> None:
    torch.manual_seed(len(layers))
    model, x = Chain(layers, pick), torch.randn(SAMPLES, ROWS, WIDTH)

    rewrite = DeadRows(labelled=0.5)

    def everything(graph: Any) -> list[str]:
        return [site.name for site in rewrite.applicable(graph)]

    check_pass(rewrite, model, (x,), everything, dtypes=(torch.float64,))


@given(layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4), pick=st.sampled_from(PICKS[:5]), at_once=st.booleans())
@example(layers=["attention", "transposed", "permuted"], pick="two", at_once=False)
@example(layers=["table", "mixture", "heads", "residual"], pick="first", at_once=True)
@settings(max_examples=3)
def test_gradients_are_exact_whatever_the_length(layers: list[str], pick: str, at_once: bool) -> None:
    """The second length is a symbol of the compiled step, and so is the second number of samples, later or `at_once`."""
    torch.manual_seed(len(layers))
    model = Chain(layers, pick).double()
    lengths, both = [(SAMPLES, MOST_ROWS), (SAMPLES, 3)], [(3, 4), (4, ROWS)]
    shapes = [(SAMPLES, ROWS), *(both + lengths if at_once else lengths + both)]
    batches = [torch.randn(*shape, WIDTH, dtype=torch.float64) for shape in shapes]
    opt = graphopt.optimize(model, (batches[0],), passes=["dead_rows"], backend="aot_eager")
    for x in batches:
        wanted = torch.autograd.grad(
            loss_of(model(x)), parameters := [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
        model.zero_grad()
        loss_of(opt(x)).backward()
        for parameter, gradient in zip(parameters, wanted, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(parameter.grad, gradient)


def loss_of(output: Any) -> Tensor:
    """A model's loss is its output, or the first of them."""
    return output[0] if isinstance(output, tuple) else output
