"""How the processes are arranged: named axes, rank tables, and the groups along each axis.

The first axis varies fastest. With `[("tensor", 4), ("pipeline", 2), ("data", 2)]` ranks 0–3 are one
tensor group, 0 and 4 one pipeline group, 0 and 8 one data group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from atorch.distributed import world
from atorch.errors import StrategyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("data", "zero", "tensor", "sequence", "context", "pipeline")
BATCH_AXES = ("data", "zero")
"""Axes whose ranks see different samples, in the order hybrid sharding wants: replicas, then shards."""

Slices = Sequence[tuple[str, int]]


def rank_table(
    slices: Slices, world_size: int, rank_order: Sequence[int] | None = None
) -> dict[str, list[list[int]]]:
    """The rank groups along every axis: `{name: [[ranks of one group], …]}`.

    Args:
        slices: `(name, size)` pairs, the fastest-varying first. Their product must be `world_size`.
        rank_order: a permutation of the ranks, `None` for 0, 1, 2, …; position i of the mesh holds `rank_order[i]`.

    Raises:
        StrategyError: the sizes do not multiply to `world_size`, or `rank_order` is no permutation of the ranks.
    """
    return {name: groups_along(slices, world_size, rank_order, (name,)) for name, _ in slices}


def groups_along(
    slices: Slices, world_size: int, rank_order: Sequence[int] | None, names: Sequence[str]
) -> list[list[int]]:
    """The rank groups of the product of several axes, e.g. all ranks that see different samples."""
    _check(slices, world_size, rank_order)
    order = list(rank_order) if rank_order is not None else list(range(world_size))
    strides, stride = {}, 1
    for name, size in slices:
        strides[name], stride = (stride, size), stride * size
    along = [strides[name] for name, _ in reversed(slices) if name in names]
    across = [strides[name] for name, _ in reversed(slices) if name not in names]
    inner = [sum(i * s for i, (s, _) in zip(at, along, strict=True)) for at in _grid(along)]
    outer = [sum(i * s for i, (s, _) in zip(at, across, strict=True)) for at in _grid(across)]
    return [[order[base + offset] for offset in inner] for base in outer]


def _grid(axes: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size) for _, size in axes))


def _check(slices: Slices, world_size: int, rank_order: Sequence[int] | None) -> None:
    product = math.prod(size for _, size in slices)
    shown = " × ".join(f"{name} {size}" for name, size in slices) or "nothing"
    if product != world_size:
        raise StrategyError(f"{shown} = {product}, but there are {world_size} processes; the sizes must multiply to that")
    if rank_order is not None and sorted(rank_order) != list(range(world_size)):
        raise StrategyError(
            f"rank_order is {list(rank_order)}; it must hold each of the {world_size} ranks 0 to {world_size - 1} once"
        )


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of one model along named axes. An axis that was not named has size 1."""

    slices: tuple[tuple[str, int], ...]
    rank_order: tuple[int, ...] | None
    device_type: str
    _groups: dict[tuple[str, ...], dist.ProcessGroup | None] = field(default_factory=dict, repr=False)
    _device_meshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)

    def layout(self) -> tuple[object, ...]:
        """What makes two meshes the same."""
        return self.slices, self.rank_order, self.device_type

    def size(self, *names: str) -> int:
        """The product of the axes' sizes."""
        sizes = dict(self.slices)
        return math.prod(sizes.get(name, 1) for name in names)

    def rank(self, *names: str) -> int:
        """This process's place in its group along the axes."""
        return self.ranks(*names).index(_my_rank())

    def ranks(self, *names: str) -> list[int]:
        """The ranks of this process's group along the axes, in the group's order."""
        for group in groups_along(self.slices, math.prod(s for _, s in self.slices), self.rank_order, names):
            if _my_rank() in group:
                return group
        raise AssertionError("every rank is in a group")

    def group(self, *names: str) -> dist.ProcessGroup:
        """The process group along the axes. All processes must ask for the same groups in the same order."""
        key = tuple(name for name, _ in self.slices if name in names)
        if key not in self._groups:
            self._groups[key] = self._make_group(key)
        group = self._groups[key]
        if group is None:
            raise AssertionError("every rank is in a group")
        return group

    def _make_group(self, key: tuple[str, ...]) -> dist.ProcessGroup | None:
        world.ensure_group(self.device_type)
        num_ranks = math.prod(s for _, s in self.slices)
        if self.size(*key) == num_ranks and self.rank_order is None:
            return dist.group.WORLD
        mine = None
        for ranks in groups_along(self.slices, num_ranks, self.rank_order, key):
            group = dist.new_group(ranks, timeout=world.TIMEOUT)
            mine = group if _my_rank() in ranks else mine
        return mine

    def device_mesh(self, *names: str) -> DeviceMesh:
        """The DeviceMesh of this process over the axes, in the order they are named here."""
        from torch.distributed.device_mesh import DeviceMesh

        if names not in self._device_meshes:
            world.ensure_group(self.device_type)
            num_ranks = math.prod(s for _, s in self.slices)
            table = torch.tensor(list(self.rank_order or range(num_ranks)))
            grid = table.reshape([size for _, size in reversed(self.slices)])
            present = [name for name, _ in reversed(self.slices)]
            others = [name for name in present if name not in names]
            grid = grid.permute([present.index(name) for name in [*others, *(n for n in names if n in present)]])
            shape = [self.size(name) for name in (*others, *names)]
            whole = DeviceMesh(self.device_type, grid.reshape(shape), mesh_dim_names=(*others, *names))
            self._device_meshes[names] = whole[names] if others else whole
        return self._device_meshes[names]


def _my_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# Which model's mesh `parallel_group` and its kin speak of; a ContextVar, so that several models live in one process.
_current: ContextVar[Mesh | None] = ContextVar("atorch_mesh", default=None)


def set_current(mesh: Mesh | None) -> None:
    """Make `mesh` the one that `parallel_group`, `parallel_rank` and `parallel_group_size` speak of."""
    _current.set(mesh)


@contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
    """`mesh` is current inside; the one before is current again afterwards."""
    token = _current.set(mesh)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Mesh | None:
    """The mesh of the model that was accelerated last in this context."""
    return _current.get()


def parallel_group(name: str) -> dist.ProcessGroup:
    """The process group along axis `name` of the current mesh; raises StrategyError where there is none."""
    return _axis_of_current(name).group(name)


def parallel_rank(name: str) -> int:
    """This process's place along axis `name` of the current mesh."""
    return _axis_of_current(name).rank(name)


def parallel_group_size(name: str) -> int:
    """The size of axis `name` of the current mesh."""
    return _axis_of_current(name).size(name)


def _axis_of_current(name: str) -> Mesh:
    mesh = _current.get()
    if mesh is None:
        raise StrategyError(f"no mesh has been made, so there is no group {name!r}; call auto_accelerate first")
    if name not in dict(mesh.slices):
        names = ", ".join(axis for axis, _ in mesh.slices)
        raise StrategyError(f"the mesh has no axis {name!r}; it has {names}. Name it in parallel_mode")
    return mesh
