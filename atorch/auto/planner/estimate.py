"""Estimates of compositions by arithmetic: seconds, bytes, whether they fit, their uncertainty, and the fastest mesh.

Candidates share the machine and its kernels. So errors of their estimates are equal except for kinds of work of which
they have different shares (`cost.uncertainty`). Regret is the logarithm of the choice's seconds over the best's. The
candidate with the least expected logarithm has the least expected regret. That logarithm is the estimate's, plus more
for work whose estimate is less certain, since work usually takes longer than estimated.

A strategy that splits the model and gives no mesh gets the one that is estimated fastest: at least one of the methods
that split has an axis larger than 1. Methods without one are left out, with a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import SLOT, complete, disagreement
from atorch.auto.planner.candidate_table import TIE, CandidateTable, preferred
from atorch.auto.planner.plan import Estimate, MeasurementValue
from atorch.auto.strategy import Method, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile, StepTime, StepTimes, peak_memory
from atorch.cost.memory import RESERVE, memory_band
from atorch.cost.parallelism import BATCH_AXES, REPLICA_AXES
from atorch.cost.uncertainty import KINDS, Shares, Uncertainty
from atorch.errors import StrategyError
from atorch.report.figures import shown_work
from atorch.units import format_bytes

_SIXTEEN_BITS = ("bfloat16", "float16", "float32")  # MFU is a share of the peak of the first that a device has


def useful_flops(cost: Cost) -> float:
    """FLOPs of a step on all devices together: forward once and backward once, without recomputation.

    For every product of forward, backward has two, or one if the weight is frozen; attention also has two. Causal
    attention computes half of the scores (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, counts all of them).
    """
    samples = cost.batch_size * cost.size(*BATCH_AXES) / cost.traced_batch
    return samples * sum(
        segment.count
        * (
            sum(product.flops * (3 if product.trainable else 2) for product in segment.matmuls)
            + 3 * segment.attention_flops
        )
        for segment in cost.segments
    )


def utilisation_peak(peak_flops: Mapping[str, float]) -> float:
    """A device's dense FLOP/s in 16 bits, the base of MFU, or in fp32 if it has no others; 0: unknown."""
    return next((peak_flops[name] for name in _SIXTEEN_BITS if name in peak_flops), 0.0)


def estimate_of(cost: Cost, cluster: ClusterSpec, times: StepTimes | None = None) -> Estimate:
    """The estimate of the seconds and bytes of a step; `times` caches common terms of many estimates.

    The uncertainty of the seconds takes several times as long to compute: see `uncertainty`.
    """
    memory, spent = peak_memory(cost), (times or StepTimes(cluster)).of(cost)
    rate = cost.batch_size * cost.size(*BATCH_AXES) / spent.total_s if spent.total_s else 0.0
    flops = useful_flops(cost) / (spent.total_s * cluster.world_size) if spent.total_s else None
    peak = utilisation_peak(cluster.device.peak_flops)
    length = max((segment.sequence_length for segment in cost.segments), default=0)
    return Estimate(
        step_s=spent.total_s,
        peak_bytes=memory.total,
        reserve_bytes=memory.needed - memory.total,
        memory={name: held for name, held in memory.by_category().items() if name != "slack"},
        stage=memory.stage,
        on_host_bytes=memory.on_host,
        checkpoint_bytes=_checkpoint_bytes(cost) / cluster.world_size,
        time=_by_category(spent),
        samples_per_s=rate,
        tokens_per_s=rate * length if length else None,
        flops_per_s=flops,
        mfu=flops / peak if flops and peak else None,
    )


def _checkpoint_bytes(cost: Cost) -> float:
    """Bytes of parameters, in fp32 where they have masters, and of optimizer states, each once."""
    return sum(
        part.count
        * (
            part.num_params * max(part.mean_itemsize(cost.param_itemsize), cost.master_itemsize)
            + part.num_trainable * cost.optim_itemsize
        )
        for part in cost.segments
    )


def _by_category(spent: StepTime) -> dict[str, float]:
    """Seconds by category, the largest first. Launches count only the part that work does not hide."""
    named = {name.removesuffix("_s"): getattr(spent, name) for name in StepTime._fields if name != "total_s"}
    named["launch"] = max(0.0, spent.total_s - sum(named.values()) + named["launch"])
    return {name: value for name, value in sorted(named.items(), key=lambda item: -item[1]) if value > 0}


def usable_bytes(cluster: ClusterSpec, reserve: float = RESERVE) -> float:
    return cluster.device.memory_bytes * (1 - reserve)


def usable_host_bytes(cluster: ClusterSpec, reserve: float = RESERVE) -> float:
    return cluster.host_memory_bytes / cluster.devices_per_node * (1 - reserve)


def needs(estimate: Estimate, limit: float) -> str:
    """The reason why an estimate does not fit: the missing bytes, and the largest categories."""
    most = ", ".join(f"{name} {format_bytes(held)}" for name, held in list(estimate.memory.items())[:3])
    short, stage = format_bytes(estimate.needed_bytes - limit), f" on stage {estimate.stage}" if estimate.stage else ""
    return f"is {short} short{stage} of the {format_bytes(estimate.needed_bytes)} that it needs: {most}"


