"""Cases that repeat a claim on further models: `make test` leaves them out, `make test-all` runs them."""

from __future__ import annotations

from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """Parameters of the long form alone; the others of the same test show the claim without them."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
