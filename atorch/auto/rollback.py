"""A search's choice applied to the user's own model, so that it can be undone.

A choice ran on copies; the model itself may still refuse it: memory is short, or it holds what its copies had not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from atorch.auto.context import Context
from atorch.auto.planner.dry_run.fault_barrier import Coordinator, FaultBarrier, forget_compiled
from atorch.distributed.mesh import set_current
from atorch.distributed.rng import RandomState
from atorch.model.snapshot import Snapshot
from atorch.units import format_bytes

T = TypeVar("T")


def attempt(ctx: Context, work: Callable[[Context], T], more_bytes: float | None = None) -> tuple[T | None, str | None]:
    """Run `work` on the context's model; returns its result, or why it failed on some process. All call this together.

    With `more_bytes` it has failed as well where its peak on a GPU leaves less than that of memory: what never took a
    step has no states of its optimizer yet.

    Where it failed the model, with its values, buffers and gradients, and random states are as before on all
    processes, and the groups that it made are closed.
    """
    kept, random_state, made = Snapshot(ctx.root), RandomState.now(), list[T]()
    crew = Coordinator(ctx.world)

    def let_go() -> None:
        made.clear()
        kept.restore()  # a model that was sharded holds the group, and who waits in that would not hear of its end

    guard = FaultBarrier(ctx.world, crew, let_go, timeout_s=ctx.world.timeout.total_seconds())
    own = replace(ctx, rank_weights=[], unrounded={})

    def working() -> None:
        is_watched = more_bytes is not None and ctx.device.type == "cuda"
        if is_watched:
            torch.cuda.reset_peak_memory_stats(ctx.device)
        made.append(work(own))
        if is_watched:
            needed = torch.cuda.max_memory_allocated(ctx.device) + (more_bytes or 0.0)
            if needed > (room := torch.cuda.mem_get_info(ctx.device)[1]):
                raise MemoryError(
                    f"its first step would need {format_bytes(needed)} of memory, of {format_bytes(room)}"
                )

    try:
        for phase in (guard.connect, working):
            if guard.together(phase) is None:
                random_state.restore()
                forget_compiled()
                return None, guard.failure
        set_current(guard.mesh)
        return made[0], None
    finally:
        crew.close()
