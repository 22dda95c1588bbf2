"""The cases of `graphopt bench breadth`, by name: ordinary Python in forward, and what the neighbouring files list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphopt.bench import breadth_habits as habits
from graphopt.bench.breadth_adapters import ADAPTERS
from graphopt.bench.breadth_others import OTHERS
from graphopt.bench.breadth_run import Case, Made
from graphopt.bench.breadth_transformers import TRANSFORMERS


def _habit(make: Callable[[], nn.Module]) -> Callable[[], Made]:
    return lambda: (make(), {"x": torch.randn(16, habits.WIDTH), "labels": torch.randint(0, 5, (16,))})


def _filling() -> Made:
    habits.OUTSIDE.clear()
    return _habit(lambda: habits.Habit(habits.filling))()


def _packed() -> Made:
    batch = {"tokens": torch.randint(0, 50, (4, 9)), "lengths": torch.tensor([5, 9, 3, 7]), "labels": torch.randint(0, 5, (4,))}
    return habits.Packed(), batch


def _case(make: Callable[[], nn.Module], effects: Callable[[Any], Any] | None = None) -> Case:
    return Case(_habit(make), "ordinary Python in forward", effects)


def _between(function: Callable[[Tensor], Tensor]) -> Case:
    return _case(lambda: habits.Habit(function))


HABITS: dict[str, Case] = {
    "plain": _case(habits.Habit),
    "print": _between(habits.printing),
    "logging": _between(habits.logging_values),
    "time": _case(habits.Timing),
    "random": _between(habits.random_noise),
    "item-check": _between(habits.checking),
    "check-in-layers": _case(habits.Looping),
    "print-in-loop": _case(habits.Breaking),
    "nan-check": _between(habits.nan_checking),
    "mask-index": _between(habits.masking),
    "nonzero": _between(habits.nonzero),
    "unique": _between(habits.unique),
    "float-argument": Case(
        _habit(habits.Warming), "ordinary Python in forward", vary=lambda step: {"temperature": 1.0 + 0.5 * step}
    ),
    "counter": _case(habits.Counting, lambda model: model.calls),
    "stored-tensor": _case(habits.Storing, lambda model: model.activation),
    "stored-penalty": _case(habits.Penalising, lambda model: model.penalty),
    "outside-list": Case(_filling, "ordinary Python in forward", lambda model: list(habits.OUTSIDE)),
    "hook": _case(habits.Hooked, lambda model: list(model.collected)),
    "global": _between(habits.reading),
    "try-except": _case(habits.Trying),
    "try-except-shape": _between(habits.trying_shapes),
    "hidden-module": _case(habits.Hiding),
    "numpy-attribute": _case(habits.Numpy),
    "packed-lstm": Case(_packed, "ordinary Python in forward"),
}

SPEECH = (
    "wav2vec2-ctc", "wav2vec2-ctc-padded", "wav2vec2-classify", "hubert-ctc", "hubert-classify", "wavlm-classify",
    "unispeech-ctc", "sew-ctc",
)  # fmt: skip
"""Their forward asks for the gradient of what it makes of the sound, so that the gradient passes through all of the model."""

LARGER = {
    **dict.fromkeys(SPEECH, 0.8),
    **dict.fromkeys(("switch-transformers", "lora-gpt2", "adaption-prompt"), 0.75),
    "reformer": 0.85,
    **dict.fromkeys(("vb-lora", "shira", "wave-ft"), 1.0),  # their gradients cost no product
}
"""Budgets of cases for which `BUDGET` is infeasible, as the error says that they otherwise end with."""

_EVERY = {**HABITS, **TRANSFORMERS, **ADAPTERS, **OTHERS}
CASES: dict[str, Case] = {name: replace(case, budget=LARGER.get(name, case.budget)) for name, case in _EVERY.items()}
