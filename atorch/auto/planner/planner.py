"""The search: trace, score every composition, drop what cannot fit, run the most promising for real, take the fastest.

Rank 0 decides what is tried and what is taken, and the others follow. The estimated best runs first; every measurement
corrects the estimates of all others (`guide`), and at most a quarter of the space is run. Those that come close to the
best are then measured again side by side, since a machine's speed drifts more in minutes than they differ. What was
measured is kept for the next search on the machine (`calibration`).
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from atorch.auto.context import Context
from atorch.auto.first_pass import plain_pass
from atorch.auto.planner.calibration import Calibration, Past, job_of
from atorch.auto.planner.candidate import Feed
from atorch.auto.planner.estimate import Scored, score, split_by_memory, usable_bytes
from atorch.auto.planner.explore import SHARE_S, Explorer, Failure, Progress, measure
from atorch.auto.planner.plan import Measurement, Plan, Rejected
from atorch.auto.planner.space import Space, compositions
from atorch.auto.planner.trial import Crew, Trial, forget_compiled
from atorch.auto.strategy import Strategy
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile, plain_cost
from atorch.distributed.rng import preserved_rng
from atorch.errors import NoFeasiblePlanError, StrategyError
from atorch.profiler.tensors import batch_size
from atorch.profiler.trace import trace
from atorch.report.progress import search_progress
from atorch.units import format_bytes

Show = Callable[[Progress], None]


@dataclass(frozen=True)
class Ranking:
    """What is known before anything ran: the compositions that fit, the fastest first, and those that are out."""

    fitting: tuple[Scored, ...]
    rejected: tuple[Rejected, ...]

    @property
    def num_compositions(self) -> int:
        """All legal compositions that this machine can run, fitting or not."""
        return len(self.fitting) + sum(each.why != "hardware" for each in self.rejected)


def search(
    ctx: Context,
    *,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Strategy | None = None,
    time_limit: float | None = None,
    verbose: bool = False,
    progress: Show | None = None,
    calibration: Calibration | None = None,
    verify: bool = True,
) -> Plan:
    """The fastest strategy that runs, found on this job's own processes. All of them call this together.

    Args:
        excluded, included, fixed: see `space.compositions`.
        time_limit: seconds for everything; a dry run that is not expected to end in time is not begun. The first
            one may still overrun by one step or one compilation.
        verbose: show a line for every dry run also where there is a progress bar.
        progress: called on rank 0 after every dry run; None shows a progress bar, or lines where there is no terminal.
        calibration: where what was measured before comes from, and what is measured is kept; None for neither.
        verify: whether candidates are held to plain training's first pass (`first_pass`).

    Raises:
        NoFeasiblePlanError: nothing fits in memory, or nothing ran; the nearest miss is named.
        StrategyError, ArgumentError: whatever does not hold in the arguments.
    """
    began = time.monotonic()
    with preserved_rng(), _shown(ctx, progress, verbose) as show:
        feed = Feed(ctx)
        crew = Crew(ctx.world)
        try:
            # Numbers travel; strategies do not, since a user's method may be of a class that cannot be pickled.
            profile, start, cluster, sample = crew.led(
                lambda: (*starting_point(ctx, feed), ctx.cluster, sample_of(ctx, feed))
            )
            ctx = replace(ctx, cluster=cluster, sample_batch=sample)
            if verify:
                expected = plain_pass(ctx, ctx.world.size, lambda: Feed(ctx, num_batches=1).batches(0, 1)[0])
                ctx = replace(ctx, plain_pass=expected)
            ranking = ranked(profile, start, cluster, excluded, included, fixed)
            _need_one_that_fits(ranking, ctx)
            past = Past(job_of(start), crew.led(lambda: () if calibration is None else calibration.read()))
            explorer = Explorer(ctx, feed, crew, ranking.fitting, began, time_limit, show, past)
            explorer.explore()
            explorer.compare()
            if calibration is not None and ctx.world.rank == 0:
                calibration.add(explorer.observations(search=secrets.token_hex(8)))
            return _plan(ctx, ranking, explorer, float(crew.hear(time.monotonic() - began)))
        finally:
            crew.close()


@contextmanager
def _shown(ctx: Context, progress: Show | None, verbose: bool) -> Iterator[Show | None]:
    if progress is not None or ctx.world.rank != 0:
        yield progress
    else:
        with search_progress(verbose=verbose) as show:
            yield show


def dry_run(ctx: Context, strategy: Strategy) -> Measurement:
    """Real steps of one strategy on a copy of the model, on this job's own processes. All of them call this together.

    Raises:
        StrategyError: it fails on some rank; the rank and its error are named.
    """
    with preserved_rng():
        crew = Crew(ctx.world)
        feed = Feed(ctx)
        ctx = replace(ctx, sample_batch=crew.led(lambda: sample_of(ctx, feed)))
        trial = Trial(ctx, strategy, crew, feed, SHARE_S)
        try:
            outcome = measure(trial, math.inf, None)
        finally:
            trial.close()
            forget_compiled()
            crew.close()
    if isinstance(outcome, Failure):
        raise StrategyError(f"the dry run of {strategy} failed: {outcome.reason}")
    return outcome


def rank(ctx: Context, feed: Feed) -> Ranking:
    """Every composition scored by arithmetic alone, on this process."""
    return ranked(*starting_point(ctx, feed), ctx.cluster)


def ranked(
    profile: ModelProfile,
    start: Cost,
    cluster: ClusterSpec,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Strategy | None = None,
) -> Ranking:
    """Every composition scored: the same on every process that is given the same."""
    space: Space = compositions(profile, cluster, excluded=excluded, included=included, fixed=fixed)
    fitting, rejected = split_by_memory(score(space, start, cluster), cluster)
    unmet = [Rejected(strategy=Strategy((each,)), why="hardware", reason=reason) for each, reason in space.unmet]
    return Ranking(tuple(fitting), (*rejected, *unmet))


def starting_point(ctx: Context, feed: Feed) -> tuple[ModelProfile, Cost]:
    """The model in numbers, and the cost of training it plainly on the global batch."""
    size = ctx.world.size
    batch = sample_of(ctx, feed)
    profile = ctx.profile
    if profile is None:
        profile = trace(
            ctx.root,
            ctx.prepare_input(batch, torch.device("cpu")),
            ctx.call_model,
            ctx.loss_func,
            ctx.make_optimizer,
            device_type=ctx.cluster.device.type,
            num_counts=ctx.num_counts(batch),
        )
    return profile, plain_cost(profile, batch_size(batch) * size, ctx.cluster.device.memory_bytes)


def sample_of(ctx: Context, feed: Feed) -> Any:
    """What the model is watched on: the batch that was given for that, or rank 0's first."""
    return feed.batches(0, ctx.world.size)[0] if ctx.sample_batch is None else ctx.sample_batch


