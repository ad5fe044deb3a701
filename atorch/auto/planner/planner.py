"""The search: traces the model, scores compositions, drops those that cannot fit, dry-runs some, takes the fastest.

Rank 0 decides on trials and the choice, and broadcasts its decisions. The trial with the largest expected gain is next
(`dry_run_loop`), and every measurement corrects all estimates (`surrogate_model`). Compositions that are then close to
the best are measured again in turns (`step_timing`). Measurements are kept for the next search on the machine
(`time_budget`). Nothing is interrupted: the clock is checked between trials and their phases.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from atorch.auto.context import Context
from atorch.auto.opt_lib.shared.optimizer_compatibility import kernel_notes
from atorch.auto.planner.dry_runs.dry_run_loop import DryRunLoop, SearchJob
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator, forget_compiled, quick_collections
from atorch.auto.planner.dry_runs.step_timing import DryRuns, Failure, measure
from atorch.auto.planner.dry_runs.time_budget import DEFAULT_STEPS, Calibration, Past, Starts, TimeBudget, job_of
from atorch.auto.planner.dry_runs.trial import BatchCache, parked_on_host
from atorch.auto.planner.estimate import usable_bytes
from atorch.auto.planner.plan import Baseline, Measurement, Plan, Scored, json_data
from atorch.auto.planner.ranking import Ranking, RankingSummary, SearchLimits, best_level, gain_of_half, methods_of
from atorch.auto.reference_step import ReferenceStep, plain_pass
from atorch.auto.strategy import METHODS, PRECISIONS, PrecisionLevel, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile, plain_cost
from atorch.distributed.collectives import from_rank_zero
from atorch.distributed.rng import preserved_rng
from atorch.errors import NoFeasiblePlanError, StrategyError
from atorch.logs import logger
from atorch.model.pytree import batch_size
from atorch.profiler.trace import trace
from atorch.report.figures import Progress
from atorch.units import format_bytes, format_seconds

Show = Callable[[Progress], None]


def search(
    ctx: Context,
    *,
    excluded: Iterable[str] | None = None,
    included: Iterable[str] | None = None,
    fixed: Strategy | None = None,
    precision: PrecisionLevel | None = None,
    time_limit: float | None = None,
    verbose: bool = False,
    progress: Show | None = None,
    calibration: Calibration | None = None,
    verify: bool = True,
    clock: TimeBudget | None = None,
) -> Plan:
    """The fastest strategy that runs, found on this job's own processes. All of them call this together.

    Args:
        excluded, included, fixed: see `space.compositions`.
        precision: the lowest precision that it may train in; None for "autocast", and for lower ones only if nothing
            else fits.
        time_limit: seconds for the search, exceeded by one start at most. None for a minute and a half, or 30 steps of
            the choice if these take longer; infinity for no limit. Trials that are not worth their time are not run.
        verbose: show a line for every dry run even with a progress bar.
        progress: called on rank 0 after every dry run; None shows a progress bar, or lines without a terminal.
        calibration: the file of earlier measurements, to read and extend; None for neither.
        verify: compare candidates with plain training's first pass (`reference_step`).
        clock: a running clock, instead of `time_limit`.

    Raises:
        NoFeasiblePlanError: nothing fits in memory, or nothing ran; the nearest miss is named.
        StrategyError, ArgumentError: an invalid argument.
    """
    clock = TimeBudget(time_limit) if clock is None else clock
    if clock.limit is None and ctx.world.rank == 0:
        logger.info(
            "the search takes at most %s, or %d steps of what it chooses where these take longer; give time_limit, in "
            "seconds, for another limit",
            format_seconds(clock.whole), DEFAULT_STEPS,
        )  # fmt: skip
    wanted = SearchLimits(excluded=excluded, included=included, fixed=fixed, precision=precision)
    shown: AbstractContextManager[Show | None] = nullcontext(progress)
    if progress is None and ctx.world.rank == 0:
        with preserved_rng():  # importing rich draws a number
            from atorch.report.text import search_progress
        shown = search_progress(verbose=verbose)
    with preserved_rng(), quick_collections(), shown as show:
        feed = BatchCache(ctx)
        coordinator = Coordinator(ctx.world)
        try:
            # Only numbers are broadcast, no strategies: a user's method may be of a class that cannot be pickled.
            profile, start, cluster, sample = coordinator.run_on_rank0(
                lambda: (*starting_point(ctx, feed), ctx.cluster, sample_of(ctx, feed))
            )
            ctx = replace(ctx, cluster=cluster, sample_batch=sample)
            ranking = _ranked(coordinator, profile, start, cluster, wanted)
            _need_one_that_fits(ranking, ctx, profile, wanted)
            if verify or ctx.world.size > 1:
                first = BatchCache(ctx, num_batches=1)
                expected = plain_pass(ctx, ctx.world.size, lambda: first.batches(0, 1)[0])
                unheld = ReferenceStep(why_not="verify=False was given", communicates=expected.communicates)
                ctx = replace(ctx, plain_pass=expected if verify else unheld)
            past = Past(
                job_of(start), coordinator.run_on_rank0(lambda: () if calibration is None else calibration.read())
            )
            with parked_on_host(ctx) as copied:
                job = SearchJob(
                    cluster=cluster, coordinator=coordinator, candidates=ranking.fitting, clock=clock,
                    epoch=lambda: feed.epoch, given=fixed, past=past,
                    starts=Starts(cluster.device.type, compiled_ops(profile), float(profile.param_bytes), past),
                )  # fmt: skip
                explorer = DryRunLoop(job, show if ctx.world.rank == 0 else None)
                explorer.explore(DryRuns(copied, coordinator, feed))
            if calibration is not None and ctx.world.rank == 0:
                calibration.add(explorer.observations(search=secrets.token_hex(8)))

            def more(taken: Scored) -> Iterator[str]:
                yield from kernel_notes(ctx)
                yield from gain_of_half(taken, profile, start, cluster, wanted)

            return _plan(ranking, explorer, wanted, float(coordinator.broadcast(clock.seconds)), ctx.plain_pass, more)
        finally:
            coordinator.close()


def _ranked(
    coordinator: Coordinator, profile: ModelProfile, start: Cost, cluster: ClusterSpec, wanted: SearchLimits
) -> Ranking:
    """The compositions that fit, computed on rank 0 and broadcast."""
    rankings: list[Ranking] = []

    def work() -> RankingSummary:
        rankings.append(best_level(profile, start, cluster, wanted))
        return RankingSummary.of(rankings[0])

    broadcast = coordinator.run_on_rank0(work)
    methods = {} if rankings else methods_of(wanted.space(profile, cluster, wanted.levels[-1]))
    for rank, unknown in enumerate(coordinator.gather([] if rankings else broadcast.unknown(methods))):
        if unknown:
            raise StrategyError(
                f"rank 0 may choose {unknown[0]}, which rank {rank} does not have; import the methods of other "
                "packages on all processes, or exclude them"
            )
    return rankings[0] if rankings else broadcast.ranking(methods)


def compiled_ops(profile: ModelProfile) -> float:
    """Operations that a compiler sees: those of one repeated block, or of the whole model if there are none."""
    blocks = [segment for segment in profile.segments if segment.is_block]
    return float(sum(segment.num_ops for segment in blocks or profile.segments))


def dry_run(ctx: Context, strategy: Strategy) -> Measurement:
    """Measure real steps of one strategy on a copy of the model. All processes of the job call this together.

    Raises:
        StrategyError: the strategy fails on some rank; the rank and its error are named.
    """
    with preserved_rng(), quick_collections():
        coordinator = Coordinator(ctx.world)
        feed = BatchCache(ctx)
        ctx = replace(ctx, sample_batch=coordinator.run_on_rank0(lambda: sample_of(ctx, feed)))
        with parked_on_host(ctx) as copied:
            trial = DryRuns(copied, coordinator, feed).trial(strategy, math.inf)
            try:
                outcome = measure(trial, math.inf, None)
            finally:
                trial.close()
                forget_compiled()
                coordinator.close()
    if isinstance(outcome, Failure):
        raise StrategyError(f"the dry run of {strategy} failed: {outcome.reason}")
    return outcome


def starting_point(ctx: Context, feed: BatchCache) -> tuple[ModelProfile, Cost]:
    """The model's profile, and the cost of plain training on the global batch."""
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
            capability=ctx.cluster.device.capability,
            num_counts=ctx.num_counts(batch),
        )
    return profile, plain_cost(profile, batch_size(batch) * size, ctx.cluster.device.memory_bytes)


