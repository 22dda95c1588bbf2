"""Random layers: functions of (choices, shape, depth) that draw one.

A layer maps (B, *shape) to (B, *out). Shapes without the batch are (F,) for rows, (T, F) for sequences and (C, H, W) for images;
`RULES` says for each which layers there are. Layers hold others: residuals, branches, modules used twice, checkpointed regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Shape = tuple[int, ...]
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.leaky_relu]


class Layer(nn.Module):
    """A function of (itself, a tensor), with the parts that it needs."""

    def __init__(self, name: str, out: Shape, rule: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.name, self.out, self.rule = name, out, rule
        for key, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(key, part)
            else:
                setattr(self, key, part)

    def forward(self, x: Any) -> Any:
        return self.rule(self, x)

    def extra_repr(self) -> str:
        own = {k: tuple(p.shape) for k, p in self.named_parameters(recurse=False)}
        return f"{self.name} -> {self.out} {own or ''}"


class Choices:
    """What hypothesis draws, by what it is for; each shrinks towards its first value."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def of(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def rarely(self, one_in: int) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def size(self, low: int = 1, high: int = 7) -> int:
        return self.draw(st.integers(low, high))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1] if shape else 1))


# Layers of any shape.


def activation(c: Choices, shape: Shape, _: int) -> Layer:
    function = c.of(ACTIVATIONS)
    return Layer(f"activation {function.__name__}", shape, lambda m, x: function(x))


def scale(c: Choices, shape: Shape, _: int) -> Layer:
    size = c.of([(), shape[-1:], (1,), shape])
    return c.of([
        Layer("scale", shape, lambda m, x: x * m.factor, factor=parameter(*size)),
        Layer("shift", shape, lambda m, x: x + m.offset, offset=parameter(*size)),
        Layer("gate", shape, lambda m, x: x * torch.tanh(m.factor).exp(), factor=parameter(*size)),
    ])  # fmt: skip


def residual(c: Choices, shape: Shape, depth: int) -> Layer:
    inner = fitted(c, shape, depth)
    return Layer("residual", shape, lambda m, x: x + m.inner(x), inner=inner)


def twice(c: Choices, shape: Shape, depth: int) -> Layer:
    return Layer("twice", shape, lambda m, x: m.inner(torch.tanh(m.inner(x))), inner=fitted(c, shape, depth))


def checkpointed(c: Choices, shape: Shape, depth: int) -> Layer:
    inner = layers(c, shape, depth)
    if next(inner.buffers(), None) is not None:
        return inner  # eager mode would change the buffers twice
    return Layer("checkpointed", inner.out, lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=inner)


def branches(c: Choices, shape: Shape, depth: int) -> Layer:
    a, b = fitted(c, shape, depth), fitted(c, shape, depth)
    merge = c.of(["add", "multiply", "concatenate", "where", "stack", "half detached"])
    axis = 1 if len(shape) == 3 else -1
    rules: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "add": lambda m, x: m.a(x) + m.b(x),
        "multiply": lambda m, x: m.a(x) * m.b(x).sigmoid(),
        "concatenate": lambda m, x: torch.cat([m.a(x), m.b(x)], axis),
        "where": lambda m, x: torch.where(x > 0, m.a(x), m.b(x)),
        "stack": lambda m, x: torch.stack([m.a(x), m.b(x)], 1).mean(1),
        "half detached": lambda m, x: m.a(x) + m.b(x).detach(),
    }
    out = shape
    if merge == "concatenate":
        out = (2 * shape[0], *shape[1:]) if len(shape) == 3 else (*shape[:-1], 2 * shape[-1])
    return Layer(merge, out, rules[merge], a=a, b=b)


def in_place(c: Choices, shape: Shape, depth: int) -> Layer:
    name = c.of(["relu_", "add_", "mul_", "sub_", "clamp_", "part", "copy_"])
    rules: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "relu_": lambda m, x: m.f(x).relu_(),
        "add_": lambda m, x: (x + 1).add_(m.f(x)),
        "mul_": lambda m, x: (x + 1).mul_(m.f(x)),
        "sub_": lambda m, x: m.f(x).sub_(x, alpha=0.5),
        "clamp_": lambda m, x: (x + m.f(x)).clamp_(-1, 1),
        "part": lambda m, x: changed_in_part(x + m.f(x)),
        "copy_": lambda m, x: torch.zeros_like(x).copy_(m.f(x)),
    }
    return Layer(f"in place {name}", shape, rules[name], f=Layer("own", shape, lambda m, x: m.f(x) + 0.5, f=fitted(c, shape, 0)))