def _need_one_that_fits(ranking: Ranking, ctx: Context) -> None:
    if ranking.fitting:
        return
    rejected = [each.to_json_data() for each in ranking.rejected]
    missed = [each for each in ranking.rejected if each.estimate is not None]
    if not missed:
        raise NoFeasiblePlanError("no composition is left to try; exclude fewer methods", rejected)
    nearest = min(missed, key=lambda each: each.estimate.peak_bytes if each.estimate else 0.0)
    raise NoFeasiblePlanError(
        f"none of {len(missed)} compositions fits in {format_bytes(usable_bytes(ctx.cluster))} a device. The nearest, "
        f"{nearest.strategy}, {nearest.reason}. Use a smaller batch or model, or more devices",
        rejected,
    )


def _plan(ctx: Context, ranking: Ranking, explorer: Explorer, seconds: float) -> Plan:
    """The fastest that ran; where time was too short for any, the best by estimate."""
    best = explorer.best()
    if best is None and explorer.failures:
        first = min(explorer.failures)
        left = len(ranking.fitting) - len(explorer.failures)
        more = f", and there was no time for {left} others" if left else ""
        raise NoFeasiblePlanError(
            f"none of {explorer.num_runs} dry runs succeeded{more}. "
            f"{ranking.fitting[first].strategy}: {explorer.failures[first].reason}",
            [each.to_json_data() for each in (*explorer.failures.values(), *ranking.rejected)],
        )
    chosen = 0 if best is None else best  # the fastest by estimate comes first
    measured = explorer.measured.get(chosen)
    others: list[Rejected] = []
    for index in range(len(ranking.fitting)):
        if index in explorer.failures:
            others.append(explorer.failures[index])
        elif index != chosen:
            others.append(explorer.why_not(index, chosen))
    return Plan(
        strategy=ranking.fitting[chosen].strategy,
        estimate=ranking.fitting[chosen].estimate,
        measured=measured,
        rejected=(*others, *ranking.rejected),
        num_compositions=ranking.num_compositions,
        num_dry_runs=explorer.num_runs,
        seconds=seconds,
        memory_bytes=ctx.cluster.device.memory_bytes,
    )
