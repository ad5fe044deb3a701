"""Ranks and groups of this process, by their documented names.

An `mp` group, pipeline × tensor, holds a model: `pp` ranks hold its stages, `tp` ranks the slices of its tensors.
`dp` ranks see different samples (data × tensor), and `rdp` ranks hold the same parameters (data only). A group numbers
its processes by global rank.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import torch.distributed as dist

from atorch.distributed import world
from atorch.errors import ArgumentError, shown
from atorch.smp.session import AXES_OF, session

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


def _door(name: str, asks: Callable[[CommGroup], T], kind: CommGroup, doc: str) -> Callable[[], T]:
    """The documented function `name`: `asks` for one kind of group."""

    def door() -> T:
        return asks(kind)

    door.__name__ = door.__qualname__ = name
    door.__doc__ = doc
    return door


def _doors(
    kind: CommGroup, who: str
) -> tuple[Callable[[], int], Callable[[], int], Callable[[], list[int]], Callable[[], dist.ProcessGroup]]:
    """A kind's documented functions: this process's rank in the group, its size, its ranks, and the process group."""
    of = kind.value
    return (
        _door(f"{of}_rank", _rank, kind, f"This process's number among those that {who}."),
        _door(f"{of}_size", _size, kind, f"The number of processes that {who}."),
        _door(f"get_{of}_group", ranks_of, kind, f"The ranks that {who}."),
        _door(f"get_{of}_process_group", process_group, kind, f"The group of the processes that {who}."),
    )


mp_rank, mp_size, get_mp_group, get_mp_process_group = _doors(MP_GROUP, "hold one model")
dp_rank, dp_size, get_dp_group, get_dp_process_group = _doors(DP_GROUP, "see different samples")
pp_rank, pp_size, get_pp_group, get_pp_process_group = _doors(PP_GROUP, "hold the stages of one model")
tp_rank, tp_size, get_tp_group, get_tp_process_group = _doors(TP_GROUP, "split the same tensors")
rdp_rank, rdp_size, get_rdp_group, get_rdp_process_group = _doors(RDP_GROUP, "hold the same parameters")
_, _, get_world_group, get_world_process_group = _doors(WORLD, "there are")
