"""One thread at a time."""

from __future__ import annotations

import threading


class Turn:
    """Has a lock that its own thread may take again; its copy has another one, which nobody holds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()
