"""Uncertainty of estimates near the fastest: the choice under it, and the measurement that would settle it.

Candidates share the machine and its kernels, so that errors of estimates are alike but for the kinds of work of which
two candidates have different shares (`cost.uncertainty`). Regret is what the choice takes longer than the best, as a
logarithm; it is expected to be least for the least expected logarithm: the estimate's, and more for what is known less
well, as work takes longer than estimated more often than not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist

from atorch.auto.planner.cluster_plan import Measuring
from atorch.auto.planner.estimate.candidate_table import CandidateTable
from atorch.auto.planner.estimate.tie_breaking import TIE, intricacy, preferred
from atorch.auto.planner.plan import Estimate
from atorch.auto.strategy import Method, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, StepTimes
from atorch.cost.memory_interval import memory_band
from atorch.cost.uncertainty import KINDS, Shares, Uncertainty
from atorch.report.labels import shown_work

NEAR = 0.1  # of the fastest: what is slower by more is not looked at
MOST_NEAR = 40  # of those
CLEAR = 0.2  # a chance of being faster; what has less is told from the choice
LEAST_SAVED = 0.001  # of a step: a measurement that saves less decides nothing
_NORMAL = NormalDist()
_DRAWS: Sequence[float] = tuple(_NORMAL.inv_cdf((number + 0.5) / 64) for number in range(64))  # each as likely

Composed = tuple[Method, ...]


class EstimateUncertainty:
    """Uncertainty of the estimates of one job's compositions; what was worked out once is kept."""

    def __init__(self, start: Cost, cluster: ClusterSpec, times: StepTimes | None = None) -> None:
        self._start, self._uncertainty = start, Uncertainty(cluster, times)
        self._shares: dict[Composed, Shares] = {}

    def with_band(self, methods: Composed, estimate: Estimate) -> Estimate:
        """An estimate with the seconds between which its step is expected, and the bytes between which its peak is."""
        low_s, high_s = self._uncertainty.band(estimate.step_s, self.shares(methods))
        low_bytes, high_bytes = memory_band(estimate.memory)
        _, needed = memory_band({**estimate.memory, "slack": estimate.reserve_bytes})
        return replace(
            estimate,
            low_s=low_s,
            high_s=high_s,
            low_bytes=low_bytes,
            high_bytes=high_bytes,
            high_needed_bytes=needed,
        )

    def shares(self, methods: Composed) -> Shares:
        """The share of each kind of work in a composition's step."""
        if methods not in self._shares:
            self._shares[methods] = self._uncertainty.shares(Strategy(methods).cost(self._start))
        return self._shares[methods]

    def expected_s(self, methods: Composed, step_s: float) -> float:
        """The seconds that a step takes as likely as not, by its estimate."""
        return self._uncertainty.expected(step_s, self.shares(methods))

    def chosen(self, columns: CandidateTable) -> int:
        """The row with the least expected regret among those near the fastest, and of what is as good the simplest."""
        near = _near(columns)
        return preferred(columns, {row: self._expected_s(columns, row) for row in near})

    def note(self, columns: CandidateTable, chosen: int) -> str | None:
        """Why the choice is not what would be chosen by the estimates alone; None where it is."""
        other = preferred(columns)
        if other == chosen:
            return None
        mine, yours = (self.shares(columns.methods[row]) for row in (chosen, other))
        worst = max(KINDS, key=lambda kind: self._uncertainty.of_kind(kind, yours, mine))
        shares = " and ".join(f"{100 * each[KINDS.index(worst)]:.0f} %" for each in (yours, mine))
        gained = columns.step_s[chosen] / columns.step_s[other] - 1
        than = f"{abs(gained):.1%} {'faster' if gained > 0 else 'slower'}"
        lost = self._expected_s(columns, other) / self._expected_s(columns, chosen) - 1
        known = f"{shown_work(worst)}, {shares} of a step"
        return (
            f"by the estimate alone {Strategy(columns.methods[other])} would be chosen, {than}; its time is known less "
            f"well ({known}), so that it is expected to take {lost:.1%} longer than what is chosen"
        )

    def chance(self, columns: CandidateTable, row: int, chosen: int) -> float:
        """The chance that a row is faster than the chosen one."""
        slower, spread = self._against(columns, row, chosen)
        return _NORMAL.cdf(-slower / spread)

    def ties(self, columns: CandidateTable, chosen: int) -> list[int]:
        """Rows that cannot be told from the chosen one, the simplest first."""
        near = (row for row in _near(columns) if row != chosen)
        ties = [row for row in near if self.chance(columns, row, chosen) >= CLEAR]
        return sorted(ties, key=lambda row: (len(columns.methods[row]), columns.step_s[row]))

    def decisive(self, columns: CandidateTable, chosen: int) -> tuple[Measuring, ...]:
        """The run and the calibration that are expected to save most, where they save anything."""
        others = [row for row in _near(columns) if row != chosen]
        if not others:
            return ()
        against = {row: self._against(columns, row, chosen) for row in others}
        run = max(others, key=lambda row: _saved(*against[row]))
        of_run = Measuring(saves=_saved(*against[run]), strategy=Strategy(columns.methods[run]))
        slower = [each for each, _ in against.values()]
        mine = self.shares(columns.methods[chosen])
        yours = [self.shares(columns.methods[row]) for row in others]
        found = [of_run]
        for kind in KINDS:
            moves = [self._uncertainty.of_kind(kind, mine, each) for each in yours]
            found.append(Measuring(saves=_saved_by_kind(slower, moves), kind=kind))
        best = max(found[1:], key=lambda each: each.saves)
        told = (each for each in (of_run, best) if each.saves >= LEAST_SAVED)
        return tuple(sorted(told, key=lambda each: -each.saves))

    def _against(self, columns: CandidateTable, row: int, chosen: int) -> tuple[float, float]:
        """The expected lag of a row behind the chosen one, as a logarithm, and its standard deviation."""
        slower = math.log(self._expected_s(columns, row) / self._expected_s(columns, chosen))
        apart = self._uncertainty.apart(self.shares(columns.methods[row]), self.shares(columns.methods[chosen]))
        return slower, apart

    def _expected_s(self, columns: CandidateTable, row: int) -> float:
        return self.expected_s(columns.methods[row], float(columns.step_s[row]))


