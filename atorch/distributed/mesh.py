"""The device mesh: named axes, rank tables, and the process groups along each axis.

The first axis varies fastest. With `[("tensor", 4), ("pipeline", 2), ("data", 2)]` ranks 0–3 are one
tensor group, 0 and 4 one pipeline group, 0 and 8 one data group.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from atorch.cost.parallelism import AXES as AXES
from atorch.cost.parallelism import AXIS_ALIASES
from atorch.cost.parallelism import BATCH_AXES as BATCH_AXES
from atorch.distributed import world
from atorch.distributed.collectives import global_rank, is_fake_world, present_group, world_group
from atorch.errors import StrategyError, near_miss, shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OUTERMOST_FIRST = AXES[::-1]

Slices = Sequence[tuple[str, int]]


def rank_table(
    slices: Slices, world_size: int, rank_order: Sequence[int] | None = None, *, instances: bool = False
) -> dict[str, list[list[int]]]:
    """The rank groups along every axis: `{name: [[ranks of one group], …]}`.

    Args:
        slices: `(name, size)` pairs, the fastest-varying first. Their product must be `world_size`.
        rank_order: a permutation of the ranks, `None` for 0, 1, 2, …; position i of the mesh holds `rank_order[i]`.
        instances: where the product divides `world_size`, every run of that many ranks is a mesh of its own.

    Raises:
        StrategyError: `slices` holds no pairs, the sizes do not multiply to `world_size`, or `rank_order` is no
            permutation of the ranks.
    """
    _need_slices(slices)
    size = math.prod(size for _, size in slices if type(size) is int)
    if instances and 0 < size < world_size and world_size % size == 0:
        order = range(world_size) if rank_order is None else rank_order
        _check((*slices, ("", world_size // size)), world_size, rank_order)
        # The tables number the ranks of one mesh from 0; `mesh[i]` is the job's rank.
        meshes = [order[start : start + size] for start in range(0, world_size, size)]
        tables = [rank_table(slices, size) for _ in meshes]
        return {
            name: [
                [mesh[i] for i in group] for mesh, table in zip(meshes, tables, strict=True) for group in table[name]
            ]
            for name, _ in slices
        }
    _check(slices, world_size, rank_order)
    return {name: groups_along(slices, world_size, rank_order, (name,)) for name, _ in slices}


def groups_along(
    slices: Slices, world_size: int, rank_order: Sequence[int] | None, names: Sequence[str]
) -> list[list[int]]:
    """The rank groups along the product of several axes, e.g. all ranks that see different samples."""
    _check(slices, world_size, rank_order)
    axes = [name for name, _ in reversed(slices)]
    across, along = [axis for axis in axes if axis not in names], [axis for axis in axes if axis in names]
    size = math.prod(size for name, size in slices if name in names)
    groups: list[list[int]] = _arranged(slices, rank_order, [*across, *along]).reshape(-1, size).tolist()
    return groups


def _arranged(slices: Slices, rank_order: Sequence[int] | None, axes: Sequence[str]) -> Any:
    """The ranks as an array of numpy with these axes, all of those of `slices`."""
    sizes = dict(reversed(slices))
    order = range(math.prod(sizes.values())) if rank_order is None else rank_order
    return np.array(order).reshape(list(sizes.values())).transpose([list(sizes).index(axis) for axis in axes])


def own_group(rank: int, slices: Slices, order: Sequence[int], names: Sequence[str]) -> list[int]:
    """The group of `groups_along` that a rank is in, ascending, without computing the others."""
    place, first, stride, offsets = order.index(rank), 0, 1, [0]
    for name, size in slices:
        if name in names:
            offsets = [offset + stride * step for step in range(size) for offset in offsets]
        else:
            first += place // stride % size * stride
        stride *= size
    return sorted(order[first + offset] for offset in offsets)


def _need_slices(slices: Any) -> None:
    if not isinstance(slices, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) for pair in slices
    ):
        raise StrategyError(
            f'a mesh was given {shown(slices)}; it takes [(name, size), …], e.g. [("tensor", 2), ("data", 4)]'
        )


def _check(slices: Slices, world_size: int, rank_order: Sequence[int] | None) -> None:
    names = [name for name, _ in slices]
    for name, size in slices:
        if names.count(name) > 1:
            raise StrategyError(f"axis {name!r} is given twice; give it once, with the product of the sizes")
        if type(size) is not int or size < 1:
            raise StrategyError(f"axis {name!r} has size {size!r}; a size is a whole number of at least 1")
    product = math.prod(size for _, size in slices)
    if product != world_size:
        sizes = " × ".join(f"{name} {size}" for name, size in slices) or "no axis"
        raise StrategyError(
            f"{sizes} = {product}, but there are {world_size} processes; the sizes must multiply to that"
        )
    if rank_order is None:
        return
    if any(type(rank) is not int for rank in rank_order) or sorted(rank_order) != list(range(world_size)):
        raise StrategyError(
            f"rank_order is {shown(list(rank_order))}; it must hold each of the {world_size} ranks "
            f"0 to {world_size - 1} once"
        )


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of one model along named axes. An axis that is not named has size 1.

    Raises:
        StrategyError: the axes or the order are invalid, or the ranks of a group along an axis do not ascend. Process
            groups number their members by rank, so a rank's index in the mesh and in its group would differ.
    """

    slices: tuple[tuple[str, int], ...]
    rank_order: tuple[int, ...] | None
    device_type: str
    timeout: timedelta = world.TIMEOUT  # of the groups along its axes
    _groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict, repr=False)
    _roots: list[DeviceMesh] = field(default_factory=list, repr=False)
    _joined: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name, _ in self.slices:
            if name not in AXES:
                raise StrategyError(f"there is no axis {name!r}; {near_miss(name, AXES)}")
        for name, groups in rank_table(self.slices, self.num_ranks, self.rank_order).items():
            for ranks in groups:
                if ranks != sorted(ranks):
                    raise StrategyError(
                        f"rank_order puts the processes {ranks} in one {name!r} group in that order; a group numbers "
                        "its processes by rank, so choose an order in which the ranks of every group ascend"
                    )

    @property
    def num_ranks(self) -> int:
        """The number of processes in the mesh: the product of all sizes."""
        return math.prod(size for _, size in self.slices)

    def layout(self) -> tuple[object, ...]:
        """A key that is equal for equal meshes."""
        return self.slices, self.rank_order, self.device_type

    def size(self, *names: str) -> int:
        return math.prod(size for name, size in self.slices if name in names)

    def rank(self, *names: str) -> int:
        """This process's index in its group along the axes, which is its rank in `group(*names)`."""
        return self.ranks(*names).index(global_rank())

    def ranks(self, *names: str) -> list[int]:
        """The ranks of this process's group along the axes, ascending."""
        if global_rank() >= self.num_ranks:
            raise StrategyError(f"the mesh arranges {self.num_ranks} processes, but this one is rank {global_rank()}")
        return own_group(global_rank(), self.slices, self.rank_order or range(self.num_ranks), names)

    def group(self, *names: str) -> dist.ProcessGroup:
        """The process group along the axes. All ranks must request the same groups in the same order."""
        key = tuple(name for name, size in self.slices if name in names and size > 1)
        if key not in self._groups:
            self._groups[key] = self._make_group(key)
        return self._groups[key]

    def axes_of(self, group_name: str) -> tuple[str, ...]:
        """The axes of this mesh's group with that name; for any other, as of all ranks, all axes larger than 1."""
        for key, group in self._groups.items():
            if group.group_name == group_name:
                return key
        return tuple(name for name, size in self.slices if size > 1)

    def _make_group(self, key: tuple[str, ...]) -> dist.ProcessGroup:
        world.ensure_group(self.device_type)
        if self.num_ranks != dist.get_world_size():
            raise StrategyError(
                f"the mesh arranges {self.num_ranks} processes, but there are {dist.get_world_size()}; "
                "resize its axes so that they multiply to that"
            )
        if self.size(*key) == self.num_ranks:
            return present_group()
        if not key:  # local synchronization: else every rank would have to create the groups of all ranks
            single = dist.new_group([global_rank()], timeout=self.timeout, use_local_synchronization=True)
            assert isinstance(single, dist.ProcessGroup)
            return single
        member_group: dist.ProcessGroup | None = None
        for ranks in groups_along(self.slices, self.num_ranks, self.rank_order, key):
            group = dist.new_group(sorted(ranks), timeout=self.timeout)
            member_group = group if global_rank() in ranks else member_group
        assert member_group is not None, "every rank is in one of the groups"
        if self.device_type == "cuda" and not is_fake_world():
            # A trial may fail on one rank. NCCL connects in the first collective, and nothing can wake a rank that
            # waits in it for a failed one: so all connect now, while no trial runs.
            dist.all_reduce(torch.zeros((), device=self.device_type), group=member_group)
        return member_group

    def device_mesh(self, *names: str) -> DeviceMesh:
        """The DeviceMesh over the axes, its dims in the order pipeline, data, zero, context, sequence, tensor.

        All are slices of one root, on the groups of `group`, so that methods which shard over different axes compose.
        The first call is collective.
        """
        if not self._roots:
            self._roots.append(self._make_root())
        return self._roots[0][tuple(sorted(names, key=_OUTERMOST_FIRST.index))]

    def joined_mesh(self, *dims: Sequence[str]) -> DeviceMesh:
        """A DeviceMesh with one dim for each product of axes, such as all axes whose ranks hold the same parameters.

        A dim uses `group` of its axes. Tensors can be sharded over it and over `device_mesh` of other axes.

        Raises:
            StrategyError: the mesh has the axis tensor, and the ranks along a dim do not ascend in the mesh's order.
        """
        large = [tuple(name for name in _OUTERMOST_FIRST if name in dim and self.size(name) > 1) for dim in dims]
        if all(len(axes) <= 1 for axes in large):
            return self.device_mesh(*(axes[0] if axes else dim[0] for axes, dim in zip(large, dims, strict=True)))
        joined = {"_".join(axes): axes for axes in large}
        if tuple(joined) not in self._joined:
            self._joined[tuple(joined)] = self._make_joined(joined)
        return self._joined[tuple(joined)]

    def _make_joined(self, joined: Mapping[str, tuple[str, ...]]) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        rest = [name for name in _OUTERMOST_FIRST if not any(name in axes for axes in joined.values())]
        dims = {**joined, **{name: (name,) for name in rest}}
        order = sorted(dims, key=lambda name: _OUTERMOST_FIRST.index(dims[name][0]))
        plain = self._grid().reshape([self.size(*dims[name]) for name in order])
        grid = plain
        for name in joined:  # groups number their members by rank
            grid = grid.sort(order.index(name)).values
        if self.size("tensor") > 1 and not grid.equal(plain):
            axes = ", ".join(name for name, _ in self.slices)
            raise StrategyError(
                f"parallel_mode has the axes in the order {axes}, in which the ranks along {' and '.join(joined)} do "
                "not ascend; give them in the order tensor, sequence, context, zero, data, pipeline"
            )
        groups = [self.group(*dims[name]) for name in order]
        return DeviceMesh.from_group(groups, self.device_type, grid, mesh_dim_names=tuple(order))[tuple(joined)]

    def close(self) -> None:
        """Destroy the groups that this mesh made. It must not be used afterwards; ranks that wait in a group fail."""
        for device_mesh in (*self._roots, *self._joined.values()):
            # A group ends once nothing refers to it, and torch 2.11 never frees some meshes.
            getattr(device_mesh, "_pg_registry", {}).clear()
        self._roots.clear()
        self._joined.clear()
        for key in list(self._groups):
            group = self._groups.pop(key)
            if group is not world_group():
                dist.destroy_process_group(group)
        forget_shardings()

    def _make_root(self) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        groups = [self.group(name) for name in _OUTERMOST_FIRST]
        return DeviceMesh.from_group(groups, self.device_type, self._grid(), mesh_dim_names=_OUTERMOST_FIRST)

    def _grid(self) -> torch.Tensor:
        """The ranks as a tensor with a dim for every axis, the outermost first."""
        present = [name for name in _OUTERMOST_FIRST if name in dict(self.slices)]
        sizes = [self.size(name) for name in _OUTERMOST_FIRST]
        return torch.tensor(_arranged(self.slices, self.rank_order, present).reshape(sizes))


