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
from atorch.auto.planner.estimate import Scored, usable_bytes
from atorch.auto.planner.guide import Guide, has, tokens_of
from atorch.auto.planner.plan import Measurement, Rejected, Why
from atorch.auto.planner.trial import Crew, Trial, forget_compiled
from atorch.auto.strategy import Phase, Strategy
from atorch.units import format_seconds

MIN_RUNS = 4  # even of a small space
MIN_AGAIN = 3  # even of one that earlier searches have measured
MIN_GAIN = 0.002  # of a step: what is not expected to gain this much is not run
NEAR = 0.12  # of a step: what came this close to the best is measured again
TIE = 0.01  # of a step: among these the simplest is taken
MAX_FINALISTS = 4
WARM_UP, STEADY = 6, 0.1  # at most this many steps, until two differ by less than this fraction
SHARE_S = 180.0  # of one dry run where there is no time limit
HOPELESS = 2.0  # times the best: a step this slow need not be measured well
COMPILE_S, START_S = 20.0, 2.0  # guesses of what starting a dry run takes, until some were seen


@dataclass(frozen=True)
class Progress:
    """How far a search is."""

    done: int
    total: int  # at most
    strategy: str
    step_s: float | None  # None where it failed
    best_s: float | None
    left_s: float  # expected


@dataclass(frozen=True)
class Failure:
    """A dry run that came to nothing."""

    why: Why
    reason: str


