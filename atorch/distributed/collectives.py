"""Decisions that all processes take together: one fails, all fail; one decides, all hear it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atorch.errors import AtorchError

T = TypeVar("T")


def several() -> bool:
    """Whether this job has more than one process."""
    return dist.is_initialized() and dist.get_world_size() > 1


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value`, by rank. Values are trusted: they come from this job's own processes."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_host_group())
    return values


def from_rank_zero(value: T) -> T:
    """Rank 0's `value`, on every rank."""
    if not several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_host_group(), device=torch.device("cpu"))
    return box[0]


def together(work: Callable[[], T]) -> T:
    """What `work` returns on this rank, or, where it raised an AtorchError on any rank, an error on every rank.

    A rank that did fine raises the first failing rank's error, with that rank named.
    """
    try:
        result, failure = work(), None
    except AtorchError as error:
        result, failure = None, error
    if several():
        kinds = gather_objects(None if failure is None else (type(failure).__name__, str(failure)))
        failed = [rank for rank, kind in enumerate(kinds) if kind is not None]
        if failed and failure is None:
            raise _named(kinds[failed[0]][0])(f"rank {failed[0]} failed: {kinds[failed[0]][1]}")
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def agree(value: Any, what: str, error: type[AtorchError]) -> None:
    """Raise `error` on every rank where `value` (any plain data) differs between ranks."""
    values = gather_objects(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise error(f"{what} differs between processes: rank 0 has {values[0]!r}, rank {rank} has {other!r}")


def _named(name: str) -> type[AtorchError]:
    kinds = {AtorchError.__name__: AtorchError}
    waiting = [AtorchError]
    while waiting:
        kind = waiting.pop()
        kinds[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return kinds.get(name, AtorchError)


def _host_group() -> dist.ProcessGroup | None:
    """The default group; with cpu:gloo beside nccl its object collectives run over the host."""
    return dist.group.WORLD


def synchronise(tensors: Sequence[torch.Tensor]) -> None:
    """Rank 0's values in every rank's `tensors`, in place; nothing travels where they agree already.

    The same model must stand on every rank before it is sharded; a model built without a seed does not.
    """
    if not several():
        return
    known = [tensor for tensor in tensors if not tensor.is_meta]
    sums = [float(torch.sum(tensor.detach(), dtype=torch.float64)) for tensor in known]
    if len({tuple(values) for values in gather_objects(sums)}) == 1:
        return
    with torch.no_grad():
        for tensor in known:
            dist.broadcast(tensor.detach(), src=0)
