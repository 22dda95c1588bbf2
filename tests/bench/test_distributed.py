"""What data parallel training sends, counted without any other rank."""

from __future__ import annotations

import pytest
from rich.console import Console

from graphopt.bench import distributed


def test_bytes_are_counted_and_times_follow_the_model() -> None:
    results = distributed.run(["linear"], 4, Console(quiet=True))
    rows = {row["kind"]: row for row in results["rows"]}
    full = 6 * 1024 * 1024 * 4
    assert rows["DDP"]["bytes"] == rows["exact"]["bytes"] == full
    assert rows["selected, flops=0.5"]["bytes"] < full / 2
    assert 16 * rows["compressed, s=256"]["bytes"] == full
    for row in rows.values():
        for name, seconds in row["modelled_seconds"].items():
            link = distributed.LINKS[name]
            assert seconds == pytest.approx(6 * (row["collectives"] * link.alpha + row["bytes"] / (4 * link.beta)))
    console = Console(record=True, width=120, quiet=False)
    distributed.show(results, console)
    assert "times are modelled, not measured" in console.export_text()
