"""What the examples share: runs that are finished are kept, and are not run again with `--resume`."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run_every(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = runpy.run_path(str(EXAMPLES / "finetune_glosses.py"))
    monkeypatch.setitem(found["run_every"].__globals__, "read", lambda name, rows=None: (["a", "b"], ["one", "two"]))
    monkeypatch.setitem(found["run_every"].__globals__, "Glosses", lambda *a: SimpleNamespace())
    return found["run_every"]


def settings(folder: Path, **others: Any) -> argparse.Namespace:
    defaults = {"out": folder, "resume": True, "runs": ["full", "budget"], "seeds": [0, 1], "length": 8, "validation_rows": 5}
    return argparse.Namespace(**(defaults | others))


def test_a_run_that_was_interrupted_goes_on_with_what_is_not_finished(run_every: Any, tmp_path: Path) -> None:
    begun = []

    def one(args: Any, kind: str, seed: int, data: Any, classes: int, bar: Any) -> dict:
        assert classes == 2
        begun.append((kind, seed))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return {"seed": seed, "value": len(begun)}

    with pytest.raises(KeyboardInterrupt):
        run_every(settings(tmp_path, resume=False), one)
    results = run_every(settings(tmp_path), one)
    assert begun == [("full", 0), ("budget", 0), ("full", 1), ("full", 1), ("budget", 1)]
    assert [(r["kind"], r["seed"], r["value"]) for r in results] == [
        ("full", 0, 1), ("budget", 0, 2), ("full", 1, 4), ("budget", 1, 5)
    ]  # fmt: skip
    assert json.loads((tmp_path / "results.json").read_text())["results"] == results
    assert run_every(settings(tmp_path), one) == results
    assert len(begun) == 5


def test_results_of_other_settings_are_neither_mixed_nor_lost(run_every: Any, tmp_path: Path) -> None:
    def one(args: Any, kind: str, seed: int, *others: Any) -> dict:
        return {"seed": seed, "length": args.length}

    kept = run_every(settings(tmp_path), one)
    with pytest.raises(SystemExit, match="other settings: name another folder"):
        run_every(settings(tmp_path, length=16), one)
    assert run_every(settings(tmp_path), one) == kept
    assert run_every(settings(tmp_path, length=16, resume=False), one)[0]["length"] == 16