def changed_in_part(x: Tensor) -> Tensor:
    x[..., :1] *= 2
    x.select(1, 0).add_(1)
    return x


def moving_average(c: Choices, shape: Shape, _: int) -> Layer:
    def rule(m: Any, x: Tensor) -> Tensor:
        m.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        m.calls += 1
        return x - 0.1 * m.mean

    return Layer("moving average", shape, rule, mean=torch.zeros(()), calls=torch.zeros((), dtype=torch.int64))


def not_separable(c: Choices, shape: Shape, _: int) -> Layer:
    return c.of([
        Layer("mean over the batch", shape, lambda m, x: x - x.mean(0, keepdim=True)),
        Layer("flip of the batch", shape, lambda m, x: x + 0.5 * x.flip(0)),
    ])  # fmt: skip


# Layers whose last dimension is the features.


def linear(c: Choices, shape: Shape, _: int) -> Layer:
    out = (*shape[:-1], c.size())
    i, o = shape[-1], out[-1]
    kind = c.of(["linear", "no bias", "conv1d of gpt", "einsum", "matmul", "normalised", "shared"])
    if kind in ("linear", "no bias"):
        return Layer(kind, out, lambda m, x: m.f(x), f=nn.Linear(i, o, bias=kind == "linear"))
    rules: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "conv1d of gpt": lambda m, x: torch.addmm(m.bias, x.reshape(-1, i), m.weight).view(*x.shape[:-1], o),
        "einsum": lambda m, x: torch.einsum("b...i,io->b...o", x, m.weight) + m.bias,
        "matmul": lambda m, x: x @ m.weight,
        "normalised": lambda m, x: F.linear(x, F.normalize(m.weight.t(), dim=1), m.bias),
        "shared": lambda m, x: torch.tanh(x @ m.weight) @ m.weight.t() @ m.weight + m.bias,
    }
    return Layer(kind, out, rules[kind], weight=parameter(i, o), bias=parameter(o))


def low_rank(c: Choices, shape: Shape, _: int) -> Layer:
    out, rank, factor = (*shape[:-1], c.size()), c.size(1, 3), c.of([1.0, 0.5, -2.0, 16.0])
    base = nn.Linear(shape[-1], out[-1], bias=c.flag())
    base.weight.requires_grad_(c.flag())
    down, up = nn.Linear(shape[-1], rank, bias=False), nn.Linear(rank, out[-1], bias=c.rarely(4))
    return c.of([
        Layer("low rank", out, lambda m, x: m.base(x) + m.up(m.down(x)) * factor, base=base, down=down, up=up),
        Layer("low rank, scale first", out, lambda m, x: m.base(x) + m.up(m.down(x * factor)), base=base, down=down, up=up),
        Layer("low rank, twice", out, lambda m, x: m.base(x) + m.up(m.down(x)) + m.v(m.u(x)), base=base, down=down, up=up,
              u=nn.Linear(shape[-1], rank, bias=False), v=nn.Linear(rank, out[-1], bias=False)),
        Layer("low rank of another input", out, lambda m, x: m.base(x) + m.up(m.down(x.tanh())), base=base, down=down, up=up),
    ])  # fmt: skip


def norm(c: Choices, shape: Shape, _: int) -> Layer:
    width = shape[-1]
    options = [nn.LayerNorm(width), nn.RMSNorm(width), nn.LayerNorm(width, bias=False), nn.LayerNorm(shape)]
    if c.rarely(5) and len(shape) == 1:
        options = [nn.BatchNorm1d(width), nn.BatchNorm1d(width, affine=False)]
    return Layer("norm", shape, lambda m, x: m.f(x), f=c.of(options))


