"""parallel_mode: the arrangement of processes into groups for each kind of parallelism.

`([("tensor", 4), ("pipeline", 2), ("data", 2)], None)`: the first axis varies fastest over the ranks. `data` is resized
so that the product is the number of processes. It costs nothing; the other methods split over its axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import field_validator
from typing_extensions import Self

from atorch.auto.opt_lib.shared.model_requirements import indivisible, uncuttable
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import AXES, AXIS_ALIASES, BATCH_AXES
from atorch.cost.state import Comm
from atorch.errors import StrategyError, near_miss

if TYPE_CHECKING:
    from atorch.auto.context import Context

SHORTEST = 1024
"""The fewest tokens of a sequence per rank of context: attention over fewer does not hide a hop of the ring."""
AxisSizes = tuple[tuple[str, int], ...]


@method("parallel_mode", phase=Phase.MESH)
class ParallelMode(Method):
    """The axes of the device mesh and their sizes."""

    slices: tuple[tuple[str, int], ...] = (("data", 1),)
    """`(name, size)` of each axis, the fastest-varying first; `data` is resized to fill the world."""
    rank_order: tuple[int, ...] | None = None
    """A permutation of the ranks; None for 0, 1, 2, …"""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Accept the documented `([(name, size), …], rank_order)` and a bare list of `(name, size)`, too."""
        if isinstance(config, (list, tuple)):
            config = list(config)
            is_whole = 1 <= len(config) <= 4 and isinstance(config[0], (list, tuple)) and not _is_slice(config[0])
            slices, *rest = config if is_whole else [config]
            order, *flags = rest or [None]
            _check_flags(flags)
            if not isinstance(slices, (list, tuple)) or not all(_is_slice(item) for item in slices):
                raise StrategyError(
                    f"parallel_mode was given {config!r}; it takes ([(name, size), …], rank_order or None), "
                    'e.g. ([("tensor", 2), ("data", 4)], None)'
                )
            config = {"slices": tuple(map(tuple, slices)), "rank_order": order}
        return super().of(config)

    @field_validator("slices", mode="before")
    @classmethod
    def _renamed(cls, slices: Any) -> Any:
        if not isinstance(slices, (list, tuple)) or not all(_is_slice(item) for item in slices):
            return slices
        return tuple((AXIS_ALIASES.get(name, name), size) for name, size in slices)

    @field_validator("slices")
    @classmethod
    def _hold(cls, slices: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        names = [name for name, _ in slices]
        for name, size in slices:
            if name not in AXES:
                raise ValueError(f"there is no axis {name!r}; {near_miss(name, AXES)}")
            if names.count(name) > 1:
                raise ValueError(f"axis {name!r} is given twice")
            if size < 1:
                raise ValueError(f"axis {name!r} has size {size}; a size is at least 1")
        return slices

    def __str__(self) -> str:
        """`parallel_mode(tensor 2, data 4)`."""
        if self == type(self)():
            return self.name
        order = "" if self.rank_order is None else f" in the order {list(self.rank_order)}"
        return f"{self.name}({', '.join(f'{name} {size}' for name, size in self.slices)}{order})"

    def size(self, *names: str) -> int:
        """The product of the sizes of the named axes; an absent axis has size 1."""
        return math.prod(size for name, size in self.slices if name in names)

    def resized(self, world_size: int) -> Self:
        """These axes with `data` resized so that they fill `world_size` processes.

        Raises:
            StrategyError: the other sizes do not divide `world_size`, or a rank order fixes another number of ranks.
        """
        others = [(name, size) for name, size in self.slices if name != "data"]
        product = math.prod(size for _, size in others)
        if world_size % product:
            terms = " × ".join(f"{name} {size}" for name, size in others)
            raise StrategyError(
                f"parallel_mode asks for {terms} = {product}, which does not divide {world_size} processes. "
                f"{_advice(others, world_size)}"
            )
        data = world_size // product
        slices = tuple((name, data if name == "data" else size) for name, size in self.slices)
        if "data" not in dict(slices) and data > 1:
            slices = (*slices, ("data", data))
        if self.rank_order is not None and sorted(self.rank_order) != list(range(world_size)):
            raise StrategyError(
                f"parallel_mode has the rank_order {list(self.rank_order)}, but there are {world_size} processes; "
                f"it must hold each of the ranks 0 to {world_size - 1} once, or be None"
            )
        return self.model_copy(update={"slices": slices})

    def unfit(self, cost: Cost) -> str | None:
        ranks = self.size(*BATCH_AXES)
        if cost.batch_size % ranks:
            return f"{cost.batch_size:g} samples are not shared out evenly over {ranks} processes"
        return None

    def cost(self, cost: Cost) -> Cost:
        """Set the axes and a device's share of the samples; ranks exchange the counts that weight their losses."""
        cost = cost.replace(axes=dict(self.slices))
        ranks = cost.size(*BATCH_AXES)
        cost = cost.replace(batch_size=cost.batch_size / ranks)
        if cost.num_counts:
            cost = cost.send(Comm("all_reduce", BATCH_AXES, 8.0 * cost.num_counts * ranks))
        return cost

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """Meshes by whose sizes the model can be divided, with tensor and sequence inside a node."""
        if cluster.world_size > 1:
            for slices in meshes(profile, cluster):
                yield cls(slices=slices)

    def apply(self, ctx: Context) -> Context:
        from atorch.distributed.mesh import Mesh, set_current

        mesh = Mesh(self.slices, self.rank_order, ctx.device.type, ctx.world.timeout)
        if ctx.mesh is not None and ctx.mesh.layout() == mesh.layout():
            mesh = ctx.mesh
        for name, _ in self.slices:
            mesh.group(name)
        set_current(mesh)
        return replace(ctx, mesh=mesh)


def size_of(ctx: Context, *names: str) -> int:
    """The product of the axes' sizes in the context's mesh or, before there is one, in the strategy's."""
    if ctx.mesh is not None:
        return ctx.mesh.size(*names)
    mode = ctx.strategy.get(ParallelMode)
    if mode is None:
        return ctx.world.size if "data" in names else 1
    return mode.resized(ctx.world.size).size(*names)


def _is_slice(item: Any) -> bool:
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        return False
    return isinstance(item[0], str) and isinstance(item[1], int) and not isinstance(item[1], bool)


def _check_flags(flags: Sequence[Any]) -> None:
    """Check entries three and four of ATorch's configuration: several instances of the mesh, and a DeviceMesh."""
    for flag in flags:
        if flag is not None and not isinstance(flag, bool):
            raise StrategyError(f"parallel_mode has {flag!r} behind the rank order; True, False or None may follow")
    if flags and flags[0]:
        raise StrategyError(
            "parallel_mode was given support_multi_parallel_instance, under which a job trains several models that do "
            "not know each other; start a job for each, or let data fill the processes with replicas (False)"
        )


def _advice(others: Sequence[tuple[str, int]], world_size: int) -> str:
    """Advice with smaller sizes that divide the world: every axis is shrunk to its largest divisor in turn."""
    left, sizes, product = world_size, [], math.prod(size for _, size in others)
    start = f"Start {product} processes (torchrun --nproc-per-node {product}) or a multiple. Else use"
    for name, size in others:
        fitting = next(d for d in range(min(size, left), 0, -1) if left % d == 0)
        left //= fitting
        sizes.append(f"{name} {fitting}")
    rest = f"{' × '.join(sizes)}; data then takes the {left} that {'is' if left == 1 else 'are'} left."
    return f"{start if product > world_size else 'Use'} {rest}"


def meshes(profile: ModelProfile, cluster: ClusterSpec) -> Iterator[AxisSizes]:
    """`(name, size)` of every axis larger than 1, the fastest-varying first, for all promising meshes.

    tensor and sequence communicate in every block and stay inside a node. context overlaps with attention, data and
    zero with backward, and pipeline sends little: Narayanan et al. 2021, arXiv 2104.04473, section 3.2, and Jacobs et
    al. 2023, arXiv 2309.14509. A sequence is split over one axis at most.
    """
    world = cluster.world_size
    for tensor in _tensor_sizes(profile, cluster):
        for sequence, context in _sequence_sizes(profile, cluster, tensor):
            inner = tensor * sequence * context
            for pipeline in _divisors(world // inner):
                if pipeline > max(1, profile.num_distinct_blocks):
                    break
                for zero in _zero_sizes(cluster, inner, world // inner // pipeline):
                    sizes = {"tensor": tensor, "sequence": sequence, "context": context, "zero": zero}
                    sizes |= {"data": world // inner // pipeline // zero, "pipeline": pipeline}
                    yield tuple((name, size) for name, size in sizes.items() if size > 1)


def _tensor_sizes(profile: ModelProfile, cluster: ClusterSpec) -> Iterator[int]:
    """Sizes of tensor: inside a node, and larger only if the devices of a node cannot hold one block."""
    yield 1
    if not any(block.num_heads > 1 for block in profile.blocks):
        return
    largest = cluster.devices_per_node
    while largest < cluster.world_size and _block_bytes(profile) / largest > cluster.device.memory_bytes:
        largest *= 2
    for size in _divisors(cluster.world_size)[1:]:
        is_whole = size % cluster.devices_per_node == 0 or cluster.devices_per_node % size == 0
        if size <= largest and is_whole and not indivisible(profile.segments, size, "tensor", experts=True):
            yield size


def _block_bytes(profile: ModelProfile) -> float:
    """Bytes of one block in backward: 16-bit weights twice, fp32 gradients, activations of one sample."""
    blocks = profile.blocks
    return max((8.0 * block.num_params + block.saved_bytes / profile.batch_size for block in blocks), default=0.0)


def _sequence_sizes(profile: ModelProfile, cluster: ClusterSpec, tensor: int) -> Iterator[tuple[int, int]]:
    """Sizes of (sequence, context) for a given size of tensor."""
    yield 1, 1
    lengths = [block.sequence_length for block in profile.blocks if block.attention_flops and block.sequence_length]
    if not lengths:
        return
    has_heads = any(block.num_heads > 1 for block in profile.blocks)
    for size in _divisors(cluster.world_size // tensor)[1:]:
        is_inside = has_heads and cluster.devices_per_node % (tensor * size) == 0
        heads = indivisible(profile.segments, tensor * size, "tensor × sequence")
        if is_inside and not heads and not uncuttable(profile.segments, size, "sequence"):
            yield size, 1
        if min(lengths) // size >= SHORTEST and not uncuttable(profile.segments, 2 * size, "context"):
            yield 1, size


def _zero_sizes(cluster: ClusterSpec, inner: int, replicas: int) -> Iterator[int]:
    """Sizes of zero: 1 for no such axis, or the replicas inside a node or a leaf, with copies between these."""
    yield 1
    within = (devices // inner for devices in (cluster.devices_per_node, cluster.devices_per_leaf))
    yield from sorted({size for size in within if 1 < size < replicas and replicas % size == 0})


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
