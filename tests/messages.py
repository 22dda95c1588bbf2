"""What graphopt logs while a test runs."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def warnings_of(name: str = "graphopt") -> Iterator[list[str]]:
    """The texts of all warnings logged under `name` inside."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger(name).addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger(name).removeHandler(handler)
