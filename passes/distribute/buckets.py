"""Buckets: which gradients are averaged by one collective, and in which order these are issued.

Every rank has to issue the same collectives in the same order, also where another graph runs on it: one for other lengths, or
the model itself. So both follow from an agreed order of names, and from dtypes and sizes, alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

BYTES = 25 * 2**20
"""Of a bucket, at most, as in DistributedDataParallel; a larger gradient has one for itself."""


def in_buckets(gradients: Iterable[tuple[str, Hashable, int]], limit: int = BYTES) -> tuple[tuple[str, ...], ...]:
    """Names, bucket by bucket: a bucket is issued when it is full, and the rest in the order of their last gradients.

    Args:
        gradients: names in the agreed order, with what all of a bucket have in common (their dtype and device), and bytes.
        limit: bytes of a bucket.
    """
    full: list[tuple[str, ...]] = []
    filling: dict[Hashable, tuple[list[str], int]] = {}
    for name, kind, size in gradients:
        names, before = filling.pop(kind, ([], 0))
        if names and before + size > limit:
            full.append(tuple(names))
            names, before = [], 0
        filling[kind] = ([*names, name], before + size)
    return (*full, *(tuple(names) for names, _ in filling.values()))