NEAR = 0.1  # share of the fastest step: candidates slower by more are not considered
MOST_NEAR = 40  # limit of considered candidates
CLEAR = 0.2  # chance of being faster: a candidate with less is clearly slower than the choice
LEAST_SAVED = 0.001  # share of a step: a measurement that saves less is not listed
_NORMAL = NormalDist()
_DRAWS: Sequence[float] = tuple(_NORMAL.inv_cdf((number + 0.5) / 64) for number in range(64))  # equally likely

Composed = tuple[Method, ...]


class EstimateUncertainty:
    """Uncertainty of the estimates of one job's compositions; shares of work are cached."""

    def __init__(self, start: Cost, cluster: ClusterSpec, times: StepTimes | None = None) -> None:
        self._start, self._uncertainty = start, Uncertainty(cluster, times)
        self._shares: dict[Composed, Shares] = {}

    def with_band(self, methods: Composed, estimate: Estimate) -> Estimate:
        """The estimate with intervals for the seconds of its step and for its peak bytes."""
        low_s, high_s = self._uncertainty.band(estimate.step_s, self.shares(methods))
        low_bytes, high_bytes = memory_band(estimate.memory)
        _, needed = memory_band({**estimate.memory, "slack": estimate.reserve_bytes})
        return replace(
            estimate, low_s=low_s, high_s=high_s, low_bytes=low_bytes, high_bytes=high_bytes, high_needed_bytes=needed
        )

    def shares(self, methods: Composed) -> Shares:
        if methods not in self._shares:
            self._shares[methods] = self._uncertainty.shares(Strategy(methods).cost(self._start))
        return self._shares[methods]

    def chosen(self, columns: CandidateTable) -> int:
        """The row with the least expected regret among those near the fastest; the simplest of ties."""
        near = _near(columns)
        return preferred(columns, {row: self._expected_s(columns, row) for row in near})

    def note(self, columns: CandidateTable, chosen: int) -> str | None:
        """A note on why the choice is not the one by estimates alone; None if it is."""
        other = preferred(columns)
        if other == chosen:
            return None
        mine, yours = (self.shares(columns.methods[row]) for row in (chosen, other))
        worst = max(KINDS, key=lambda kind: self._uncertainty.of_kind(kind, yours, mine))
        shares = " and ".join(f"{100 * composition[KINDS.index(worst)]:.0f} %" for composition in (yours, mine))
        gained = columns.step_s[chosen] / columns.step_s[other] - 1
        gain = f"{abs(gained):.1%} {'faster' if gained > 0 else 'slower'}"
        lost = self._expected_s(columns, other) / self._expected_s(columns, chosen) - 1
        work = f"{shown_work(worst)}, {shares} of a step"
        return (
            f"{Strategy(columns.methods[other])} is estimated {gain}, but its estimate is less certain ({work}); with "
            f"a safety margin it takes {lost:.1%} longer than the choice"
        )

    def chance(self, columns: CandidateTable, row: int, chosen: int) -> float:
        slower, spread = self._against(columns, row, chosen)
        return _NORMAL.cdf(-slower / spread)

    def ties(self, columns: CandidateTable, chosen: int) -> list[int]:
        """Rows that are not clearly slower than the chosen one, the simplest first."""
        near = (row for row in _near(columns) if row != chosen)
        ties = [row for row in near if self.chance(columns, row, chosen) >= CLEAR]
        return sorted(ties, key=lambda row: (len(columns.methods[row]), columns.step_s[row]))

    def decisive(self, columns: CandidateTable, chosen: int) -> tuple[MeasurementValue, ...]:
        """The run and the calibration with the largest expected savings, if they save anything."""
        others = [row for row in _near(columns) if row != chosen]
        if not others:
            return ()
        against = {row: self._against(columns, row, chosen) for row in others}
        run = max(others, key=lambda row: _saved(*against[row]))
        of_run = MeasurementValue(saves=_saved(*against[run]), strategy=Strategy(columns.methods[run]))
        slower = [lag for lag, _ in against.values()]
        mine = self.shares(columns.methods[chosen])
        yours = [self.shares(columns.methods[row]) for row in others]
        moves = {kind: [self._uncertainty.of_kind(kind, mine, theirs) for theirs in yours] for kind in KINDS}
        of_kinds = [MeasurementValue(saves=_saved_by_kind(slower, moves[kind]), kind=kind) for kind in KINDS]
        best = max(of_kinds, key=lambda measuring: measuring.saves)
        decisive = (measuring for measuring in (of_run, best) if measuring.saves >= LEAST_SAVED)
        return tuple(sorted(decisive, key=lambda measuring: -measuring.saves))

    def _against(self, columns: CandidateTable, row: int, chosen: int) -> tuple[float, float]:
        """The expected lag of a row behind the chosen one, as a logarithm, and its standard deviation."""
        slower = math.log(self._expected_s(columns, row) / self._expected_s(columns, chosen))
        spread = self._uncertainty.of_difference(
            self.shares(columns.methods[row]), self.shares(columns.methods[chosen])
        )
        return slower, spread

    def _expected_s(self, columns: CandidateTable, row: int) -> float:
        return self._uncertainty.expected(columns.step_s[row], self.shares(columns.methods[row]))


