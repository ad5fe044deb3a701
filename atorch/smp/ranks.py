"""Ranks and groups of this process, by their documented names.

A model is held by an `mp` group, pipeline × tensor. Along `pp` its stages differ, along `tp` the slices of its tensors.
`dp` is everyone who sees other samples, data × tensor, and `rdp` who holds the same parameters, data alone. A group
numbers its processes by rank.
"""

from __future__ import annotations

from enum import Enum

import torch.distributed as dist

from atorch.distributed import world
from atorch.errors import ArgumentError, shown
from atorch.smp.session import AXES_OF, session


class CommGroup(Enum):
    """The groups that objects are sent in; each process is in one of each kind."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """The kind of a rank's number: among all processes, or in this process's group of a kind."""

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
    """The ranks, among all processes, of this process's group of a kind, ascending.

    Raises:
        ArgumentError: `kind` is neither enum's, or `smp.init` has not been called.
    """
    return session().mesh.ranks(*_axes(kind))


def process_group(kind: CommGroup | RankType) -> dist.ProcessGroup:
    """This process's group of a kind, which `torch.distributed` takes.

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
    """This process's number among all processes."""
    return session().here.rank


def size() -> int:
    """The number of processes."""
    return session().here.size


def local_rank() -> int:
    """This process's number on its machine."""
    return session().here.local_rank


def local_size() -> int:
    """The number of processes on its machine; all of them, where no launcher says so."""
    held = world.variable("LOCAL_WORLD_SIZE")
    return size() if held is None else int(held[1])


def mp_rank() -> int:
    """This process's number among those that hold one model."""
    return _rank(MP_GROUP)


def mp_size() -> int:
    """The number of processes that hold one model."""
    return _size(MP_GROUP)


def get_mp_group() -> list[int]:
    """The ranks that hold one model."""
    return ranks_of(MP_GROUP)


def get_mp_process_group() -> dist.ProcessGroup:
    """The group of the processes that hold one model."""
    return process_group(MP_GROUP)


def dp_rank() -> int:
    """This process's number among those that see different samples."""
    return _rank(DP_GROUP)


def dp_size() -> int:
    """The number of processes that see different samples."""
    return _size(DP_GROUP)


def get_dp_group() -> list[int]:
    """The ranks that see different samples."""
    return ranks_of(DP_GROUP)


def get_dp_process_group() -> dist.ProcessGroup:
    """The group of the processes that see different samples."""
    return process_group(DP_GROUP)


def pp_rank() -> int:
    """This process's number among those that hold the stages of one model."""
    return _rank(PP_GROUP)


def pp_size() -> int:
    """The number of processes that hold the stages of one model."""
    return _size(PP_GROUP)


def get_pp_group() -> list[int]:
    """The ranks that hold the stages of one model."""
    return ranks_of(PP_GROUP)


def get_pp_process_group() -> dist.ProcessGroup:
    """The group of the processes that hold the stages of one model."""
    return process_group(PP_GROUP)


def tp_rank() -> int:
    """This process's number among those that split the same tensors."""
    return _rank(TP_GROUP)


def tp_size() -> int:
    """The number of processes that split the same tensors."""
    return _size(TP_GROUP)


def get_tp_group() -> list[int]:
    """The ranks that split the same tensors."""
    return ranks_of(TP_GROUP)


def get_tp_process_group() -> dist.ProcessGroup:
    """The group of the processes that split the same tensors."""
    return process_group(TP_GROUP)


def rdp_rank() -> int:
    """This process's number among those that hold the same parameters."""
    return _rank(RDP_GROUP)


def rdp_size() -> int:
    """The number of processes that hold the same parameters."""
    return _size(RDP_GROUP)


def get_rdp_group() -> list[int]:
    """The ranks that hold the same parameters."""
    return ranks_of(RDP_GROUP)


def get_rdp_process_group() -> dist.ProcessGroup:
    """The group of the processes that hold the same parameters."""
    return process_group(RDP_GROUP)


def get_world_group() -> list[int]:
    """The ranks of all processes."""
    return ranks_of(WORLD)


def get_world_process_group() -> dist.ProcessGroup:
    """The group of all processes."""
    return process_group(WORLD)
