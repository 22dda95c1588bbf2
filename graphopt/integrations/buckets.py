"""Padding to few lengths, so that little is compiled and no batch has a length of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphopt.errors import InputError

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Lengths that batches are padded to by default: at most twice the work."""


def bucketed(collator: Any, lengths: Sequence[int] = LENGTHS) -> Callable[[Sequence[Any]], Any]:
    """A data collator that pads every batch to one of `lengths`.

    The padding is the collator's own (its tokenizer's, with attention mask, and -100 for labels), so that the loss is the
    same. A batch longer than all of them is padded to the tokenizer's `model_max_length` or to a multiple of the longest.

    Args:
        collator: one with `pad_to_multiple_of`, such as transformers' `DataCollatorWithPadding`; it is not changed.
        lengths: in tokens.
    Raises:
        InputError: another kind of collator, or lengths that are not that.
    """
    if not hasattr(collator, "pad_to_multiple_of"):
        raise InputError(
            f"{getattr(collator, '__name__', type(collator).__name__)} has no pad_to_multiple_of, by which batches are padded "
            "to given lengths: use one of transformers' padding collators, such as DataCollatorWithPadding(tokenizer)."
        )
    if not lengths or any(not isinstance(n, int) or n < 1 for n in lengths):
        raise InputError(f"lengths={lengths!r} must be positive numbers of tokens.")
    return _Bucketed(collator, tuple(sorted(set(lengths))))


class _Bucketed:
    """See `bucketed`; an object, so that workers of a data loader can be sent it."""

    def __init__(self, collator: Any, lengths: tuple[int, ...]) -> None:
        self.collator = copy.copy(collator)
        self.lengths = lengths

    @property
    def tokenizer(self) -> Any:
        """The collator's, which a Trainer saves with its checkpoints."""
        return getattr(self.collator, "tokenizer", None)

    def __call__(self, features: Sequence[Any]) -> Any:
        """The batch of `features`, padded."""
        self.collator.pad_to_multiple_of = self._length(max(map(_tokens, features)))
        return self.collator(features)

    def _length(self, longest: int) -> int:
        most = getattr(self.tokenizer, "model_max_length", None) or longest
        fitting = next((length for length in self.lengths if length >= longest), None)
        if fitting is None:
            fitting = -(-longest // self.lengths[-1]) * self.lengths[-1]
        return min(fitting, most) if most >= longest else fitting


def _tokens(feature: Any) -> int:
    """The length of the sequence that is padded: of the tokens, or of labels per token where those are longer."""
    named = feature if isinstance(feature, Mapping) else {"input_ids": feature}
    held = [named[key] for key in ("input_ids", "labels") if key in named]
    return max((len(value) for value in held if hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0), default=1)
