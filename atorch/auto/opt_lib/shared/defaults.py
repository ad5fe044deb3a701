"""Completes a strategy for the processes that are there: fills the mesh, and adds a data-parallel method."""

from __future__ import annotations

from collections.abc import Iterable

from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.strategy import Method, Strategy
from atorch.cost.parallelism import REPLICA_AXES
from atorch.distributed.mesh import BATCH_AXES, Mesh

SLOT = "data_parallel"
NEEDING_VALUES = ("sequence_parallel", "context_parallel", "fp8")
"""Methods that try on the model's own blocks what they make of them, or convert what parameters hold."""


def complete(strategy: Strategy, world_size: int) -> Strategy:
    """`strategy` with what several processes need, written out.

    A missing `parallel_mode` means that all processes are data-parallel; a present one gets its `data` axis resized.
    Where several processes hold the same parameters and no method of the slot data_parallel is there, it is `ddp`.

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
    if replicated and not any(each.slot == SLOT for each in strategy):
        strategy = strategy.with_method(Ddp())
    return strategy


def idle_axes(strategy: Strategy) -> list[tuple[str, int]]:
    """The axes larger than 1 over which nothing in the strategy splits, with their sizes."""
    mode = strategy.get(ParallelMode)
    used = {axis for each in strategy for axis in each.splits} | set(BATCH_AXES)
    return [(axis, size) for axis, size in (mode.slices if mode else ()) if size > 1 and axis not in used]


def batch_place(strategy: Strategy, device_type: str) -> tuple[int, int]:
    """`(rank, size)`: which share of the batch this process will have under a complete strategy, of how many."""
    mode = strategy.get(ParallelMode)
    if mode is None:
        return 0, 1
    mesh = Mesh(mode.slices, mode.rank_order, device_type)
    return mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES)


def has_fsdp(strategy: Strategy) -> bool:
    """True if torch's FSDP2 shards parameters: under fsdp, and zero2 without another backend."""
    sharding = strategy.get(Fsdp)  # zero2 is one, whatever its backend
    return sharding is not None and getattr(sharding, "backend", "fsdp") == "fsdp"


def needs_values(methods: Iterable[Method | str]) -> str | None:
    """The first of some methods, or names of such, that asks a model for the values of its parameters."""
    names = (each if isinstance(each, str) else each.name for each in methods)
    return next((name for name in names if name in NEEDING_VALUES), None)
