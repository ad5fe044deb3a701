"""Agreement of a strategy with the job's processes: missing methods are filled in, and a mesh must match the others.

Every axis needs a method that splits over it, and every method that splits needs its axis. Methods declare their axes
(`Method.splits`) and companions (`Method.needs`), so the rules of a mesh name no method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.strategy import METHODS, Method, Strategy
from atorch.cost.parallelism import BATCH_AXES, REPLICA_AXES

SLOT = "data_parallel"


def complete(strategy: Strategy, world_size: int) -> Strategy:
    """`strategy` with the methods that several processes need.

    Without `parallel_mode` all processes become data-parallel; otherwise its `data` axis is resized.
    If several processes hold the same parameters and no method of the slot data_parallel is given, `ddp` is added.

    Raises:
        StrategyError: the sizes other than `data` do not divide the number of processes.
    """
    mode = strategy.get(ParallelMode)
    if mode is not None:
        strategy = strategy.with_method(mode.resized(world_size))
    elif world_size > 1:
        strategy = strategy.with_method(ParallelMode(slices=(("data", world_size),)))
    mode = strategy.get(ParallelMode)
    replicated = mode is not None and mode.size(*REPLICA_AXES) > 1
    if replicated and not any(method.slot == SLOT for method in strategy):
        strategy = strategy.with_method(Ddp())
    return strategy


def idle_axes(strategy: Strategy) -> list[tuple[str, int]]:
    """Axes larger than 1 that no method of the strategy splits over, with their sizes."""
    mode = strategy.get(ParallelMode)
    used = {axis for method in strategy for axis in method.splits} | set(BATCH_AXES)
    return [(axis, size) for axis, size in (mode.slices if mode else ()) if size > 1 and axis not in used]


def batch_place(strategy: Strategy, device_type: str) -> tuple[int, int]:
    """`(rank, size)`: this process's share of the batch under a complete strategy, and the number of shares."""
    from atorch.distributed.mesh import Mesh

    mode = strategy.get(ParallelMode)
    if mode is None:
        return 0, 1
    mesh = Mesh(mode.slices, mode.rank_order, device_type)
    return mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES)


def needs_values(methods: Iterable[Method | str]) -> str | None:
    """The first of `methods` (or of their names) that needs the values of a model's parameters, or None."""
    names = (method if isinstance(method, str) else method.name for method in methods)
    return next((name for name in names if METHODS[name].needs_values), None)


def disagreement(methods: Collection[Method], axes: Mapping[str, int]) -> str | None:
    """The reason why `methods` do not match the mesh `axes` (name → size), or None.

    Every axis but data needs a method that splits over it, and every method that splits needs one of its axes. Where
    processes hold the same parameters, a method of the slot data_parallel is needed; elsewhere none may need replicas.
    Only fsdp distinguishes zero from data: its shards stay within zero. Other methods treat both as one axis.
    """
    large = {name for name, size in axes.items() if size > 1}
    split = {axis for method in methods for axis in method.splits}
    for axis in sorted(large - {"data"} - split):
        return f"no method splits over {axis}"
    is_shared = not large.isdisjoint(REPLICA_AXES)
    for method in methods:
        if method.slot == SLOT:
            if method.needs_replicas and not is_shared:
                return f"{method.name} has no two processes that hold the same parameters"
        elif method.splits and large.isdisjoint(method.splits):
            return f"{method.name} has no axis {' or '.join(method.splits)} to split over"
    if is_shared and not any(method.slot == SLOT for method in methods):
        return f"several processes hold the same parameters, and no method of the slot {SLOT} keeps them equal"
    return incomplete(methods)


def incomplete(methods: Collection[Method]) -> str | None:
    """The reason why a method lacks the one that it completes, or None."""
    names = {method.name for method in methods}
    for method in methods:
        for name in method.needs:
            if name not in names:
                return f"{method.name} completes {name}, which is not there"
    return None