def _near(columns: CandidateTable) -> list[int]:
    """Rows near the fastest: the preferred one, the fastest ones, and the simplest that tie with the fastest."""
    rows = columns.fastest()
    step_s = columns.step_s
    near = [row for row in rows if step_s[row] <= step_s[rows[0]] * (1 + NEAR)]
    ties = [row for row in near if step_s[row] <= step_s[rows[0]] * (1 + TIE)]
    simple = sorted(ties, key=lambda row: (columns.intricacy(row), step_s[row]))[: MOST_NEAR // 2]
    return list(dict.fromkeys([preferred(columns), *near[: MOST_NEAR // 2], *simple]))


def _saved(slower: float, spread: float) -> float:
    """The expected saving from measuring a difference x and taking the faster one: E max(0, -x), x normal.

    This is expected improvement (Jones, Schonlau and Welch 1998), minus the gain without a measurement.
    """
    above = slower / spread
    return spread * (_NORMAL.pdf(above) - above * _NORMAL.cdf(-above)) - max(0.0, -slower)


def _saved_by_kind(slower: Sequence[float], moves: Sequence[float]) -> float:
    """The expected saving from knowing a kind's error; one sigma of it changes each candidate's lag by its move."""
    pairs = list(zip(slower, moves, strict=True))
    saved = sum(max(0.0, *(move * draw - lag for lag, move in pairs)) for draw in _DRAWS) / len(_DRAWS)
    return saved - max(0.0, *(-lag for lag in slower))


def lacks_degrees(strategy: Strategy) -> bool:
    """True if a strategy splits the model and gives no mesh; data-parallel shards fit any mesh and do not count."""
    return strategy.get(ParallelMode) is None and any(method.splits and method.slot != SLOT for method in strategy)


def fastest_mesh(strategy: Strategy, profile: ModelProfile, start: Cost, cluster: ClusterSpec) -> ParallelMode:
    """The mesh on which the strategy is estimated fastest, among those where it fits in memory.

    Raises:
        StrategyError: the strategy is legal on no mesh of this many processes, or fits on none.
    """
    tried = [(mode, _cost_on(strategy, mode, start, cluster)) for mode in ParallelMode.choices(profile, cluster)]
    legal = [(mode, estimate_of(cost, cluster)) for mode, cost in tried if isinstance(cost, Cost)]
    fitting = [pair for pair in legal if pair[1].needed_bytes <= usable_bytes(cluster)]
    if fitting:
        return min(fitting, key=lambda pair: pair[1].step_s)[0]
    if legal:
        nearest, estimate = min(legal, key=lambda pair: pair[1].needed_bytes)
        raise StrategyError(
            f"{strategy} fits on no mesh of {cluster.world_size} processes; the nearest is {nearest}, which "
            f"needs {format_bytes(estimate.needed_bytes)} of {format_bytes(usable_bytes(cluster))} a device. "
            "Add fsdp, checkpoint or micro_batch, or use more processes"
        )
    reasons = "; ".join(list(dict.fromkeys(str(reason) for _, reason in tried))[:3])
    raise StrategyError(
        f"{strategy} is legal on no mesh of {cluster.world_size} processes: {reasons}. Give a parallel_mode"
    )


def on_mesh(strategy: Strategy, mode: ParallelMode, world_size: int) -> Strategy:
    """The complete strategy on a mesh, without methods that have nothing to split over or to shard there."""
    large = {name for name, size in mode.slices if size > 1}

    def is_idle(method: Method) -> bool:
        if method.slot == SLOT:
            return method.needs_replicas and large.isdisjoint(REPLICA_AXES)
        return bool(method.splits) and large.isdisjoint(method.splits)

    kept = tuple(method for method in strategy if not is_idle(method))
    return complete(Strategy((*kept, mode), strategy.metadata), world_size)


def _cost_on(strategy: Strategy, mode: ParallelMode, start: Cost, cluster: ClusterSpec) -> Cost | str:
    """The strategy's cost on one mesh, or the reason why it is not legal there."""
    splitting = [method for method in strategy if method.splits and method.slot != SLOT]
    if not any(mode.size(*method.splits) > 1 for method in splitting):
        return f"{mode} splits no model by {' or '.join(method.name for method in splitting)}"
    here = on_mesh(strategy, mode, cluster.world_size)
    reason = disagreement(here.methods, dict(mode.slices))
    cost = start
    for method in here:
        reason = reason or method.unfit(cost)
        if reason:
            return reason
        cost = method.cost(cost)
    return cost
