"""What data parallel training sends, counted without any other rank."""

from __future__ import annotations

import pytest
from rich.console import Console

from graphopt.bench import distributed
from graphopt.bench.gloo import all_reduce_seconds


def test_bytes_are_counted_and_times_follow_the_model() -> None:
    results = distributed.run(["linear"], 4, Console(quiet=True))
    rows = {row["kind"]: row for row in results["rows"]}
    full = 6 * 1024 * 1024 * 4
    assert rows["DDP"]["bytes"] == rows["exact"]["bytes"] == full
    assert rows["selected, flops=0.5"]["bytes"] < full / 2
    assert 16 * rows["compressed, s=256"]["bytes"] == full
    assert rows["FSDP"]["bytes"] == 2 * full / 4 + full
    assert rows["FSDP, flops=0.5"]["bytes"] == 8 / 6 * full / 4 + full / 6  # the last layer's weights, and one's gathered ahead
    assert rows["FSDP"]["sent_bytes"] == 3 * rows["DDP"]["sent_bytes"] / 2
    assert 4 * rows["FSDP"]["held_bytes"] == rows["DDP"]["held_bytes"] == rows["exact"]["held_bytes"] == 4 * full
    assert rows["selected, flops=0.5"]["held_bytes"] == full + 3 * rows["selected, flops=0.5"]["bytes"]
    assert 4 * rows["FSDP, flops=0.5"]["held_bytes"] == rows["selected, flops=0.5"]["held_bytes"]
    assert 4 * rows["TP"]["held_bytes"] == 4 * full
    whole = 64 * 1024 * 4  # gathered in each forward; their gradients are summed in the backward, but for those of the input
    assert rows["TP"]["bytes"] == 6 * whole / 4 + 5 * whole
    assert rows["TP, flops=0.5"]["bytes"] == 6 * whole / 4
    for kind, row in rows.items():
        if "TP" in kind:  # both kinds of collectives
            continue
        for name, seconds in row["modelled_seconds"].items():
            link, parts = distributed.LINKS[name], (3 if "FSDP" in kind else 6) * row["collectives"]
            assert seconds == pytest.approx(parts * link.alpha + row["sent_bytes"] / link.beta)
    console = Console(record=True, width=120, quiet=False)
    distributed.show(results, console)
    assert "times of links are modelled, not measured" in console.export_text()


def test_two_processes_exchange_what_is_to_be_measured() -> None:
    found = all_reduce_seconds({"small": [64], "large": [2**24, 2**20]})
    assert set(found) == {"small", "large"}
    assert 0 < found["small"] < found["large"]
