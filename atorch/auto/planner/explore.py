"""Dry runs: which to do, for how long, and what they found."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atorch.auto.context import Context
from atorch.auto.planner.calibration import Observation, Past
from atorch.auto.planner.candidate import Feed
from atorch.auto.planner.clock import Clock
from atorch.auto.planner.comparison import MIN_TURNS, TIE, Verdict, in_turns, num_turns, seconds_needed
from atorch.auto.planner.estimate import Scored, usable_bytes
from atorch.auto.planner.guard import Crew, described, forget_compiled
from atorch.auto.planner.guide import Guide, has, tokens_of
from atorch.auto.planner.measuring import Failure, failure_of, measure
from atorch.auto.planner.order import Order, Turn, compiles
from atorch.auto.planner.plan import Measurement, Rejected, Why
from atorch.auto.planner.trial import Trial
from atorch.auto.strategy import Strategy
from atorch.units import format_seconds

MAX_RUNS = 12
LATE = 3  # of them, the last, for what had no turn: kinds of splits that never ran, then what promises most
MIN_GAIN = 0.002  # of a step: what is not expected to gain this much is not run
NEAR = 0.35  # of a step: what came this close to the best is compared with it, as one run can be that far off
MAX_CONTENDERS = 5
SHARE_S = 180.0  # of one dry run where there is no time limit
BASELINE_SHARE = 0.6  # of the time limit, for the steps of the baseline
STEPS = 9  # of a dry run, about
COMPILE_S, COMPILE_OP_S = (
    10.0,
    1.0,
)  # guesses of what compiling takes: at least, and for each operation that is compiled
START_S = 2.0  # a guess of what any other start takes, until some were seen
WARM_START = 0.3  # of a compilation, what is left of it the second time
TRAINING_S = 600.0  # how long training lasts at least, and at least an epoch: what pays back a compilation


@dataclass(frozen=True)
class Progress:
    """How far a search is."""

    done: int
    total: int  # at most
    strategy: str
    step_s: float | None  # None where it failed
    best_s: float | None
    left_s: float  # expected


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is searched for, alike on all ranks."""

    ctx: Context
    feed: Feed
    crew: Crew
    candidates: Sequence[Scored]  # the fastest by estimate first
    order: Order
    clock: Clock
    past: Past = Past()
    num_compiled_ops: float = 0.0  # operations that a compiler would see