def sample_of(ctx: Context, feed: BatchCache) -> Any:
    """The batch for observing the model: the user's `sample_batch`, or rank 0's first."""
    return feed.batches(0, ctx.world.size)[0] if ctx.sample_batch is None else ctx.sample_batch


def _need_one_that_fits(ranking: Ranking, ctx: Context, profile: ModelProfile, wanted: SearchLimits) -> None:
    if ranking.fitting:
        return
    rejected = [json_data(entry) for entry in ranking.rejected]
    misses = [entry for entry in ranking.rejected if entry.estimate is not None]
    if not misses:
        space = wanted.space(profile, ctx.cluster, wanted.levels[-1])
        next(space.leaves(space.root(plain_cost(profile, profile.batch_size * ctx.world.size))), None)
        why = "; ".join(reason for reason, _ in space.refused.most_common(2)) or "everything is excluded"
        raise NoFeasiblePlanError(f"no composition is left to try: {why}. {_remedy(wanted)}", rejected)
    nearest = min(misses, key=lambda entry: entry.estimate.needed_bytes if entry.estimate else 0.0)
    raise NoFeasiblePlanError(
        f"none of {len(misses)} compositions fits in {format_bytes(usable_bytes(ctx.cluster))} a device. The nearest, "
        f"{nearest.strategy}, {nearest.reason}. {_remedy(wanted, 'use a smaller batch or model, or more devices')}",
        rejected,
    )


