"""How often the caches of an optimised model had to do work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """How often the caches had to do work; for reports and tests."""

    captures: int = 0
    compilations: int = 0
    capture_seconds: float = 0.0
    compile_seconds: float = 0.0
    rewrite_seconds: float = 0.0
