"""`graphopt bench gpu`: the measurement itself, of a small model on the CPU; the command asks for a GPU."""

import functools
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from graphopt.bench import gpu, memory_models
from graphopt.errors import InputError


def test_without_a_gpu_the_command_says_what_to_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"no GPU here.*greentrainer"):
        gpu.run(None, 5, tmp_path, Console(file=io.StringIO()))


def test_every_variant_has_a_row_at_once_and_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what is compiled in less time: this is about rows."""
    monkeypatch.setitem(gpu.OPTIONS, "default", {"backend": "aot_eager"})
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(gpu, "this_device", lambda: ("cuda", "a GPU"))
    monkeypatch.setitem(gpu.VARIANTS, "lora", ("default",))
    monkeypatch.setitem(gpu.MODELS, "lora", lambda size: memory_models.MODELS["mlp"](size.samples))
    measured: list[str] = []

    def measure(name: str, size: gpu.Size, kinds: Sequence[str], repeats: int, device: str) -> Iterator[dict[str, Any]]:
        measured.extend(kinds)
        yield from real(name, gpu.Size(1, 128, 2, 8), kinds, 3, "cpu")

    real = gpu.measure
    monkeypatch.setattr(gpu, "measure", measure)
    found = [gpu.run(["lora"], 5, tmp_path, Console(file=io.StringIO())) for _ in range(2)]
    assert measured == ["default"]
    assert found[0] == found[1]
    for row in found[0]["rows"]:
        assert "refused" in row or (row["seconds"] > 0 and row["peak"] > 0 and row["variant"] in measured)
    gpu.show(found[0], Console(file=io.StringIO()))