def _remedy(wanted: SearchLimits, *more: str) -> str:
    excluded, included = list(wanted.excluded or ()), list(wanted.included or ())
    ways = [*more]
    ways += [f"allow some of what is excluded ({', '.join(excluded)})"] if excluded else []
    ways += [f"leave out some of what is included ({', '.join(included)})"] if included else []
    if wanted.fixed is not None:
        ways.append(f"search other methods than {', '.join(wanted.fixed.names()) or 'none'}, without finetune_strategy")
    if wanted.precision not in (None, PRECISIONS[-1]):
        ways.append(f"allow less exact numbers than precision={wanted.precision!r}")
    return "; or ".join(ways).capitalize()


def _plan(
    ranking: Ranking,
    explorer: DryRunLoop,
    wanted: SearchLimits,
    seconds: float,
    expected: ReferenceStep | None,
    more: Callable[[Scored], Iterator[str]],
    fallen: tuple[str, ...] = (),
) -> Plan:
    """The plan with the choice, measured or not. `more` gives notes on the choice, `fallen` on choices that failed."""
    if len(explorer.failures) == len(ranking.fitting):
        raise _nothing_ran(ranking, explorer)
    chosen, baseline = from_rank_zero(explorer.choice()), explorer.baseline
    taken = ranking.fitting[chosen]

    def instead(reason: str) -> Plan:
        explorer.reject(chosen, Failure("failed", reason))
        note = f"{taken.strategy} was chosen, and failed when it was applied: {reason}. This is the next best"
        return _plan(ranking, explorer, wanted, seconds, expected, more, (*fallen, note))

    others = [
        explorer.failures.get(index) or explorer.why_not(index, chosen)
        for index in range(len(ranking.fitting))
        if index != chosen
    ]
    plain_s = explorer.step_s(baseline)
    return Plan(
        strategy=taken.strategy,
        estimate=taken.estimate,
        measured=explorer.measured.get(chosen),
        rejected=(*others, *ranking.rejected),
        num_compositions=ranking.num_compositions,
        num_dry_runs=explorer.num_runs,
        seconds=seconds,
        memory_bytes=explorer.job.cluster.device.memory_bytes,
        baseline=None
        if baseline in explorer.failures
        else Baseline(
            strategy=ranking.fitting[baseline].strategy,
            measured=explorer.measured.get(baseline),
            expected_s=plain_s,
            gain=1 - explorer.step_s(chosen) / plain_s,
        ),
        notes=(*_notes(explorer, chosen, wanted), *more(taken), *fallen),
        plain_pass=expected,
        instead=instead,
    )


def _notes(explorer: DryRunLoop, chosen: int, wanted: SearchLimits) -> Iterator[str]:
    job = explorer.job
    if chosen not in explorer.measured:
        expected, low, high = (format_seconds(explorer.step_s(chosen, deviations)) for deviations in (0.0, -1.28, 1.28))
        yield (
            f"the choice is unmeasured: a dry run of it was not worth its time, or there was none. A step is expected "
            f"to take {expected} ({low} to {high} in four of five cases)"
        )
        logger.warning("%s is unmeasured: a step is expected to take %s", job.candidates[chosen].strategy, expected)
    if job.clock.limit is None:
        yield f"no time_limit was given; the search had {format_seconds(job.clock.whole)}"
    level = max((PRECISIONS.index(method.precision_level) for method in job.candidates[chosen].strategy), default=0)
    if wanted.precision is None and wanted.fixed is None and level > PRECISIONS.index("autocast"):
        included = {name for name in wanted.included or () if METHODS[name].precision_level == PRECISIONS[level]}
        if not included:
            yield f"nothing more exact than {PRECISIONS[level]} fits in memory"


def _nothing_ran(ranking: Ranking, explorer: DryRunLoop) -> NoFeasiblePlanError:
    ran = [index for index, failure in explorer.failures.items() if failure.why == "failed"]
    first = min(ran or explorer.failures)
    return NoFeasiblePlanError(
        f"none of {explorer.num_runs} dry runs succeeded. "
        f"{ranking.fitting[first].strategy}: {explorer.failures[first].reason}",
        [json_data(entry) for entry in (*explorer.failures.values(), *ranking.rejected)],
    )