class Explorer:
    """Runs candidates on all ranks. Every rank holds the same state; rank 0's clock and choices count."""

    def __init__(self, job: Job, progress: Callable[[Progress], None] | None = None) -> None:
        self.measured: dict[int, Measurement] = {}
        self.failures: dict[int, Rejected] = {}
        self.num_runs = 0
        self.baseline: int | None = None  # the one that all must beat, once it ran
        self.verdicts: dict[int, Verdict] = {}  # of those that were compared with it
        self._job, self._progress = job, progress
        self._crew, self._clock, self._candidates, self._order = job.crew, job.clock, job.candidates, job.order
        self._guide = Guide(job.candidates, job.past)
        self._startups: dict[bool, float] = {}  # whether it compiles → the longest start so far
        self._run_s = 0.0

    def explore(self) -> None:
        """Run the baseline, and then what promises most, until nothing promises anything, or time or runs are up."""
        while self.baseline is None and self.num_runs < MAX_RUNS:
            index = self._crew.hear(self._order.next_baseline(self.failures) if self._clock.left > 0 else None)
            if index is None:
                return
            if self._is_refused(index):
                continue
            self._run(index)
            if index in self.measured:
                self.baseline = index
                self._clock.saw_step(self.measured[index].step_s)
            elif self.failures[index].why == "time":
                return
        while self.baseline is not None and self.num_runs < MAX_RUNS:
            index = self._crew.hear(self.next_run())
            if index is None:
                return
            if not self._is_refused(index):
                self._run(index)

    def compare(self) -> None:
        """Measure the best few and the baseline in turns; what is not surely faster than it is not taken."""
        together, finalists = self._crew.hear(self._finalists())
        if len(finalists) < 2:
            return
        times = self._in_turns(finalists) if together else self._one_by_one(finalists)
        baseline = self.baseline
        assert baseline is not None, "a finalist"
        if len(times.get(baseline, ())) < MIN_TURNS:
            return
        base_s = statistics.median(times[baseline])
        drift = base_s / self.measured[baseline].step_s
        for index, each in self.measured.items():  # all as of the time of the comparison
            self.measured[index] = replace(each, step_s=each.step_s * drift)
        for index in times:
            turns = min(len(times[index]), len(times[baseline]))
            if index != baseline and turns >= MIN_TURNS:
                verdict = self.verdicts[index] = Verdict.of(times[index][:turns], times[baseline][:turns])
                self.measured[index] = replace(self.measured[index], step_s=verdict.ratio * base_s)

    def observations(self, search: str) -> list[Observation]:
        return [
            Observation(
                job=self._job.past.job,
                search=search,
                methods=tokens_of(self._candidates[index].strategy),
                estimate_s=max(self._candidates[index].estimate.step_s, 1e-12),
                step_s=each.step_s,
            )
            for index, each in self.measured.items()
        ]

    def best(self) -> int | None:
        """The fastest of what is surely faster than the baseline; of ties the simplest; or else the baseline."""
        faster = {index: each for index, each in self.verdicts.items() if each.is_faster and index in self.measured}
        if not faster:
            return self.baseline
        least = min(each.ratio for each in faster.values())
        tied = [index for index, each in faster.items() if each.ratio <= least * (1 + max(TIE, each.noise))]
        return min(tied, key=lambda index: (len(self._candidates[index].strategy), faster[index].ratio))

    def why_not(self, index: int, chosen: int) -> Rejected:
        """Why a composition that fits was not taken; what it takes is told as a share of what the chosen one takes."""
        candidate, measured = self._candidates[index], self.measured.get(index)
        if chosen not in self.measured:
            return rejected(candidate, "not run", "there was no time for a dry run")
        if measured is not None:
            ratio = measured.step_s / self.measured[chosen].step_s
            return rejected(candidate, "slower", self._why_not_taken(index, chosen, ratio), measured)
        mean, _ = self._guide.predictions()
        ratio = math.exp(float(mean[index] - mean[chosen]))
        # The estimate as corrected by what was measured, so that it can be compared with the chosen one's time.
        expected_s = ratio * self.measured[chosen].step_s
        corrected = replace(candidate, estimate=replace(candidate.estimate, step_s=expected_s))
        return rejected(corrected, "not run", f"expected to be {told(ratio)}{self._why_not_run(index, ratio)}")

    def _why_not_taken(self, index: int, chosen: int, ratio: float) -> str:
        if ratio > 1 + TIE:
            return told(ratio)
        if index in self.verdicts and not self.verdicts[index].is_faster:
            return f"{told(ratio)}, not surely faster than the baseline"
        if index in self.verdicts or ratio > 1 - TIE or index == self.baseline:
            return f"{told(ratio)}, and no simpler"
        return f"{told(ratio)} when it was run; not among the few that were compared with the baseline"

    def _why_not_run(self, index: int, ratio: float) -> str:
        if ratio > 1:
            return ""
        if not self._pays(index):
            return f", but starting it, about {format_seconds(self._start_s(index))}, is not paid back"
        if not self._has_time(index):
            return f", but starting it takes about {format_seconds(self._start_s(index))}, and there was no time left"
        return ", but enough others were run" if self.num_runs >= MAX_RUNS else ", but not surely enough to be run"

    def next_run(self) -> int | None:
        """What promises most among those whose turn it is, and late among those that had none; decided on rank 0."""
        gains, baseline, best = self._guide.gains(), self.baseline, self._fastest()
        if baseline is None or best is None:
            return None
        mean, _ = self._guide.predictions()
        is_late, out = self.num_runs >= MAX_RUNS - LATE, {*self.measured, *self.failures}
        ran = [index for index in out if index in self.measured or self.failures[index].why != "refused"]
        places: list[tuple[Turn, float, int]] = []
        for index in range(len(self._candidates)):
            if index in out:
                continue
            turn = self._order.turn(index, baseline, best, self.measured)
            promises = gains[index] >= MIN_GAIN or turn == Turn.AUTOCAST
            if promises and self._has_time(index) and self._pays(index):
                if not is_late:
                    places.append((turn, -float(gains[index]), index))
                elif self._order.is_new(index, ran):
                    places.append((Turn.SINGLE, float(mean[index]), index))
                else:
                    places.append((Turn.COMBINED, -float(gains[index]), index))
        return min(places)[-1] if places else None

    def _is_refused(self, index: int) -> bool:
        """Whether it is known on some rank that it cannot be applied: then it is rejected, and takes no dry run."""
        candidate, ctx = self._candidates[index], self._job.ctx
        for check in (candidate.strategy.check_at_work, candidate.strategy.check_optimizer):
            reasons = self._crew.gather(_why_not(check, ctx))
            reason = next((each for each in reasons if each is not None), None)
            if reason is not None:
                self.failures[index] = rejected(candidate, "refused", reason)
                return True
        return False

    def _run(self, index: int) -> None:
        """One dry run, on all ranks; what it found goes to `measured` or `failures`."""
        started, strategy = time.monotonic(), self._candidates[index].strategy
        whole_s = float(self._crew.hear(self._share()))
        share_s = whole_s if self.baseline is not None else whole_s * BASELINE_SHARE
        trial = self._trial(index, whole_s)
        self.num_runs += 1
        outcome = measure(trial, share_s, self._best_s())
        trial.close()
        forget_compiled()
        kind = compiles(strategy)
        self._startups[kind] = max(self._startups.get(kind, 0.0), trial.startup_s or trial.elapsed_s)
        if isinstance(outcome, Measurement):
            self.measured[index] = outcome
            self._guide.tell(index, outcome.step_s)
            self._clock.keep(self._apply_s(index))
        else:
            self._fail(index, outcome)
        self._run_s = max(self._run_s, time.monotonic() - started)
        self._tell(strategy, outcome)

    def _fail(self, index: int, failure: Failure) -> None:
        """Reject it, and all that share a method which failed before as well and never ran."""
        self.measured.pop(index, None)
        self.failures[index] = rejected(self._candidates[index], failure.why, failure.reason)
        if failure.why == "time":
            return
        self._guide.tell_failed(index)
        convicted = self._guide.convicted()
        for other, candidate in enumerate(self._candidates):
            blame = next((each for each in convicted if has(candidate.strategy, each)), None)
            if blame is not None and other not in self.failures:
                reason = f"{blame} failed in other compositions: {failure.reason}"
                self.failures[other] = rejected(candidate, "not run", reason)

    def _trial(self, index: int, limit_s: float) -> Trial:
        job = self._job
        return Trial(
            job.ctx,
            self._candidates[index].strategy,
            job.crew,
            job.feed,
            max(30.0, min(limit_s, SHARE_S)),
            limit_s=limit_s,
        )

    def _finalists(self) -> tuple[bool, list[int]]:
        """The baseline and what ran faster, as far as time allows; whether they fit in memory beside one another."""
        best, baseline = self._fastest(), self.baseline
        if best is None or baseline is None or best == baseline:
            return True, []
        base = self.measured[baseline]
        near = sorted(self.measured, key=lambda i: self.measured[i].step_s)
        limit = min(self.measured[best].step_s * (1 + NEAR), base.step_s)
        room, chosen = usable_bytes(self._job.ctx.cluster) - self._held(baseline), [baseline]
        for index in [i for i in near if self.measured[i].step_s < limit and i != baseline][:MAX_CONTENDERS]:
            if self._held(index) <= room and self._compare_s([*chosen, index]) <= self._clock.left:
                room -= self._held(index)
                chosen.append(index)
        if len(chosen) > 1:
            return True, chosen
        fits_alone = 2 * self._compare_s([baseline, best]) <= self._clock.left
        return False, [baseline, best] if fits_alone else []

    def _in_turns(self, finalists: Sequence[int]) -> dict[int, list[float]]:
        """Seconds of each by turn, all alive together."""
        trials: dict[int, Trial] = {}

        def failed(index: int) -> None:
            if index != self.baseline:
                self._fail(index, failure_of(trials[index]))

        def goes_on(seconds: float) -> bool:
            return bool(self._crew.hear(seconds < self._clock.left))

        try:
            for index in finalists:
                trial = self._trial(index, float(self._crew.hear(self._clock.left)))
                trials[index] = trial
                if not trial.start():
                    failed(index)
                    del trials[index]
            turns = num_turns(min((self.measured[i].step_s for i in finalists if i in self.measured), default=1.0))
            return in_turns(trials, turns, goes_on, failed, self.baseline)
        finally:
            for trial in trials.values():
                trial.close()
            forget_compiled()

    def _one_by_one(self, finalists: Sequence[int]) -> dict[int, list[float]]:
        """Seconds of each, started anew in turns, where they do not fit beside one another."""
        times: dict[int, list[float]] = {index: [] for index in finalists}
        for order in (finalists, finalists[::-1]):
            for index in order:
                found = self._in_turns([index])
                times[index] += found.get(index, [])
        return times

    def _compare_s(self, indices: Sequence[int]) -> float:
        return seconds_needed([self._again_s(i) for i in indices], [self.measured[i].step_s for i in indices])

    def _held(self, index: int) -> float:
        return max(self.measured[index].peak_bytes, self._candidates[index].estimate.peak_bytes)

    def _fastest(self) -> int | None:
        return min(self.measured, key=lambda index: self.measured[index].step_s, default=None)

    def _best_s(self) -> float | None:
        return min((each.step_s for each in self.measured.values()), default=None)

    def _share(self) -> float:
        """Seconds that one dry run may take, so that what ran can still be compared."""
        best, kept = self._fastest(), 0.0
        if self.baseline is not None and best not in (None, self.baseline):
            kept = self._compare_s([self.baseline, best])
        return max(0.0, min(SHARE_S, self._clock.left - kept))

    def _start_s(self, index: int) -> float:
        """Seconds until its first step is done, as far as is known."""
        if compiles(self._candidates[index].strategy):
            return self._startups.get(True, COMPILE_S + COMPILE_OP_S * self._job.num_compiled_ops)
        return self._startups.get(False, START_S)

    def _apply_s(self, index: int) -> float:
        """Seconds to apply the baseline, the best so far, or this one, whichever takes longest."""
        chosen = {each for each in (self.baseline, self._fastest(), index) if each in self.measured}
        return max(self._again_s(each) for each in chosen)

    def _again_s(self, index: int) -> float:
        """Seconds of a second start of what ran."""
        return self.measured[index].startup_s * (WARM_START if compiles(self._candidates[index].strategy) else 1.0)

    def _has_time(self, index: int) -> bool:
        """Whether a dry run is expected to end in time, and to leave some for the comparison at the end."""
        best, baseline = self._best_s(), self.baseline
        if best is None or baseline is None:
            return self._clock.left > 0
        start = self._start_s(index)
        again = start * (WARM_START if compiles(self._candidates[index].strategy) else 1.0)
        base = self.measured[baseline]
        compared = seconds_needed([base.startup_s, again], [base.step_s, best])
        return start + STEPS * best + compared <= self._clock.left

    def _pays(self, index: int) -> bool:
        """Whether what a compilation can gain in training is worth its start."""
        best = self._best_s()
        if best is None or not compiles(self._candidates[index].strategy):
            return True
        epoch_s = best * (self._job.feed.epoch or 0)
        return float(self._guide.gains()[index]) * max(TRAINING_S, epoch_s) >= self._start_s(index)

    def _tell(self, strategy: Strategy, outcome: Measurement | Failure) -> None:
        if self._job.ctx.world.rank != 0 or self._progress is None:
            return
        step_s = outcome.step_s if isinstance(outcome, Measurement) else None
        left = max(0.0, min(self._run_s * (MAX_RUNS - self.num_runs), self._clock.left))
        self._progress(Progress(self.num_runs, MAX_RUNS, str(strategy), step_s, self._best_s(), left))


def _why_not(check: Callable[[Context], None], ctx: Context) -> str | None:
    """What a check of a strategy raises, or None."""
    try:
        check(ctx)
    except Exception as error:  # users' methods, models and optimizers may raise anything
        return described(error)
    return None


def told(ratio: float) -> str:
    """What a step takes beside the chosen one's."""
    if ratio >= 2:
        return f"{ratio:.1f}× as slow"
    if abs(ratio - 1) < 0.005:
        return "as fast"
    return f"{ratio - 1:.0%} slower" if ratio > 1 else f"{1 - ratio:.0%} faster"


def rejected(candidate: Scored, why: Why, reason: str, measured: Measurement | None = None) -> Rejected:
    return Rejected(strategy=candidate.strategy, why=why, reason=reason, estimate=candidate.estimate, measured=measured)
