"""`graphopt bench gpu`: the measurement itself, of a small model on the CPU; the command asks for a GPU."""

import io

import pytest
import torch
from rich.console import Console

from graphopt.bench import gpu
from graphopt.errors import InputError


def test_without_a_gpu_the_command_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"no GPU here.*greentrainer"):
        gpu.run(None, 5, Console(file=io.StringIO()))


def test_every_variant_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.VARIANTS, "lora", ("torch.compile", "memory=0.7"))
    progress: list[None] = []
    rows = gpu.measure("lora", gpu.Size(1, 128, 2, 8), 3, "cpu", lambda: progress.append(None))
    assert rows[0]["variant"] == "torch.compile"
    assert {row["variant"] for row in rows} == {"torch.compile", "memory=0.7"}
    assert all(row["seconds"] > 0 and row["peak"] > 0 for row in rows if "refused" not in row)
    gpu.show({"torch": torch.__version__, "device": "cpu", "repeats": 3, "rows": rows}, Console(file=io.StringIO()))
