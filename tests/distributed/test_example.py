"""`examples/distributed_glosses.py` under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed_glosses.py"
SMALL = ["--steps", "3", "--rows", "64", "--batch", "8", "--length", "16", "--backend", "aot_eager"]


@pytest.mark.long
def test_two_ranks_train_as_one_process_and_send_what_is_selected() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE), *SMALL]
    sent = {}
    for strategy in ("mesh", "ddp", "fsdp"):
        check = ["--check"] if strategy != "ddp" else []
        run = subprocess.run([*command, "--strategy", strategy, *check], env=environment, capture_output=True, timeout=300)
        text = run.stdout.decode()
        assert run.returncode == 0, run.stderr.decode()[-3000:]
        sent[strategy] = float(re.search(rf"{strategy}: ([\d.]+) MB", text)[1])
        if check:
            assert float(re.search(r"differ by at most (\S+)", text)[1]) < 1e-5
    assert sent["ddp"] == 90.9
    assert sent["mesh"] < 45
    assert sent["mesh"] < sent["fsdp"] < sent["mesh"] + 0.75 * sent["ddp"]  # and each rank's half of the weights, of layers twice