class Explorer:
    """Runs candidates on all ranks. Every rank holds the same state; rank 0's clock and choices count."""

    def __init__(
        self,
        ctx: Context,
        feed: Feed,
        crew: Crew,
        candidates: Sequence[Scored],
        began: float,
        time_limit: float | None,
        progress: Callable[[Progress], None] | None,
        past: Past,
    ) -> None:
        self.measured: dict[int, Measurement] = {}
        self.failures: dict[int, Rejected] = {}
        self.num_runs = 0
        self._ctx, self._feed, self._crew, self._candidates = ctx, feed, crew, candidates
        self._began, self._limit = began, time_limit
        self._progress = progress
        self._finals: dict[int, float] = {}
        self._explored: dict[int, float] = {}  # seconds as first measured; `measured` has the comparison's
        self._guide = Guide(candidates, past)
        self._job = past.job
        self._startups: dict[bool, float] = {}  # whether it compiles → the longest start so far
        self._run_s = 0.0
        budget, known = max(len(candidates) // 4, min(MIN_RUNS, len(candidates))), self._guide.num_known
        # What earlier searches of this job ran is done.
        self.budget = max(budget - known, min(MIN_AGAIN, budget)) if known else budget

    def explore(self) -> None:
        """Run what promises most, until nothing promises anything, the budget is used up, or time is.

        Where everything fails the budget does not end the search: one that runs is looked for.
        """
        while self.num_runs < self.budget or not self.measured:
            index = self._crew.hear(self._next())
            if index is None:
                return
            self._run(index)

    def compare(self) -> None:
        """Measure those near the best again, step by step in turns, so that what disturbs one disturbs all."""
        finalists = self._crew.hear(self._finalists())
        if len(finalists) < 2:
            return
        trials: dict[int, Trial] = {}
        try:
            for index in finalists:
                trial = self._trial(index)
                trials[index] = trial
                if not trial.start():
                    self._fail(index, Failure("failed", str(trial.failure)))
                    del trials[index]
            self._finals = self._in_turns(trials)
            for index, step_s in self._finals.items():
                self.measured[index] = replace(self.measured[index], step_s=step_s)
        finally:
            for trial in trials.values():
                trial.close()
            forget_compiled()

    def observations(self, search: str) -> list[Observation]:
        """All that was measured, as seconds of the time when it was explored."""
        compared = [math.log(self._explored[i] / step_s) for i, step_s in self._finals.items()]
        drift = math.exp(statistics.fmean(compared)) if compared else 1.0
        found = []
        for index in self.measured:
            candidate = self._candidates[index]
            step_s = drift * self._finals[index] if index in self._finals else self._explored[index]
            found.append(
                Observation(
                    job=self._job,
                    search=search,
                    methods=tokens_of(candidate.strategy),
                    estimate_s=max(candidate.estimate.step_s, 1e-12),
                    step_s=step_s,
                )
            )
        return found

    def best(self) -> int | None:
        """The fastest that ran; of those within a hundredth of it the one with the fewest methods."""
        if not self.measured:
            return None
        fastest = min(each.step_s for each in self.measured.values())
        tied = [index for index, each in self.measured.items() if each.step_s <= fastest * (1 + TIE)]
        return min(tied, key=lambda i: (len(self._candidates[i].strategy), self.measured[i].step_s))

    def why_not(self, index: int, chosen: int) -> Rejected:
        """Why a composition that fits was not taken."""
        candidate, measured = self._candidates[index], self.measured.get(index)
        if chosen not in self.measured:
            return _rejected(candidate, "not run", "there was no time for a dry run")
        if measured is not None:
            # Figures of one time are compared: a machine's speed drifts.
            both = self._finals if {index, chosen} <= self._finals.keys() else self._explored
            ratio = both[index] / both[chosen]
            reason = _slower(ratio) if ratio > 1 + TIE else "not faster, and no simpler"
            return _rejected(candidate, "slower", reason, measured)
        mean, _ = self._guide.predictions()
        ratio = math.exp(float(mean[index] - mean[chosen]))
        # The estimate as corrected by what was measured, so that it can be compared with the chosen one's time.
        expected_s = ratio * self.measured[chosen].step_s
        corrected = replace(candidate, estimate=replace(candidate.estimate, step_s=expected_s))
        expected = _slower(ratio) if ratio > 1 else f"{1 - ratio:.0%} faster, but {self._why_not_run(index)}"
        return _rejected(corrected, "not run", f"expected to be {expected}")

    def _why_not_run(self, index: int) -> str:
        if not self._has_time(index):
            return "there was no time left to run it"
        return "enough others were run" if self.num_runs >= self.budget else "not surely enough to be run"

    def _next(self) -> int | None:
        """What promises most among what can still be run; decided on rank 0."""
        gains = self._guide.gains()

        def place(index: int) -> tuple[bool, float]:
            # Something to hold the others against comes first, and soon: nothing that must be compiled.
            return not self.measured and _compiles(self._candidates[index].strategy), -gains[index]

        for index in sorted(range(len(gains)), key=place):
            if gains[index] < MIN_GAIN and self.measured:
                return None
            if index not in self.measured and index not in self.failures and self._has_time(index):
                return index
        return None

    def _run(self, index: int) -> None:
        """One dry run, on all ranks; what it found goes to `measured` or `failures`."""
        started, trial = time.monotonic(), self._trial(index)
        self.num_runs += 1
        share = float(self._crew.hear(self._share()))
        outcome = measure(trial, share, self._best_s())
        trial.close()
        forget_compiled()
        strategy = self._candidates[index].strategy
        compiles = _compiles(strategy)
        self._startups[compiles] = max(self._startups.get(compiles, 0.0), trial.startup_s)
        if isinstance(outcome, Measurement):
            self.measured[index] = outcome
            self._explored[index] = outcome.step_s
            self._guide.tell(index, outcome.step_s)
        else:
            self._fail(index, outcome)
        self._run_s = max(self._run_s, time.monotonic() - started)
        self._tell(strategy, outcome)

    def _fail(self, index: int, failure: Failure) -> None:
        """Reject it, and all that share a method which failed before as well and never ran."""
        self.measured.pop(index, None)
        self._guide.tell_failed(index)
        self.failures[index] = _rejected(self._candidates[index], failure.why, failure.reason)
        convicted = self._guide.convicted()
        for other, candidate in enumerate(self._candidates):
            blame = next((each for each in convicted if has(candidate.strategy, each)), None)
            if blame is not None and other not in self.failures:
                reason = f"{blame} failed in other compositions: {failure.reason}"
                self.failures[other] = _rejected(candidate, "not run", reason)

    def _trial(self, index: int) -> Trial:
        timeout = float(self._crew.hear(max(30.0, self._share())))
        return Trial(self._ctx, self._candidates[index].strategy, self._crew, self._feed, timeout)

    def _finalists(self) -> list[int]:
        """Those near the best that fit in memory beside one another, and for which there is time."""
        best = self._best_s()
        if best is None:
            return []
        near = sorted(self.measured, key=lambda i: self.measured[i].step_s)
        near = [i for i in near if self.measured[i].step_s <= best * (1 + NEAR)][:MAX_FINALISTS]
        room, chosen, needed_s = usable_bytes(self._ctx.cluster), [], 0.0
        for index in near:
            held = max(self.measured[index].peak_bytes, self._candidates[index].estimate.peak_bytes)
            needed_s += self.measured[index].startup_s + _rounds(best) * best
            if held <= room and needed_s <= self._left():
                room -= held
                chosen.append(index)
        return chosen

    def _in_turns(self, trials: dict[int, Trial]) -> dict[int, float]:
        """The median step of each, all taking turns."""
        times: dict[int, list[float]] = {index: [] for index in trials}
        fastest = min((self.measured[index].step_s for index in trials), default=1.0)
        for turn in range(2 + _rounds(fastest)):
            order = list(trials) if turn % 2 else list(trials)[::-1]
            for index in order:
                seconds = trials[index].step()
                if seconds is None:
                    self._fail(index, Failure("failed", str(trials.pop(index).failure)))
                elif turn >= 2:
                    times[index].append(seconds)
        return {index: statistics.median(each) for index, each in times.items() if index in trials and each}

    def _best_s(self) -> float | None:
        return min((each.step_s for each in self.measured.values()), default=None)

    def _left(self) -> float:
        return math.inf if self._limit is None else self._began + self._limit - time.monotonic()

    def _share(self) -> float:
        """Seconds that one dry run may take."""
        return min(SHARE_S, max(self._left(), 0.0))

    def _has_time(self, index: int) -> bool:
        """Whether a dry run is expected to end in time, and leave some for the comparison at the end."""
        compiles = _compiles(self._candidates[index].strategy)
        start = self._startups.get(compiles, COMPILE_S if compiles else START_S)
        best = self._best_s()
        steps = 10 * (self._candidates[index].estimate.step_s if best is None else best)
        reserve = 0.0 if best is None or self._limit is None else 0.2 * self._limit
        return start + steps + reserve <= self._left()

    def _tell(self, strategy: Strategy, outcome: Measurement | Failure) -> None:
        if self._ctx.world.rank != 0:
            return
        step_s = outcome.step_s if isinstance(outcome, Measurement) else None
        if self._progress is not None:
            total = max(self.budget, self.num_runs)
            left = max(0.0, min(self._run_s * (total - self.num_runs), self._left()))
            self._progress(Progress(self.num_runs, total, str(strategy), step_s, self._best_s(), left))


def measure(trial: Trial, share_s: float, best_s: float | None) -> Measurement | Failure:
    """A trial's steps until they are steady, then enough for a median; or why it is rejected."""
    if not trial.start():
        return Failure("failed", str(trial.failure))
    if trial.elapsed_s > share_s:
        took = format_seconds(trial.elapsed_s)
        return Failure("time", f"its first step took {took}; a dry run may take {format_seconds(share_s)}")
    steps, last = [], 0.0
    for _ in range(WARM_UP):
        before, seconds = last, trial.step()
        if seconds is None:
            return Failure("failed", str(trial.failure))
        last = seconds
        if abs(before / last - 1) < STEADY or trial.elapsed_s > share_s:
            break
    is_hopeless = best_s is not None and last > HOPELESS * best_s
    for _ in range(1 if is_hopeless else _enough(last)):
        seconds = trial.step()
        if seconds is None:
            return Failure("failed", str(trial.failure))
        steps.append(seconds)
        if trial.elapsed_s > share_s:
            break
    peak = trial.peak_bytes()
    if peak is None:
        return Failure("failed", str(trial.failure))
    return Measurement(
        step_s=statistics.median(steps),
        num_steps=len(steps),
        startup_s=trial.startup_s,
        peak_bytes=peak,
        memory_kind=trial.memory_kind,
    )


def _enough(step_s: float) -> int:
    """Steps for a median: half a second's worth, 5 to 20."""
    return min(20, max(5, int(0.5 / max(step_s, 1e-6))))


def _rounds(step_s: float) -> int:
    """Turns of the final comparison: a second's worth, 7 to 40."""
    return min(40, max(7, int(1.0 / max(step_s, 1e-6))))


def _slower(ratio: float) -> str:
    return f"{ratio - 1:.0%} slower" if ratio < 2 else f"{ratio:.1f}× as slow"


def _compiles(strategy: Strategy) -> bool:
    return any(each.phase == Phase.COMPILE for each in strategy)


def _rejected(candidate: Scored, why: Why, reason: str, measured: Measurement | None = None) -> Rejected:
    return Rejected(strategy=candidate.strategy, why=why, reason=reason, estimate=candidate.estimate, measured=measured)
