"""Object messages and barriers between processes, by the documented names. Objects travel through host memory."""

from __future__ import annotations

from typing import Any

from atorch.distributed.collectives import checked_barrier, gather_objects
from atorch.errors import ArgumentError, shown
from atorch.smp.ranks import DP_GROUP, MP_GROUP, WORLD, CommGroup, RankType, process_group, ranks_of
from atorch.smp.session import session
from atorch.smp.steps.messages import on_host


def barrier(group: CommGroup = WORLD) -> None:
    """Wait until all processes of this process's `group` have called it.

    Raises:
        ArgumentError: some did not call it before the time-out; an earlier warning and the error list them.
    """
    checked_barrier(f"smp.barrier({group})", process_group(group))


def dp_barrier() -> None:
    """`barrier` for the processes that see different samples."""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """`barrier` for the processes that hold one model."""
    barrier(MP_GROUP)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send an object to all others of this process's `group`, and wait until each has called `recv_from`.

    Tensors in the object arrive in host memory.

    Raises:
        ArgumentError: some did not call it before the time-out; the error lists them.
    """
    session().messages.send_and_wait(obj, [rank for rank in ranks_of(group) if rank != session().here.rank])


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object to the process with rank `dest_rank` of a type, which calls `recv_from`; does not wait.

    Tensors in the object are copied now and arrive in host memory.

    Raises:
        ArgumentError: there is no such rank.
    """
    session().messages.send(obj, [_global(dest_rank, rank_type, "dest_rank")])


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Receive an object from the process with rank `src_rank` of a type, which calls `send` or `broadcast`.

    Several objects are received in the order in which they were sent.

    Raises:
        ArgumentError: there is no such rank, or it sent no object before the time-out.
    """
    return session().messages.receive(_global(src_rank, rank_type, "src_rank"))


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Gather the objects of all processes of this process's `group`, by rank in it; all of them call this.

    Tensors in the objects arrive in host memory.

    Raises:
        ArgumentError: some did not call it before the time-out; the error lists them.
    """
    return gather_objects(on_host(obj), process_group(group))


def _global(rank: int, kind: RankType, argument: str) -> int:
    if not isinstance(kind, RankType):
        raise ArgumentError(f"rank_type is {shown(kind)}; give one of smp.RankType, such as smp.RankType.PP_RANK")
    ranks = ranks_of(kind)
    if type(rank) is not int or not 0 <= rank < len(ranks):
        raise ArgumentError(f"{argument} is {shown(rank)}; ranks of {kind} are 0 to {len(ranks) - 1}")
    return ranks[rank]
