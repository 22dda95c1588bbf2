"""The processes that train one model together, and how they agree.

Tensors are averaged by a collective. Everything else goes through the key-value store of the process group: whoever waits there
learns which rank is missing, an error on one rank is raised on all, and no device is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from graphopt.compat.distributed import store_of, timeout_of
from graphopt.errors import InputError, RankError, first_line

Value = TypeVar("Value")
Failure = TypeVar("Failure", bound=Exception)

_MEETINGS: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
"""By group, the number of the next meeting: the same on all of its ranks."""


class Ranks:
    """The processes of a group; one process is alone, and nothing is exchanged.

    Every method but the constructor is a meeting: all ranks call it at the same point. `what` says at which, for errors.

    Attributes:
        size: how many they are.
        rank: which of them this is.
        samples: those of them among which gradients are averaged, by default all: the others train on the same samples as one of
            these, or average gradients by themselves.
    Raises:
        RankError: a rank does not come in the time that the group's time-out allows, comes for something else, or fails.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, samples: Ranks | None = None) -> None:
        """Set up.

        Args:
            group: by default all processes, where torch.distributed is initialised.
            samples: see `Ranks`.
        Raises:
            InputError: this process is none of the group.
        """
        self.size, self.rank = 1, 0
        self.samples: Ranks = samples or self
        self._group = None
        if dist.is_available() and dist.is_initialized():
            if group is not None and dist.get_rank(group) < 0:
                raise InputError("this process is not in the `group` that trains the model: call optimize() on its ranks alone.")
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
            self._group = dist.group.WORLD if group is None else group

    @classmethod
    def alone(cls) -> Ranks:
        """One process by itself, whatever others there are."""
        ranks = cls.__new__(cls)
        ranks.size, ranks.rank, ranks._group, ranks.samples = 1, 0, None, ranks
        return ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, ()  # a group does not outlive its processes

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    @property
    def group_name(self) -> str:
        """By which graphs reach the group."""
        return "" if self._group is None else self._group.group_name

    @property
    def several(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.size > 1

    def gather(self, value: Value, what: str) -> list[Value]:
        """Everybody's value, in the order of ranks."""
        return [value] if self.size == 1 else self._meet(value, None, what)

    def same(self, value: Value, what: str) -> Value:
        """Rank 0's value."""
        return value if self.size == 1 else self.gather(value if self.rank == 0 else None, what)[0]  # type: ignore[return-value]

    def all(self, flag: bool, what: str) -> bool:
        """Whether a flag is set on all ranks."""
        return all(self.gather(flag, what))

    def check_same(self, value: Any, what: str) -> None:
        """Raise `RankError`, on every rank, unless all have the same value."""
        found = self.gather(value, what)
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            raise RankError(
                f"ranks 0 and {other} do not agree on {what}: their gradients would be averaged with those of other tensors. "
                "Call optimize(), reselect(), adopt() and load_state() on every rank, with the same arguments."
            )

    def together(self, make: Callable[[], Value], what: str) -> Value:
        """What `make` returns; where it fails on one rank, it fails on all, with an error of the same type, or a base of it."""
        if self.size == 1:
            return make()
        try:
            value = make()
        except Exception as error:
            if not getattr(error, "told", False):
                with contextlib.suppress(RankError):  # who is missing matters less than what went wrong
                    self._meet(None, error, what)
                _told(error)  # nobody comes to tell of it again, where this is a part of something else
            raise
        self._meet(None, None, what)
        return value

    def mean(self, tensors: Sequence[Tensor | None], what: str) -> list[Tensor | None]:
        """The mean of each tensor over all ranks, where None counts as zeros, unless it is None everywhere.

        Args:
            tensors: on every rank of the same shapes.
        Returns:
            Dense tensors, in float32 at least.
        """
        if self.size == 1:
            return list(tensors)
        shapes = self.gather([None if t is None else (tuple(t.shape), t.dtype, str(t.device.type)) for t in tensors], what)
        known = [next((shape for shape in of if shape is not None), None) for of in zip(*shapes, strict=True)]
        device = next((t.device for t in tensors if t is not None), None)
        found: list[Tensor | None] = []
        for tensor, facts in zip(tensors, known, strict=True):
            if facts is None:
                found.append(None)
                continue
            dtype = torch.promote_types(facts[1], torch.float32)
            place = device if device is not None else torch.device(facts[2])
            if tensor is None:
                dense = torch.zeros(facts[0], dtype=dtype, device=place)
            else:
                dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
                dense = dense.to(dtype, memory_format=torch.contiguous_format, copy=True)
            wait(dist.all_reduce(dense, group=self._group, async_op=True))
            found.append(dense / self.size)
        return found

    def smallest(self, tensor: Tensor) -> Tensor:
        """Of each element, over all ranks; by a collective alone, which is quick enough for every step."""
        if self.size > 1:
            wait(dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group, async_op=True))
        return tensor

    def _meet(self, value: Any, error: Exception | None, what: str) -> list[Any]:
        """Exchange values; raise the error of whoever has one."""
        group = self._group
        assert group is not None
        store = store_of(group)
        number = next(_MEETINGS.setdefault(group, itertools.count()))
        keys = [f"graphopt/{number}/{rank}" for rank in range(self.size)]
        mine = pickle.dumps((what, _described(error), value))
        try:
            store.set(keys[self.rank], mine)
            store.wait(keys, timeout_of(group))
        except Exception as late:
            raise self._missing(store, keys, what, late) from late
        found = [pickle.loads(raw) for raw in store.multi_get(keys)]
        if number:
            store.delete_key(f"graphopt/{number - 1}/{self.rank}")  # who came here has read it
        if error is not None:
            return []
        for rank, (theirs, failure, _) in enumerate(found):
            if failure is not None:
                raise _raised(rank, failure, "" if theirs == what else theirs)
        for rank, (theirs, _, _) in enumerate(found):
            if theirs != what:
                raise _told(RankError(f"rank {self.rank} is at {what}, and rank {rank} at {theirs}: {_REMEDY}"))
        return [value for _, _, value in found]

    def _missing(self, store: Any, keys: Sequence[str], what: str, late: Exception) -> RankError:
        try:
            absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except Exception:  # the process that kept the store is gone
            return _told(
                RankError(f"the other ranks cannot be reached, at {what} ({first_line(late)}): start all of them again.")
            )
        return _told(RankError(f"rank {', '.join(absent)} did not come to {what}: it has ended, hangs, or {_REMEDY}"))