def _near(columns: CandidateTable) -> list[int]:
    """Rows near the fastest, the fastest of them, and of those that tie with it the simplest."""
    rows = columns.fastest()
    step_s = columns.step_s
    near = [row for row in rows if step_s[row] <= step_s[rows[0]] * (1 + NEAR)]
    ties = [row for row in near if step_s[row] <= step_s[rows[0]] * (1 + TIE)]

    def order(row: int) -> tuple[object, ...]:
        return intricacy(columns.methods[row], on_host=bool(columns.on_host[row] > 0)), step_s[row]

    simple = sorted(ties, key=order)[: MOST_NEAR // 2]
    return list(dict.fromkeys([preferred(columns), *near[: MOST_NEAR // 2], *simple]))


def _saved(slower: float, spread: float) -> float:
    """The expected saving from knowing a difference, if the faster one is taken: E max(0, -x), x normal.

    That is expected improvement (Jones, Schonlau and Welch 1998), less what could be had without measuring.
    """
    above = slower / spread
    return spread * (_NORMAL.pdf(above) - above * _NORMAL.cdf(-above)) - max(0.0, -slower)


def _saved_by_kind(slower: Sequence[float], moves: Sequence[float]) -> float:
    """The saving from knowing a kind's error, of which one sigma moves each of several so far ahead of the choice."""
    both = list(zip(slower, moves, strict=True))
    saved = sum(max(0.0, *(move * draw - behind for behind, move in both)) for draw in _DRAWS) / len(_DRAWS)
    return saved - max(0.0, *(-behind for behind in slower))
