"""Ranks and groups of this process, and object messages and barriers between processes, by their documented names.

An `mp` group, pipeline × tensor, holds a model: `pp` ranks hold its stages, `tp` ranks the slices of its tensors.
`dp` ranks see different samples (data × tensor), and `rdp` ranks hold the same parameters (data only). A group numbers
its processes by global rank. Objects travel through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import torch.distributed as dist

from atorch.distributed import world
from atorch.distributed.collectives import checked_barrier, gather_objects
from atorch.errors import ArgumentError, shown
from atorch.smp.session import AXES_OF, on_host, session

__all__ = [
    "DP_GROUP", "MP_GROUP", "PP_GROUP", "RDP_GROUP", "TP_GROUP", "WORLD", "CommGroup", "RankType", "dp_rank",
    "dp_size", "get_dp_group", "get_dp_process_group", "get_mp_group", "get_mp_process_group", "get_pp_group",
    "get_pp_process_group", "get_rdp_group", "get_rdp_process_group", "get_tp_group", "get_tp_process_group",
    "get_world_group", "get_world_process_group", "local_rank", "local_size", "mp_rank", "mp_size", "pp_rank",
    "pp_size", "rank", "rdp_rank", "rdp_size", "size", "tp_rank", "tp_size"
]  # fmt: skip

T = TypeVar("T")


class CommGroup(Enum):
    """The kinds of groups for communication; each process is in one group of each kind."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """The kind of a rank: among all processes, or in this process's group of a kind."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD = CommGroup.WORLD
MP_GROUP = CommGroup.MP_GROUP
DP_GROUP = CommGroup.DP_GROUP
PP_GROUP = CommGroup.PP_GROUP
TP_GROUP = CommGroup.TP_GROUP
RDP_GROUP = CommGroup.RDP_GROUP


def ranks_of(kind: CommGroup | RankType) -> list[int]:
    """The global ranks of this process's group of a kind, ascending.

    Raises:
        ArgumentError: `kind` is of neither enum, or `smp.init` has not been called.
    """
    return session().mesh.ranks(*_axes(kind))


def process_group(kind: CommGroup | RankType) -> dist.ProcessGroup:
    """This process's group of a kind, for `torch.distributed`.

    Raises:
        ArgumentError: as `ranks_of`.
    """
    return session().mesh.group(*_axes(kind))


def _axes(kind: CommGroup | RankType) -> tuple[str, ...]:
    if not isinstance(kind, (CommGroup, RankType)):
        raise ArgumentError(f"a group was given as {shown(kind)}; give one of smp.CommGroup, such as smp.DP_GROUP")
    if kind.value == "world":
        return tuple(name for name, _ in session().mesh.slices)
    return AXES_OF[kind.value]


def _rank(kind: CommGroup) -> int:
    return session().mesh.rank(*_axes(kind))


def _size(kind: CommGroup) -> int:
    return session().mesh.size(*_axes(kind))


def rank() -> int:
    """This process's global rank."""
    return session().here.rank


def size() -> int:
    """The number of processes."""
    return session().here.size


def local_rank() -> int:
    """This process's rank on its machine."""
    return session().here.local_rank


def local_size() -> int:
    """The number of processes on its machine; of all processes if no launcher sets it."""
    variable = world.variable("LOCAL_WORLD_SIZE")
    return size() if variable is None else int(variable[1])


def _query(name: str, asks: Callable[[CommGroup], T], kind: CommGroup, doc: str) -> Callable[[], T]:
    """The documented function `name`: `asks` for one kind of group."""

    def query() -> T:
        return asks(kind)

    query.__name__ = query.__qualname__ = name
    query.__doc__ = doc
    return query


def _queries_of(
    kind: CommGroup, who: str
) -> tuple[Callable[[], int], Callable[[], int], Callable[[], list[int]], Callable[[], dist.ProcessGroup]]:
    """A kind's documented functions: this process's rank in the group, its size, its ranks, and the process group."""
    of = kind.value
    return (
        _query(f"{of}_rank", _rank, kind, f"This process's number among those that {who}."),
        _query(f"{of}_size", _size, kind, f"The number of processes that {who}."),
        _query(f"get_{of}_group", ranks_of, kind, f"The ranks that {who}."),
        _query(f"get_{of}_process_group", process_group, kind, f"The group of the processes that {who}."),
    )


mp_rank, mp_size, get_mp_group, get_mp_process_group = _queries_of(MP_GROUP, "hold one model")
dp_rank, dp_size, get_dp_group, get_dp_process_group = _queries_of(DP_GROUP, "see different samples")
pp_rank, pp_size, get_pp_group, get_pp_process_group = _queries_of(PP_GROUP, "hold the stages of one model")
tp_rank, tp_size, get_tp_group, get_tp_process_group = _queries_of(TP_GROUP, "split the same tensors")
rdp_rank, rdp_size, get_rdp_group, get_rdp_process_group = _queries_of(RDP_GROUP, "hold the same parameters")
_, _, get_world_group, get_world_process_group = _queries_of(WORLD, "there are")


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