def wait(work: Any) -> None:
    """Wait for a collective that was issued; raise `RankError` where another rank does not take part."""
    try:
        work.wait()
    except RuntimeError as error:
        raise lost() from error


def lost() -> RankError:
    """What to raise from torch's error where another rank has ended, or is late."""
    return _told(
        RankError(
            "another rank has ended, or has not answered within the time-out of the process group: see that rank's own error. "
            "torch.distributed.init_process_group(timeout=...) allows more time. Training goes on from the last checkpoint "
            "(load the model's weights, then opt.load_state), on another number of ranks, too."
        )
    )


_REMEDY = (
    "does not make the same calls. Call optimize(), reselect(), adopt(), load_state() and controllers on every rank, at the same "
    "points; a process that trains by itself needs optimize(group=torch.distributed.new_group([its rank]))."
)


def _described(error: Exception | None) -> tuple[type[Exception], str] | None:
    if error is None:
        return None
    kinds = [kind for kind in type(error).__mro__ if issubclass(kind, Exception)]
    return next(filter(_from_a_message, kinds), Exception), str(error)


def _from_a_message(kind: type[Exception]) -> bool:
    """Whether other ranks can load the class, and make one of it."""
    try:
        pickle.loads(pickle.dumps(kind))
        kind("")
    except Exception:  # whatever a constructor or a loader of somebody else's raises
        return False
    return True


def _raised(rank: int, failure: tuple[type[Exception], str], elsewhere: str) -> Exception:
    kind, message = failure
    if elsewhere:  # nobody here may take it for the failure of what is done here
        return _told(RankError(f"rank {rank} failed at {elsewhere} ({kind.__name__}): {message}"))
    return _told(kind(f"on rank {rank}: {message}"))


def _told(error: Failure) -> Failure:
    """An error that every rank knows of."""
    with contextlib.suppress(AttributeError):
        error.told = True  # type: ignore[attr-defined]
    return error
