"""A trial: a strategy applied to a copy of the model and stepped on all ranks together, with failures on any rank.

Every phase is guarded (`fault_barrier`): a candidate that fails on one rank is rejected on all. Nothing is interrupted;
the time limit is checked between phases.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from atorch.auto.context import AccelerateResult, Context
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator, FaultBarrier
from atorch.auto.planner.dry_runs.trial_context import Feed, candidate
from atorch.auto.strategy import Strategy
from atorch.auto.verification import cannot_evaluate, check
from atorch.distributed.mesh import BATCH_AXES
from atorch.errors import StrategyError
from atorch.profiler.peak_memory import PeakMemory


class Trial:
    """One strategy, alive on all ranks from `start` to `close`. All ranks call the same methods in the same order."""

    def __init__(
        self,
        ctx: Context,
        strategy: Strategy,
        crew: Coordinator,
        feed: Feed,
        timeout_s: float,
        *,
        limit_s: float = math.inf,
    ) -> None:
        self.strategy = strategy
        self.startup_s = 0.0
        self._base, self._feed = ctx, feed
        self._device = ctx.device
        self._applied: Context | None = None
        self._result: AccelerateResult | None = None
        self._batches: Iterator[Any] = iter(())
        self._memory = PeakMemory(self._device)
        self.is_overdue = False  # True if the trial ended because it took longer than `limit_s`
        self._limit_s = limit_s
        self._guard = FaultBarrier(ctx.world, crew, self._let_go, timeout_s=timeout_s)

    @property
    def failure(self) -> str | None:
        """The first failure on any rank, the same on all."""
        return "its time was over before it was ready" if self.is_overdue else self._guard.failure

    @property
    def elapsed_s(self) -> float:
        """Rank 0's seconds since this trial began, as of its last phase."""
        return self._guard.elapsed_s

    def start(self) -> bool:
        """Apply, build, verify the first pass, and take a step; returns True if all ranks succeeded."""
        for phase in (self._guard.connect, self._build, self._check):
            if self._guard.together(phase) is None:
                return False
            self.is_overdue = self.elapsed_s > self._limit_s
            if self.is_overdue:
                return False
        seconds = self._guard.together(self._first_step)
        self.startup_s = self.elapsed_s
        return seconds is not None

    def step(self) -> float | None:
        """Seconds of one step on the slowest rank; None if a rank failed."""
        seconds = self._guard.together(self._timed_step)
        return None if seconds is None else max(seconds)

    def peak_bytes(self) -> float | None:
        """The highest peak of all ranks in one more step; None if a rank failed."""

        def watched() -> float:
            with self._memory.watching():
                self._timed_step()
            return self._memory.peak_bytes

        peaks = self._guard.together(watched)
        return None if peaks is None else max(peaks)

    @property
    def memory_kind(self) -> str:
        return self._memory.kind

    def close(self) -> None:
        """Drop the copy and its optimizer, and close their groups."""
        self._guard.close()

    def _let_go(self) -> None:
        self._applied, self._result, self._batches = None, None, iter(())

    def _build(self) -> None:
        ctx = self.strategy.apply(candidate(self._base))
        self._applied, self._result = ctx, ctx.build()
        place = (0, 1) if ctx.mesh is None else (ctx.mesh.rank(*BATCH_AXES), ctx.mesh.size(*BATCH_AXES))
        self._batches = itertools.cycle(self._feed.batches(*place))

    def _check(self) -> bool:
        """Check that the first pass equals plain training's, and that the model can still be evaluated."""
        expected = self._base.plain_pass
        if expected is not None:
            assert self._applied is not None, "built"
            assert self._result is not None, "built"
            check(self._applied, self._result, expected)
            cannot = cannot_evaluate(self._applied, self._result, expected)
            if cannot is not None:
                raise StrategyError(cannot)
        return True

    def _first_step(self) -> float:
        loss = self._step()
        if not bool(torch.isfinite(loss).all()):
            raise ArithmeticError(f"the loss of the first step is {float(loss)}")
        return 0.0

    def _timed_step(self) -> float:
        self._synchronize()
        start = time.perf_counter()
        self._step()
        self._synchronize()
        return time.perf_counter() - start

    def _step(self) -> torch.Tensor:
        assert self._result is not None, "started"
        loss: torch.Tensor = self._result.step(next(self._batches))
        return loss

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
