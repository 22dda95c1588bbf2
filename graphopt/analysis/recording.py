"""What a piece of eager PyTorch allocates, operator by operator: run on fake tensors, nothing is computed or allocated."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from graphopt import compat
from graphopt.compat import pytree


@dataclass
class RecordedStorage:
    """One storage that was made while recording.

    Attributes:
        operator: what made it.
        shape, dtype: of the tensor that it was made for.
        size: bytes.
        born: position of the operator that made it.
        last: position of the last operator that ran while it existed; None if it still exists.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    born: int
    last: int | None = None


@dataclass(eq=False)
class Recording(compat.DispatchMode):
    """Use as a context manager; `operators` and `storages` are in the order of execution.

    Storages are followed by weak references, so Python's own reference counts and autograd's saved tensors decide how long
    each lives, as in a real run.
    """

    operators: list[str] = field(default_factory=list)
    storages: list[RecordedStorage] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Any], RecordedStorage | None]] = {}

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave these tensors' storages out: they exist already."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), None)

    def storage_of(self, tensor: Tensor) -> RecordedStorage | None:
        """The record of a tensor's storage; None if it was made before."""
        known = self._known.get(id(tensor.untyped_storage()))
        return None if known is None else known[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = compat.call_knowing_values(func, args, kwargs or {})
        new = []
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known:
                    new.append((storage, tensor))
        if new or not _is_bookkeeping(func):
            name = str(func).removeprefix("aten.")
            self.operators.append(name)
            for storage, tensor in new:
                if id(storage) not in self._known:
                    record = RecordedStorage(
                        name, tuple(tensor.shape), str(tensor.dtype), storage.nbytes(), len(self.operators) - 1
                    )
                    self.storages.append(record)
                    self._follow(storage, record)
        return result

    def _follow(self, storage: Any, record: RecordedStorage | None) -> None:
        key = id(storage)

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            if record is not None and record.last is None:
                record.last = max(record.born, len(self.operators) - 1)

        self._known[key] = (weakref.ref(storage, gone), record)


def _is_bookkeeping(func: Any) -> bool:
    """Operators that only look at a tensor or make a view of it."""
    return isinstance(func, compat.OpOverload) and (func.is_view or func.namespace == "prim")
