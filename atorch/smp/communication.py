"""Objects between processes, and meetings of processes, by the documented names. Objects travel over the hosts."""

from __future__ import annotations

from typing import Any

from atorch.distributed.collectives import gather_objects, meet
from atorch.errors import ArgumentError, shown
from atorch.smp.ranks import DP_GROUP, MP_GROUP, WORLD, CommGroup, RankType, process_group, ranks_of
from atorch.smp.session import session
from atorch.smp.steps.messages import on_host


def barrier(group: CommGroup = WORLD) -> None:
    """Wait until all processes of this one's `group` have called it.

    Raises:
        ArgumentError: some did not, who are named: in a warning soon, in the error once the time-out passes.
    """
    meet(f"smp.barrier({group})", process_group(group))


def dp_barrier() -> None:
    """`barrier` of the processes that see different samples."""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """`barrier` of the processes that hold one model."""
    barrier(MP_GROUP)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send an object to all others of this process's `group`, each of which calls `recv_from`; wait until all have.

    Tensors in the object arrive in host memory.

    Raises:
        ArgumentError: some did not before the time-out, who are named.
    """
    session().messages.send_and_wait(obj, [rank for rank in ranks_of(group) if rank != session().here.rank])


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object to the process whose rank of a type is `dest_rank`, which calls `recv_from`. Does not wait.

    Tensors in the object arrive in host memory, as they are now.

    Raises:
        ArgumentError: there is no such rank.
    """
    session().messages.send(obj, [_global(dest_rank, rank_type, "dest_rank")])


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """The object that the process whose rank of a type is `src_rank` sends to this one, by `send` or `broadcast`.

    Several are received in the order in which they were sent.

    Raises:
        ArgumentError: there is no such rank, or it sent none before the time-out.
    """
    return session().messages.receive(_global(src_rank, rank_type, "src_rank"))


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """The objects of all processes of this one's `group`, all of which call this, by their rank in it.

    Tensors in the objects arrive in host memory.

    Raises:
        ArgumentError: some did not come before the time-out, who are named.
    """
    return gather_objects(on_host(obj), process_group(group))


def _global(rank: int, kind: RankType, argument: str) -> int:
    if not isinstance(kind, RankType):
        raise ArgumentError(f"rank_type is {shown(kind)}; give one of smp.RankType, such as smp.RankType.PP_RANK")
    ranks = ranks_of(kind)
    if type(rank) is not int or not 0 <= rank < len(ranks):
        raise ArgumentError(f"{argument} is {shown(rank)}; ranks of {kind} are 0 to {len(ranks) - 1}")
    return ranks[rank]
