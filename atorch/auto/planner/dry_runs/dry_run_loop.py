"""Selects and runs dry runs, and chooses a composition by their measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from atorch.auto.planner.dry_runs.fault_barrier import Coordinator
from atorch.auto.planner.dry_runs.step_timing import (
    MIN_TURNS,
    SURE,
    TIE,
    DryRuns,
    Failure,
    Verdict,
    failure_of,
    in_turns,
    measure,
    num_turns,
    seconds_needed,
)
from atorch.auto.planner.dry_runs.surrogate_model import Surrogate, tokens_of
from atorch.auto.planner.dry_runs.time_budget import FIRST_STEPS, Observation, Past, Starts, TimeBudget
from atorch.auto.planner.dry_runs.trial import Trial
from atorch.auto.planner.estimate import usable_bytes
from atorch.auto.planner.plan import Measurement, Rejected, Scored
from atorch.auto.planner.ranking import simplest
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.report.figures import Progress
from atorch.units import format_seconds

MAX_RUNS = 16
MIN_GAIN = 0.002  # share of a step: candidates with less expected gain are not run
STEPS = 1  # least steps of a dry run after its start, whose first step counts too
TRAINING_S = 3600.0  # assumed length of training, at least an epoch; trials must pay off within it
TRAINING_LIMITS = 30.0  # and at least this many times the user's time limit of the search
UNLIKELY = 0.02  # causes of failures, and candidates that run, with less probability are left out
MAX_CONTENDERS = 4
NEAR: Mapping[str, float] = {"cpu": 0.35}  # share of a step: candidates this close to the best are compared with it
QUIET = 0.03  # the same for less noisy devices
AHEAD, SURELY = 0.25, 0.67  # standard deviations by which an unmeasured choice is ahead of the baseline, if that ran
CHEAP = 0.03  # share of the time limit: a run of the baseline that takes less comes first
ROOM = 0.8  # share of a device's usable memory: candidates that need no more fit comfortably


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """The inputs of a search, equal on all ranks."""

    cluster: ClusterSpec
    coordinator: Coordinator
    candidates: Sequence[Scored]  # the fastest by estimate first
    clock: TimeBudget
    starts: Starts
    epoch: Callable[[], int | None] = lambda: None  # number of steps in an epoch, once known
    given: Strategy | None = None  # the strategy whose knobs are searched
    past: Past = Past()


@dataclass
class DryRunLoop:
    """Runs candidates on all ranks. Every rank has the same state; rank 0's clock and choices are broadcast."""

    job: SearchJob
    progress: Callable[[Progress], None] | None = None  # on rank 0
    measured: dict[int, Measurement] = field(default_factory=dict)
    failures: dict[int, Rejected] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)  # of candidates measured in turns, against the first
    num_runs: int = 0
    _starts_seen: dict[int, tuple[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job = self.job
        self._candidates, self._clock, self._coordinator = job.candidates, job.clock, job.coordinator
        device = job.cluster.device
        self._guide = Surrogate(job.candidates, job.past, device.type, device.memory_bytes)
        self.baseline = simplest(job.candidates, job.given)[0]
        self._kinds = [job.starts.kind(candidate.strategy) for candidate in job.candidates]
        self._shards = [candidate.strategy.num_parameter_shards for candidate in job.candidates]
        self._saves = np.array(
            [any(method.saves_memory for method in candidate.strategy) for candidate in job.candidates]
        )

    def explore(self, runs: DryRuns) -> None:
        """Run the most valuable candidates until none is worth its time or time is up; then compare the best."""
        if self._alive().any():
            self._clock.expects(self.step_s(self.choice()), self.job.starts.of_kind("build"))
        while self.num_runs < MAX_RUNS + MAX_CONTENDERS:  # the last are of choices that have not run
            index = self._coordinator.broadcast(self.next_run())
            if index is None:
                break
            refusal = runs.refusal(self._candidates[index].strategy)
            if refusal is None:
                self._run(runs, index)
            else:
                self.reject(index, Failure("refused", refusal))
        self._compare(runs)

    def next_run(self) -> int | None:
        """The run with the largest net saving in training per second of the run; the choice if none pays; else None.

        The baseline comes first where it is cheap: what a user has now is the measure of all others.
        """
        if len(self.failures) == len(self._candidates):
            return None
        choice, training_s = self.choice(), self._training_s()
        starts_s, steps_s = self._starts_s(self._kinds), np.exp(self._guide.predictions[0])
        takes_s = starts_s + STEPS * steps_s
        in_time = takes_s <= self._clock.left
        is_cheap = in_time & self._alive() & (takes_s <= CHEAP * self._clock.whole)
        if self.baseline not in self.measured and is_cheap[self.baseline]:
            return self.baseline
        gains = self._gains()
        saved_s = np.where(in_time & (gains >= MIN_GAIN), gains * training_s - takes_s, 0.0)
        for taken in (self._taken(), self._alive()) if self.num_runs < MAX_RUNS else ():
            if (worth := np.where(taken, saved_s / takes_s, 0.0)).max() > 0:
                return int(worth.argmax())
        return choice if choice not in self.measured and in_time[choice] else None

    def _gains(self) -> npt.NDArray[np.float64]:
        """Expected gain of a run of each candidate, as a fraction of a step: over the best choice under each cause."""
        guide, training_s, taken = self._guide, self._training_s(), self._taken()
        starts = self._starts_s(self._kinds) / training_s
        again = self._starts_s(["warm" if kind == "compile" else kind for kind in self._kinds]) / training_s
        total = np.zeros(len(taken))
        for share, runs in zip(*guide.causes, strict=True):
            if share > UNLIKELY:
                best = int(np.where(taken, guide.expected(starts, runs), np.inf).argmin())
                gains = guide.gains(best, again, runs)
                if best not in self.measured:  # gains over it presume that it ran
                    gains[best] = gains.max()
                total += share * gains
        return total

    def _training_s(self) -> float:
        limit = self._clock.limit or 0.0
        epoch_s = math.exp(self._guide.predictions[0][self._alive()].min()) * (self.job.epoch() or 0)
        return max(TRAINING_S, epoch_s, 0.0 if math.isinf(limit) else TRAINING_LIMITS * limit)

    def _starts_s(self, kinds: Sequence[str]) -> npt.NDArray[np.float64]:
        """Expected seconds to the end of every candidate's first step."""
        starts = list(zip(kinds, self._shards, strict=True))
        seconds = {start: self.job.starts.of_kind(*start) for start in set(starts)}
        steps_s = np.array([FIRST_STEPS[kind] for kind in kinds]) * np.exp(self._guide.predictions[0])
        return np.asarray([seconds[start] for start in starts] + steps_s)

    def _alive(self) -> npt.NDArray[np.bool_]:
        alive = np.ones(len(self._candidates), dtype=bool)
        alive[list(self.failures)] = False
        return alive

    def _taken(self) -> npt.NDArray[np.bool_]:
        """Candidates to run and choose from; those that save memory only if faster than ones that fit comfortably."""
        taken = self._alive()
        likely = taken & (self._guide.runs > UNLIKELY)
        taken = likely if likely.any() else taken
        limit = ROOM * usable_bytes(self.job.cluster)
        needed = np.array([candidate.estimate.needed_bytes for candidate in self._candidates])
        roomy = np.flatnonzero(taken & ~self._saves & (needed <= limit) & (self._guide.runs > 0.5))
        if len(roomy):
            mean, _ = self._guide.predictions
            ran = np.isin(np.arange(len(taken)), list(self.measured))
            taken &= ~self._saves | ran | (mean < mean[roomy].min() - TIE)
        return taken

    def choice(self) -> int:
        """The candidate of the least expected cost of start and steps; the simplest of ties."""
        taken = self._taken()
        charge = self._starts_s(self._kinds) / self._training_s()
        expected = np.where(taken, self._guide.expected(charge), np.inf)
        best = int(expected.argmin())
        if best not in self.measured:
            ahead = SURELY if self.baseline in self.measured else AHEAD
            ahead *= math.sqrt(self._guide.variance_to(best)[self.baseline])
            if expected[self.baseline] <= expected[best] + ahead:  # else of what ran, or the baseline
                best = min([*self.measured, self.baseline], key=lambda index: expected[index])
        if best not in self.measured:
            ties = np.flatnonzero(expected <= expected[best] + TIE).tolist()
        else:
            ties = [i for i in self.measured if taken[i] and expected[i] <= expected[best] + self._margin(best, i)]
            if self.baseline in self.measured and self.step_s(self.baseline) <= self.step_s(best):
                ties.append(self.baseline)
        return min(ties, key=lambda i: (i != self.baseline, len(self._candidates[i].strategy), expected[i]))

    def _margin(self, best: int, index: int) -> float:
        """The difference of logarithms up to which a measurement is a tie with the best."""
        are_compared = best in self.verdicts and index in self.verdicts
        noise = self.verdicts[best].noise if are_compared else math.sqrt(2) * self._guide.prior.noise
        return TIE + SURE * noise if index == self.baseline else max(TIE, noise)

    def step_s(self, index: int, deviations: float = 0.0) -> float:
        """Seconds of a composition's step: measured, or expected plus a number of standard deviations."""
        mean, deviation = self._guide.predictions
        measured = self.measured.get(index)
        return math.exp(mean[index] + deviations * deviation[index]) if measured is None else measured.step_s

    def observations(self, search: str) -> list[Observation]:
        return [
            Observation(
                job=self.job.past.job,
                search=search,
                methods=tokens_of(self._candidates[index].strategy),
                estimate_s=max(self._candidates[index].estimate.step_s, 1e-12),
                step_s=measurement.step_s,
                start_kind=self._starts_seen[index][0],
                start_ratio=self._starts_seen[index][1],
            )
            for index, measurement in self.measured.items()
        ]

    def why_not(self, index: int, chosen: int) -> Rejected:
        """The reason against a composition that fits, with its time relative to the chosen one's."""
        candidate, measured = self._candidates[index], self.measured.get(index)
        chosen_s = self.step_s(chosen)
        ratio = self.step_s(index) / chosen_s
        if measured is not None:
            lead = ", and no simpler" if ratio > 1 - TIE else ", but its lead is within the noise"
            tied = "" if ratio > 1 + TIE else lead
            return candidate.rejected("slower", relative_time(ratio) + tied, measured)
        # The estimate, corrected by measurements so that it can be compared with the chosen one's time.
        corrected = replace(candidate, estimate=replace(candidate.estimate, step_s=ratio * chosen_s))
        return corrected.rejected("not run", f"expected to be {relative_time(ratio)}{self._why_not_run(index, ratio)}")

    def _why_not_run(self, index: int, ratio: float) -> str:
        start_s = self._start_s(index)
        if ratio > 1:
            return ""
        if not self._taken()[index]:
            return ", but within the estimate's error, and nothing needs the memory that it saves"
        if start_s > self._clock.left:
            return f", but starting it takes about {format_seconds(start_s)}, and there was no time left"
        return f", but too uncertain to be worth its start of about {format_seconds(start_s)}"

    def _run(self, runs: DryRuns, index: int) -> None:
        """Run one dry run on all ranks; the result goes to `measured` or `failures`."""
        strategy, share_s = self._candidates[index].strategy, float(self._coordinator.broadcast(self._clock.left))
        trial = runs.trial(strategy, share_s)
        self.num_runs += 1
        outcome = measure(trial, share_s, self._best_s())
        trial.close()
        if isinstance(outcome, Measurement):
            self.measured[index] = outcome
            self._guide.observe(index, outcome.step_s)
            self._starts_seen[index] = self.job.starts.saw(strategy, trial.startup_s, outcome.step_s)
            self._kinds[index] = self.job.starts.kind(strategy)
        else:
            self.reject(index, outcome)
            if trial.elapsed_s > self._start_s(index):  # at least so long are such starts
                self.job.starts.saw(strategy, trial.elapsed_s, 0.0)
        if self.progress is not None:
            step_s = outcome.step_s if isinstance(outcome, Measurement) else None
            left_s = max(0.0, min(trial.elapsed_s * (MAX_RUNS - self.num_runs), self._clock.left))
            self.progress(
                Progress(self.num_runs, max(MAX_RUNS, self.num_runs), str(strategy), step_s, self._best_s(), left_s)
            )

    def reject(self, index: int, failure: Failure) -> None:
        """Record that a candidate does not run, or was refused or given up."""
        self.measured.pop(index, None)
        self.failures[index] = self._candidates[index].rejected(failure.why, failure.reason)
        if failure.why == "failed":
            self._guide.observe_failure(index, failure.reason, of_memory="memory" in failure.reason.lower())

    def _compare(self, runs: DryRuns) -> None:
        """Measure the candidates near the choice in turns, if the comparison is worth its time."""
        finalists = self._coordinator.broadcast(self._finalists())
        if len(finalists) < 2:
            return
        times = self._in_turns(runs, finalists)
        first = finalists[0]
        if len(times.get(first, ())) < MIN_TURNS:
            return
        base_s = statistics.median(times[first])
        drift = base_s / self.measured[first].step_s
        for index, measurement in self.measured.items():  # all as of the time of the comparison
            self.measured[index] = replace(measurement, step_s=measurement.step_s * drift)
        for index in times:
            turns = min(len(times[index]), len(times[first]))
            if turns >= MIN_TURNS:
                verdict = self.verdicts[index] = Verdict.of(times[index][:turns], times[first][:turns])
                self.measured[index] = replace(self.measured[index], step_s=verdict.ratio * base_s)
        for index, measurement in self.measured.items():
            self._guide.observe(index, measurement.step_s)

    def _finalists(self) -> list[int]:
        """The choice and candidates near it, the baseline first, within memory and time; none if it does not pay."""
        if not self.measured or self.choice() not in self.measured:
            return []
        near_s = (self._best_s() or 0.0) * (1 + NEAR.get(self.job.cluster.device.type, QUIET))
        fastest = sorted(self.measured, key=lambda index: self.measured[index].step_s)
        near = [index for index in fastest if self.measured[index].step_s < near_s]
        near.sort(key=lambda index: index != self.baseline)
        room, chosen = usable_bytes(self.job.cluster), list[int]()
        for index in near[:MAX_CONTENDERS]:
            if self._held(index) <= room and self._compare_s([*chosen, index]) <= self._clock.left:
                room -= self._held(index)
                chosen.append(index)
        gain = self._guide.prior.noise / math.sqrt(math.pi)  # expected, from taking the better of two within noise
        return chosen if gain * self._training_s() >= self._compare_s(chosen) else []

    def _in_turns(self, runs: DryRuns, finalists: Sequence[int]) -> dict[int, list[float]]:
        """Seconds of each finalist by turn; all trials are alive together."""
        trials: dict[int, Trial] = {}

        def failed(index: int) -> None:
            self.reject(index, failure_of(trials[index]))

        def goes_on(seconds: float) -> bool:
            return bool(self._coordinator.broadcast(seconds < self._clock.left))

        try:
            for index in finalists:
                trials[index] = runs.trial(self._candidates[index].strategy, math.inf)
                if not trials[index].start():
                    failed(index)
                    trials.pop(index).close()
            turns = num_turns(min((self.measured[i].step_s for i in finalists if i in self.measured), default=1.0))
            return in_turns(trials, turns, goes_on, failed, finalists[0])
        finally:
            for trial in trials.values():
                trial.close()

    def _compare_s(self, indices: Sequence[int]) -> float:
        return seconds_needed([self._start_s(i) for i in indices], [self.measured[i].step_s for i in indices])

    def _held(self, index: int) -> float:
        return max(self.measured[index].peak_bytes, self._candidates[index].estimate.peak_bytes)

    def _best_s(self) -> float | None:
        return min((measurement.step_s for measurement in self.measured.values()), default=None)

    def _start_s(self, index: int) -> float:
        return float(self._starts_s(self._kinds)[index])


def relative_time(ratio: float) -> str:
    """A step time over the chosen one's, in words."""
    if ratio >= 2:
        return f"{ratio:.1f}× as slow"
    if abs(ratio - 1) < 0.005:
        return "as fast"
    return f"{ratio - 1:.0%} slower" if ratio > 1 else f"{1 - ratio:.0%} faster"
