"""A search's choice applied to the user's own model, so that it can be undone.

A choice ran on copies; the model itself may still refuse it: memory is short, or it holds what its copies had not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from atorch.auto.context import Context
from atorch.auto.planner.guard import Crew, Guard, forget_compiled
from atorch.distributed.mesh import set_current
from atorch.distributed.rng import RandomState
from atorch.runtime.snapshot import Snapshot

T = TypeVar("T")


def attempt(ctx: Context, work: Callable[[Context], T]) -> tuple[T | None, str | None]:
    """Run `work` on the context's model; returns its result, or why it failed on some process. All call this together.

    Where it failed the model, with its values, buffers and gradients, and random states are as before on all
    processes, and the groups that it made are closed.
    """
    kept, random_state, made = Snapshot(ctx.root), RandomState.now(), list[T]()
    crew = Crew(ctx.world)

    def let_go() -> None:
        made.clear()
        kept.restore()  # a model that was sharded holds the group, and who waits in that would not hear of its end

    guard = Guard(ctx.world, crew, let_go, timeout_s=ctx.world.timeout.total_seconds())
    own = replace(ctx, rank_weights=[], unrounded={})
    try:
        for phase in (guard.connect, lambda: made.append(work(own))):
            if guard.together(phase) is None:
                random_state.restore()
                forget_compiled()
                return None, guard.failure
        set_current(guard.mesh)
        return made[0], None
    finally:
        crew.close()
