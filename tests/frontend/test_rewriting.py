"""What torch's cache on disk knows a rewritten region by."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphopt.frontend import rewriting


def test_what_other_code_rewrote_is_not_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version alone stays the same between two states of a checkout, and a mended rewrite would not take effect."""
    rule = tmp_path / "graphopt" / "analysis" / "rule.py"
    rule.parent.mkdir(parents=True)
    rule.write_text("KEEPS = 1")
    monkeypatch.setattr(rewriting, "__file__", str(tmp_path / "graphopt" / "frontend" / "rewriting.py"))
    code = rewriting._own_code.__wrapped__
    before = code()
    assert code() == before
    rule.write_text("KEEPS = 10")
    assert code() != before
