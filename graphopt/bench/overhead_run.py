"""One measurement of `graphopt bench overhead`: `python -m graphopt.bench.overhead_run KIND MODEL [WAY]`.

Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphopt
from graphopt.bench.step_models import network
from graphopt.bench.timing import in_turn
from graphopt.compat.dynamo import graphs_compiled

STEPS = {"mlp": 4000, "llama": 200}
"""Steps that are compared, of either way."""

FIRST_STEPS = 40
"""Steps before them; in the first ones graphopt measures its own time."""

LENGTHS = (9, 12, 14, 17, 20, 22, 25, 28, 30, 33, 36, 40)
BATCHES = (8, 6, 5, 7, 3)


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(x)
        return {"loss": (found - labels).square().mean(), "logits": found}


def made(name: str, batch: int = 8, length: int = 32) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a batch, the same in every process."""
    torch.manual_seed(0)
    if name == "mlp":
        return _Perceptron(), {"x": torch.randn(batch, 32), "labels": torch.randn(batch, 1)}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "vocab_size": 256}
    model = network("Llama", "ForCausalLM", **sizes, use_cache=False, max_position_embeddings=128)
    ids = torch.randint(0, 256, (batch, length))
    return model, {"input_ids": ids, "labels": ids}


def compiled(way: str, model: nn.Module, inputs: dict[str, Tensor]) -> Callable[..., Any]:
    """The model's step by torch.compile, or by graphopt under the default plan."""
    return torch.compile(model) if way == "torch" else graphopt.optimize(model, inputs)


def _step(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Tensor]) -> None:
    call(**inputs)["loss"].backward()
    for parameter in model.parameters():
        parameter.grad = None


def start(name: str, way: str) -> dict[str, Any]:
    """Seconds of this process and of its compilers, for setting up and for the first step; and those by the clock."""
    model, inputs = made(name)
    begun, clock = _own_seconds(), time.perf_counter()
    call = compiled(way, model, inputs)
    ready = _own_seconds()
    _step(call, model, inputs)
    return {"setup": ready - begun, "first": _own_seconds() - ready, "clock": time.perf_counter() - clock}


def _own_seconds() -> float:
    """Of this process and of all that it has started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def steady(name: str) -> dict[str, Any]:
    """Seconds of a step by either way, and the median of their ratios.

    They are this process's own, and steps take turns: other work on the machine hits both ways alike.
    """

    def one_step(way: str) -> Callable[[], float]:
        model, inputs = made(name)
        call = compiled(way, model, inputs)
        for _ in range(FIRST_STEPS):
            _step(call, model, inputs)

        def seconds() -> float:
            begun = time.process_time()
            _step(call, model, inputs)
            return time.process_time() - begun

        return seconds

    seconds = in_turn({way: one_step(way) for way in ("torch", "graphopt")}, STEPS[name])
    ratios = [ours / theirs for ours, theirs in zip(seconds["graphopt"], seconds["torch"], strict=True)]
    return {**{way: statistics.median(s) for way, s in seconds.items()}, "ratio": statistics.median(ratios)}


def sizes(name: str, way: str) -> dict[str, Any]:
    """Graphs compiled for each new batch size, and in two epochs of batches of many lengths."""
    found: dict[str, Any] = {}
    model, inputs = made(name, BATCHES[0])
    call = compiled(way, model, inputs)
    counts = []
    for batch in BATCHES:
        before = graphs_compiled()
        _step(call, model, made(name, batch)[1])
        counts.append(graphs_compiled() - before)
    found["batches"] = counts
    if name != "mlp":
        torch.compiler.reset()
        model, inputs = made(name, 4, LENGTHS[0])
        call = compiled(way, model, inputs)
        before = graphs_compiled()
        for length in LENGTHS * 2:
            _step(call, model, made(name, 4, length)[1])
        found["lengths"] = graphs_compiled() - before
    return found


def main() -> None:
    """See the module."""
    kind, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    kinds: dict[str, Callable[..., dict[str, Any]]] = {"start": start, "steady": steady, "sizes": sizes}
    print(json.dumps(kinds[kind](*rest)))


if __name__ == "__main__":
    main()
