"""Small networks whose forward does ordinary Python that is no tensor operation."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

WIDTH = 32
SCALE = 1.5
"""A global that a forward reads."""

OUTSIDE: list[Any] = []
"""A list that a forward fills."""


class Habit(nn.Module):
    """A small network whose forward does something that is no tensor operation, in `between`: a function, or a method."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        if between is not None:
            self.between = between  # type: ignore[assignment]

    def between(self, hidden: Tensor) -> Tensor:
        """What the habit is about; it runs in the middle of the network."""
        return hidden

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        hidden = x
        for layer in self.layers[:2]:
            hidden = torch.relu(layer(hidden)) + hidden
        hidden = self.between(hidden)
        for layer in self.layers[2:]:
            hidden = torch.relu(layer(hidden)) + hidden
        return nn.functional.cross_entropy(self.head(hidden), labels)


def printing(hidden: Tensor) -> Tensor:
    """Print a number of the data."""
    print("hidden", float(hidden.detach().mean()))
    return hidden


def logging_values(hidden: Tensor) -> Tensor:
    """Log a shape and a number of the data."""
    logger.info("hidden %s with mean %.3f", tuple(hidden.shape), hidden.mean().item())
    return hidden


class Timing(Habit):
    """Measures how long a part takes."""

    seconds = 0.0

    def between(self, hidden: Tensor) -> Tensor:
        """Two calls of the clock."""
        start = time.perf_counter()
        hidden = torch.tanh(hidden)
        self.seconds = time.perf_counter() - start
        return hidden


def random_noise(hidden: Tensor) -> Tensor:
    """Noise of a random size."""
    return hidden * (1.0 + 0.1 * random.random()) if random.random() < 2 else hidden


def checking(hidden: Tensor) -> Tensor:
    """Raise if values explode."""
    if hidden.abs().max().item() > 1e6:
        raise ValueError("values explode")
    return hidden


class Block(nn.Module):
    """A layer that looks at its values, as every layer of some models does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """A residual layer."""
        hidden = torch.relu(self.layer(hidden)) + hidden
        if torch.isinf(hidden).any():
            hidden = hidden.clamp(-1e4, 1e4)
        return hidden


class Looping(nn.Module):
    """Has such layers in a loop, which torch.compile leaves to eager mode and compiles layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


class Breaking(Habit):
    """Prints after every layer, in the loop of the model itself."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
            print("hidden", float(x.detach().mean()))
        return nn.functional.cross_entropy(self.head(x), labels)


def nan_checking(hidden: Tensor) -> Tensor:
    """A branch on data."""
    return torch.nan_to_num(hidden) if torch.isnan(hidden).any() else hidden


def masking(hidden: Tensor) -> Tensor:
    """Only positive values are squared."""
    mask = hidden > 0.5
    kept = hidden[mask] ** 2
    return hidden + kept.mean()


def nonzero(hidden: Tensor) -> Tensor:
    """Add to those rows."""
    rows = torch.nonzero(hidden.sum(1) > hidden.sum(1).median()).squeeze(1)
    return hidden.index_add(0, rows, torch.sin(hidden[rows]))


def unique(hidden: Tensor) -> Tensor:
    """Subtract the mean of each group."""
    groups, of_row = torch.unique((hidden[:, 0] * 2).round().detach(), return_inverse=True)
    sums = torch.zeros(len(groups), hidden.shape[1]).index_add(0, of_row, hidden)
    counts = torch.bincount(of_row, minlength=len(groups)).clamp(min=1)
    return hidden - 0.1 * (sums / counts[:, None])[of_row]


class Warming(Habit):
    """Has a float argument that is another one in each step."""

    def forward(self, x: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """The loss at a temperature."""
        return super().forward(x, labels) / temperature


class Counting(Habit):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, hidden: Tensor) -> Tensor:
        """A schedule on the count."""
        self.calls += 1
        return hidden * (1.0 + 1.0 / self.calls)


class Storing(Habit):
    """Keeps an activation on self."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Tensor | None = None

    def between(self, hidden: Tensor) -> Tensor:
        """For whoever looks at it after the step."""
        self.activation = hidden.detach().mean(0)
        return hidden


class Penalising(Habit):
    """Keeps a loss term on self while it runs, and adds it in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty: Tensor | None = None

    def between(self, hidden: Tensor) -> Tensor:
        """A term with a gradient."""
        self.penalty = hidden.pow(2).mean()
        return hidden

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss with the term."""
        loss = super().forward(x, labels)
        assert self.penalty is not None
        return loss + 0.1 * self.penalty


def filling(hidden: Tensor) -> Tensor:
    """A statistic per step."""
    OUTSIDE.append(hidden.detach().norm())
    return hidden


class Hooked(Habit):
    """Has a hook that collects activations."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        self.layers[1].register_forward_hook(lambda module, args, output: self.collected.append(output.detach().mean()))


def reading(hidden: Tensor) -> Tensor:
    """A constant of the module."""
    return hidden * SCALE


class Trying(Habit):
    """Catches an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"known": 0.5}

    def between(self, hidden: Tensor) -> Tensor:
        """The first attempt looks for what is not there."""
        try:
            return hidden * self.scales["unknown"]
        except KeyError:
            return torch.sigmoid(hidden) + hidden


def trying_shapes(hidden: Tensor) -> Tensor:
    """The first attempt has the wrong shape."""
    try:
        return hidden.view(3, -1, 7)
    except RuntimeError:
        return torch.sigmoid(hidden) + hidden


class Hiding(Habit):
    """Keeps a layer in a plain list, where `parameters()` does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = [nn.Linear(WIDTH, WIDTH)]

    def hidden_parameters(self) -> list[Tensor]:
        """What the caller trains all the same."""
        return list(self.plain[0].parameters())

    def between(self, hidden: Tensor) -> Tensor:
        """Use the layer."""
        return hidden + self.plain[0](hidden)


class Numpy(Habit):
    """Has an attribute of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        import numpy

        self.weights = numpy.linspace(0.5, 1.5, WIDTH).astype("float32")

    def between(self, hidden: Tensor) -> Tensor:
        """Weigh the columns."""
        return hidden * torch.from_numpy(self.weights)


class Packed(nn.Module):
    """An LSTM over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        """The loss of the last states."""
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return nn.functional.cross_entropy(self.head(last[-1]), labels)
