"""The device that benchmarks run on."""

from __future__ import annotations

import torch


def this_device() -> tuple[str, str]:
    """ "cuda" where there is one, else "cpu"; and what to call it in a table."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    return "cpu", f"{torch.get_num_threads()} CPU threads"
