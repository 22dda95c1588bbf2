"""What tests of training loops need around them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What graphopt warns of."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphopt").addHandler(handler)
    yield seen
    logging.getLogger("graphopt").removeHandler(handler)
