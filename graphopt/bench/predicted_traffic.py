"""What ranks would send under `fully_shard` of every repeated block, before there are any: by names and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from graphopt.analysis.communication import Collective
from graphopt.compat.fsdp import Part
from graphopt.distributed.predicted import block_of
from graphopt.distributed.sharded_traffic import collectives
from graphopt.graph import Parameter


def predicted_parts(parameters: Iterable[Parameter], ranks: int) -> list[Part]:
    """What would be gathered together, in the order in which it is used: the blocks, then what is left.

    Args:
        parameters: of the model as it is, in the order in which it uses them.
    """
    blocks: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        blocks.setdefault(block_of(parameter.name), []).append(parameter)
    rest = blocks.pop("", [])
    of_parts = [*blocks.values(), *([rest] if rest else [])]
    return [_part(number, own, ranks, own is not rest) for number, own in enumerate(of_parts)]


def _part(number: int, parameters: Sequence[Parameter], ranks: int, reshards: bool) -> Part:
    """Rows are divided, and padded where ranks do not divide them; a number is one row."""
    rows = {p.name: math.ceil((p.shape or (1,))[0] / ranks) for p in parameters}
    shards = {(p.name, *p.aliases): rows[p.name] * math.prod(p.shape[1:]) * p.dtype.itemsize for p in parameters}
    scattered = {names: size * ranks for names, size in shards.items()}
    return Part(number, (), ranks, 1, reshards, True, sum(shards.values()), scattered)


def predicted_collectives(parameters: Sequence[Parameter], ranks: int, trained: Collection[str]) -> list[Collective]:
    """Of a step that trains these parameters; the backward ends at the first of them."""
    parts = predicted_parts(parameters, ranks)
    names = [p.name for p in parameters]
    reached = set(names[min((names.index(name) for name in trained), default=len(names)) :])
    back = {part.number for part in parts if any(own[0] in reached for own in part.scattered_bytes)}
    wanted = {part.number: [own for own in part.scattered_bytes if own[0] in trained] for part in parts}
    return list(collectives(parts, [part.number for part in parts], back, wanted))