def views(c: Choices, shape: Shape, _: int) -> Layer:
    width = shape[-1]
    factor = next((n for n in (2, 3, 5) if width % n == 0), width)
    half = (*shape[:-1], width // 2)
    options = [
        Layer("flip", shape, lambda m, x: x.flip(-1)),
        Layer("roll", shape, lambda m, x: x.roll(1, -1)),
        Layer("split heads", shape, lambda m, x: x.unflatten(-1, (factor, -1)).transpose(-1, -2).flatten(-2)),
        Layer("expand", shape, lambda m, x: (x.unsqueeze(1).expand(x.shape[0], 3, *shape) * torch.arange(3.0).to(x).view(
            3, *[1] * len(shape))).sum(1)),
        Layer("pad and narrow", shape, lambda m, x: F.pad(x, (1, 2)).narrow(-1, 1, width)),
    ]  # fmt: skip
    if width % 2 == 0:
        options.append(Layer("gated", half, lambda m, x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1])))
        options.append(Layer("halves", half, lambda m, x: x[..., ::2] - x.split(width // 2, -1)[1]))
    return c.of(options)


# Layers of sequences (T, F).


def attention(c: Choices, shape: Shape, _: int) -> Layer:
    heads, size, kind = c.size(1, 2), c.of([1, 2, 4]), c.of(["fused", "softmax", "einsum"])
    causal, groups = c.flag(), c.flag()
    keys = 1 if groups else heads

    def rule(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).split([heads * size, keys * size, keys * size], -1)
        q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.expand(-1, heads, -1, -1) for t in (k, v))
        if kind == "fused":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            scores = (q @ k.transpose(-1, -2) if kind == "softmax" else torch.einsum("bhqd,bhkd->bhqk", q, k)) / math.sqrt(size)
            if causal:
                hidden = torch.ones(shape[0], shape[0], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, float("-inf"))
            mixed = scores.softmax(-1) @ v if kind == "softmax" else torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        return m.out_projection(mixed.transpose(1, 2).flatten(2))

    name = f"attention {kind}{', causal' if causal else ''}"
    return Layer(name, shape, rule, qkv=nn.Linear(shape[1], (heads + 2 * keys) * size, bias=c.flag()),
                 out_projection=nn.Linear(heads * size, shape[1]))  # fmt: skip


def over_time(c: Choices, shape: Shape, _: int) -> Layer:
    time, width = shape

    def cells(m: Any, x: Tensor) -> Tensor:
        states = [x[:, 0]]
        for t in range(1, time):
            states.append(torch.tanh(m.f(states[-1]) + x[:, t]))
        return torch.stack(states, 1)

    out = c.size(1, 4)
    return c.of([
        Layer("mix over time", shape, lambda m, x: m.f(x.transpose(1, 2)).transpose(1, 2), f=nn.Linear(time, time)),
        Layer("positions", shape, lambda m, x: x + m.f(torch.arange(time))[None], f=nn.Embedding(time, width)),
        Layer("conv1d", (time, out), lambda m, x: m.f(x.mT).mT, f=nn.Conv1d(width, out, 3, padding=1)),
        Layer("causal conv1d", shape, lambda m, x: m.f(F.pad(x.mT, (2, 0))).mT, f=nn.Conv1d(width, width, 3, groups=width)),
        Layer("recurrent cell", shape, cells, f=nn.Linear(width, width)),
        Layer("shift", shape, lambda m, x: torch.cat([x[:, :1], x[:, :-1]], 1)),
        Layer("cumulative sum", shape, lambda m, x: x.cumsum(1)),
        Layer("experts", shape, lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), w=parameter(time, width, width)),
        Layer("mean", (width,), lambda m, x: x.mean(1)),
        Layer("last", (width,), lambda m, x: x[:, -1]),
        Layer("largest", (width,), lambda m, x: x.amax(1)),
        Layer("flatten", (time * width,), lambda m, x: x.reshape(x.shape[0], -1)),
    ])  # fmt: skip


# Layers of images (C, H, W).


def convolution(c: Choices, shape: Shape, _: int) -> Layer:
    channels, height, width = shape
    groups = c.of([1, channels])
    out, kernel, stride, padding = groups * c.size(1, 3), c.of([1, 2, 3]), c.of([1, 2]), c.of([1, 0])
    if min(height, width) + 2 * padding < kernel:
        kernel = 1
    bias, cls = c.flag(), c.of([nn.Conv2d, nn.ConvTranspose2d] if padding == 0 and height < 8 else [nn.Conv2d])
    f = cls(channels, out, kernel, stride=stride, padding=padding, groups=groups, bias=bias)
    sizes = [(n + 2 * padding - kernel) // stride + 1 for n in (height, width)]
    if cls is nn.ConvTranspose2d:
        sizes = [(n - 1) * stride + kernel for n in (height, width)]
    return Layer("convolution", (out, *sizes), lambda m, x: m.f(x), f=f)


def image_norm(c: Choices, shape: Shape, _: int) -> Layer:
    channels = shape[0]
    options: list[nn.Module] = [nn.GroupNorm(1, channels), nn.GroupNorm(channels, channels)]
    if c.rarely(3):
        options = [nn.BatchNorm2d(channels), nn.BatchNorm2d(channels).eval()]
    if shape[1] * shape[2] == 1:
        options = [nn.GroupNorm(1, channels)]
    return Layer("norm", shape, lambda m, x: m.f(x), f=c.of(options))


def spatial(c: Choices, shape: Shape, _: int) -> Layer:
    channels, height, width = shape
    options = [
        Layer("mean", (channels,), lambda m, x: x.mean((2, 3))),
        Layer("patches", (height * width, channels), lambda m, x: x.flatten(2).transpose(1, 2)),
        Layer("adaptive", (channels, 1, 2), lambda m, x: F.adaptive_avg_pool2d(x, (1, 2))),
        Layer("channels last", shape, lambda m, x: x.permute(0, 2, 3, 1).contiguous().tanh().permute(0, 3, 1, 2)),
        Layer("upsample", (channels, 2 * height, 2 * width), lambda m, x: F.interpolate(x, scale_factor=2)),
    ]
    if min(height, width) >= 2:
        half = (channels, height // 2, width // 2)
        options += [
            Layer("max pool", half, lambda m, x: F.max_pool2d(x, 2)),
            Layer("pool", half, lambda m, x: F.avg_pool2d(x, 2)),
        ]
    return c.of(options)


ANY = [activation, scale, residual, branches, in_place, twice, checkpointed, moving_average]
RULES: dict[int, list[Any]] = {
    1: [linear, low_rank, norm, views, *ANY],
    2: [linear, low_rank, norm, views, attention, over_time, *ANY],
    3: [convolution, image_norm, spatial, *ANY],
}


def layer(c: Choices, shape: Shape, depth: int) -> Layer:
    """One layer; those that hold others only while `depth` lasts."""
    if c.rarely(40):
        return not_separable(c, shape, depth)
    return c.of(RULES[len(shape)][: None if depth else -len(ANY) + 2])(c, shape, depth - 1)


def layers(c: Choices, shape: Shape, depth: int, least: int = 1, most: int = 2) -> Layer:
    chain: list[Layer] = []
    for _ in range(c.size(least, most)):
        if math.prod(shape) < 200:
            chain.append(layer(c, shape, depth))
            shape = chain[-1].out
    return Layer("chain", shape, lambda m, x: m.chain(x), chain=nn.Sequential(*chain))


def fitted(c: Choices, shape: Shape, depth: int) -> Layer:
    """A layer that keeps the shape: some, and what leads back."""
    if len(shape) == 3:
        return Layer("keep", shape, lambda m, x: m.f(x), f=nn.Conv2d(shape[0], shape[0], 3, padding=1))
    inner = layers(c, shape, depth)
    if inner.out == shape:
        return inner
    if len(inner.out) == len(shape) and inner.out[:-1] == shape[:-1]:
        return Layer("then", shape, lambda m, x: m.g(m.f(x)), f=inner, g=nn.Linear(inner.out[-1], shape[-1], bias=c.flag()))
    back = nn.Linear(math.prod(inner.out), math.prod(shape))
    return Layer("then back", shape, lambda m, x: m.g(m.f(x).flatten(1)).unflatten(1, shape), f=inner, g=back)
