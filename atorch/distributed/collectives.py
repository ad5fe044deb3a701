"""Decisions that all processes take together: one fails, all fail; one decides, all hear it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atorch import errors
from atorch.errors import ArgumentError, AtorchError, shown

T = TypeVar("T")


def several() -> bool:
    """Whether this job has more than one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def nobody_else() -> bool:
    """Whether the other processes are torch's fake ones: they say what this one says."""
    return dist.is_initialized() and dist.get_backend() == "fake"


# The group of all processes that is used in this context, where that is not the default group.
_everyone: ContextVar[dist.ProcessGroup | None] = ContextVar("atorch_everyone", default=None)


def everyone() -> dist.ProcessGroup | None:
    """The group of all processes; None where none is made yet."""
    return _everyone.get() or dist.group.WORLD


@contextmanager
def stand_on(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, `group` is the group of all processes, for meshes made there too: what is done there can fail alone."""
    token = _everyone.set(group)
    try:
        yield
    finally:
        _everyone.reset(token)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, by rank. Values are trusted: they come from this job's own processes.

    `group`, of all ranks too, keeps this apart from what else the processes exchange.
    """
    if not several():
        return [value]
    if nobody_else():
        return [value] * dist.get_world_size()
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group or everyone())
    return values


def from_rank_zero(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's `value`, on every rank."""
    if not several() or nobody_else():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group or everyone())
    return box[0]


def together(work: Callable[[], T]) -> T:
    """What `work` returns on this rank, or, where it raised on any rank, an error on every rank.

    A rank that did fine raises an error of the first failing rank's kind, or an ArgumentError where that is none of
    atorch's, with that rank named.
    """
    try:
        result = work()
    except Exception as error:  # also what users' code raises: no rank may be left waiting
        gather_objects((_kind(error), _told(error)))
        raise
    for rank, failure in enumerate(gather_objects(None)):
        if failure is not None:
            kind, message = failure
            raise getattr(errors, kind)(f"rank {rank} failed: {message}")
    return result


def agree(value: Any, what: str, error: type[AtorchError]) -> None:
    """Raise `error` on every rank where `value` (any plain data) differs between ranks."""
    values = gather_objects(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise error(
                f"{what} differs between processes: rank 0 has {shown(values[0], 400)}, rank {rank} has "
                f"{shown(other, 400)}"
            )


def synchronise(tensors: Sequence[torch.Tensor]) -> None:
    """Rank 0's values in every rank's `tensors`, in place; nothing travels where they agree already.

    The same model must stand on every rank before it is sharded; a model built without a seed does not.

    Raises:
        ArgumentError: the shapes or dtypes differ between ranks, so that these are different models.
    """
    if not several():
        return
    known = [tensor.detach() for tensor in tensors if not tensor.is_meta]
    agree([(tuple(tensor.shape), str(tensor.dtype)) for tensor in known], "the model", ArgumentError)
    if len({tuple(sums) for sums in gather_objects([_sum_of_bits(tensor) for tensor in known])}) == 1:
        return
    for tensor in known:
        value = tensor.contiguous()  # collectives take no other; a copy where it was not
        dist.broadcast(value, src=0, group=everyone())
        tensor.copy_(value)


def _sum_of_bits(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes, eight at a time as whole numbers, which is exact and as fast as reading them."""
    flat = tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    return int(flat[:whole].view(torch.int64).sum() + flat[whole:].sum())


def _kind(error: Exception) -> str:
    """The name of the error's class among atorch's own, which every rank can make from a message."""
    own = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(own, ArgumentError.__name__)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, AtorchError) else f"{type(error).__name__}: {error}"