def forget_shardings() -> None:
    """Clear DTensor's cache of sharding propagation, whose entries refer to meshes.

    The cache compares meshes by shape, not by groups: tensors on a new mesh would get the groups of a closed one.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


# The mesh that `parallel_group` and the like use; a ContextVar, so that one process can have several models.
_current: ContextVar[Mesh | None] = ContextVar("atorch_mesh", default=None)
# The last current mesh of any context, for threads that start without one, such as autograd's for CUDA devices.
_last: list[Mesh | None] = [None]


def set_current(mesh: Mesh | None) -> None:
    """Make `mesh` the one that `parallel_group`, `parallel_rank` and `parallel_group_size` use."""
    _current.set(mesh)
    _last[0] = mesh


@contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Make `mesh` current inside, and restore the previous one afterwards."""
    token, before = _current.set(mesh), _last[0]
    _last[0] = mesh
    try:
        yield
    finally:
        _current.reset(token)
        _last[0] = before


def current() -> Mesh | None:
    """The mesh that became current last in this context, or in any context where this thread has none."""
    return _current.get() or _last[0]


def parallel_group(name: str) -> dist.ProcessGroup:
    """The process group along axis `name` of the current mesh; raises StrategyError where there is none."""
    return _axis_of_current(name).group(AXIS_ALIASES.get(name, name))


def parallel_rank(name: str) -> int:
    """This process's place along axis `name` of the current mesh."""
    return _axis_of_current(name).rank(AXIS_ALIASES.get(name, name))


def parallel_group_size(name: str) -> int:
    """The size of axis `name` of the current mesh."""
    return _axis_of_current(name).size(AXIS_ALIASES.get(name, name))


def _axis_of_current(name: str) -> Mesh:
    mesh = current()
    name = AXIS_ALIASES.get(name, name)
    if mesh is None:
        raise StrategyError(f"no mesh has been made, so there is no group {name!r}; call auto_accelerate first")
    if name not in dict(mesh.slices):
        names = ", ".join(axis for axis, _ in mesh.slices)
        raise StrategyError(f"the mesh has no axis {name!r}; it has {names}. Name it in parallel_mode")
    return mesh
