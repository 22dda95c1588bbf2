"""Outputs that a step does not keep (`outputs="loss"`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphopt.compat import pytree
from graphopt.errors import OutputError
from graphopt.transforms.symbolic_zeros import named_otherwise


class NotKept:
    """Stands for an output that a step did not keep; whatever is done with it but printing raises `OutputError`."""

    def __init__(self, place: str) -> None:
        self.__dict__["_place"] = place

    def __repr__(self) -> str:
        return f"<{self._place} was not kept: outputs='loss'>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's own protocols, which ask whether it has such a method
            raise AttributeError(name)
        raise self._error()

    def _error(self) -> OutputError:
        return OutputError(
            f"{self._place} of the model was not kept, since it was optimised with outputs='loss'. For outputs in training leave "
            "that out; to evaluate, call the optimised model under torch.no_grad()."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, NotKept))._error()


def _refused(self: NotKept, *args: Any, **kwargs: Any) -> Any:
    raise self._error()


_OPERATIONS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul and rand or ror xor rxor "
    "neg pos abs invert lt le gt ge eq ne bool int float complex index len iter contains getitem setitem delitem call setattr "
    "array"
)
for _name in _OPERATIONS.split():
    setattr(NotKept, f"__{_name}__", _refused)
NotKept.__hash__ = object.__hash__  # type: ignore[method-assign]


def loss_alone(output: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Within what Dynamo traces: the output with a text for every tensor but the loss, and their positions among the leaves.

    None in the place of positions: it does not begin with a scalar that could be the loss.
    """
    leaves, spec = pytree.tree_flatten(output)
    if not leaves or not isinstance(leaves[0], Tensor) or leaves[0].dim() > 0 or not leaves[0].requires_grad:
        return output, None
    if named_otherwise(output, leaves[0]):
        return output, None
    positions = tuple(i for i, leaf in enumerate(leaves) if i > 0 and isinstance(leaf, Tensor))
    for i in positions:
        leaves[i] = "not kept"  # not None, which some containers leave out
    return pytree.tree_unflatten(leaves, spec), positions


def not_kept(output: Any, positions: Sequence[int]) -> Any:
    """What `loss_alone` has left, with what says so in the place of the rest."""
    if not positions:
        return output
    paths, spec = pytree.tree_flatten_with_path(output)
    leaves = [leaf for _, leaf in paths]
    for i in positions:
        leaves[i] = NotKept(f"output {pytree.keystr(paths[i][0])}")
    return pytree.tree_unflatten(leaves, spec)
