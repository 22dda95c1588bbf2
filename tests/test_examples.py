"""The example scripts, on a few steps each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long_forms import long

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--steps", "3", "--batch", "4", "--length", "8"]
UNCOMPILED = ["--backend", "aot_eager", "--validation-rows", "8"]

COMMANDS = {
    "lsp": ["lsp_glosses.py", *SMALL, *UNCOMPILED, "--runs", "lsp"],
    "lsp and lora": ["lsp_glosses.py", *SMALL, *UNCOMPILED, "--runs", "lsp", "lora"],
    "vcas": ["vcas_glosses.py", *SMALL, *UNCOMPILED, "--runs", "vcas", "sb", "ub", "--every", "2"],
    "trainer": ["trainer_glosses.py", "--steps", "2", *UNCOMPILED],
    "lora": ["lora_glosses.py", *SMALL],
}


@pytest.mark.parametrize("name", ["lsp", *long(*list(COMMANDS)[1:])])
def test_an_example_runs_to_its_end(name: str, tmp_path: Path) -> None:
    script, *arguments = COMMANDS[name]
    out = [] if name == "lora" else ["--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script), *arguments, *out]
    run = subprocess.run(command, env=environment, capture_output=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr.decode()[-3000:]
