"""The length and the price of a whole run by a plan: hours, device-hours, money, and goodput with failures.

A run of N steps takes N · step seconds of training, divided by the goodput (`cost.goodput`). A save stops training
while its bytes are copied to host memory over the device's link; they are then written in the background.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atorch.auto.planner.request import duration
from atorch.cost.goodput import MTBF_S, MTBF_SOURCE, RESTART_S, RESTART_SOURCE, Goodput, goodput
from atorch.errors import ArgumentError, shown
from atorch.report.training import BACKGROUND_S
from atorch.units import amount_in, format_seconds

if TYPE_CHECKING:
    from atorch.auto.planner.plan import ClusterPlan

_UNITS: Mapping[str, str] = {"": "tokens", "token": "tokens", "sample": "samples", "step": "steps"}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A whole run by a plan. Hours include failures; `low_hours` and `high_hours` are those of the step's range."""

    amount: float
    unit: str  # "tokens", "samples" or "steps"
    steps: int
    hours: float
    low_hours: float | None
    high_hours: float | None
    device_hours: float
    cost: float | None  # in the price's currency; None without a price
    low_cost: float | None
    high_cost: float | None
    goodput: float  # share of the time that trains
    failure_s: float  # mean seconds between failures on all devices
    failure_source: str
    save_every_s: float  # seconds of training between checkpoints
    save_every_steps: int
    save_stops_s: float  # seconds for which a save stops training
    save_takes_s: float  # seconds until it is complete
    restart_s: float
    restart_source: str


@dataclass(frozen=True)
class RunRequest:
    """The length of a run, and its failures.

    Args:
        until: tokens, such as "15T" or 15e12, or "300M samples", "100000 steps".
        mtbf: mean time between failures of one device, as "50000h", or in seconds.
        restart: time from a failure until training goes on, as "10min", or in seconds.

    Raises:
        ArgumentError: an invalid value.
    """

    until: Any
    mtbf: Any = None
    restart: Any = None

    def __post_init__(self) -> None:
        amount, unit = self._amount()
        if unit not in _UNITS.values() or not 0 < amount < 1e30:
            raise ArgumentError(
                f"until is {shown(self.until)}; give tokens as '15T', or samples or steps as '100000 steps', above 0"
            )
        object.__setattr__(self, "until", (amount, unit))
        object.__setattr__(self, "mtbf", duration(self.mtbf, "mtbf", "50000h"))
        object.__setattr__(self, "restart", duration(self.restart, "restart", "10min"))

    def _amount(self) -> tuple[float, str]:
        given = self.until
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            return float(given), "tokens"
        amount, unit = (amount_in(given) if isinstance(given, str) else None) or (0.0, "")
        return amount, _UNITS.get(unit, unit)


def training_of(plan: ClusterPlan, request: RunRequest) -> Training:
    """The run of a plan.

    Raises:
        ArgumentError: tokens are given for samples that are no sequences, or failures leave no time to train.
    """
    estimate, cluster = plan.estimate, plan.cluster
    (amount, unit), devices = request.until, cluster.world_size
    tokens = estimate.tokens_per_s and estimate.tokens_per_s * estimate.step_s
    if unit == "tokens" and not tokens:
        raise ArgumentError("until counts tokens, and the model's samples are no sequences; give samples or steps")
    steps = math.ceil(amount / {"tokens": tokens or 1.0, "samples": plan.global_batch, "steps": 1}[unit] * (1 - 1e-12))
    failure_s = (request.mtbf or MTBF_S) / devices
    restart_s = request.restart or RESTART_S
    link, written = cluster.host_link, estimate.checkpoint_bytes
    stall_s, lag_s = written / (link.bandwidth * link.efficiency), written * BACKGROUND_S

    def at(step_s: float) -> Goodput:
        return goodput(failure_s, stall_s=stall_s, lag_s=lag_s, restart_s=restart_s, step_s=step_s)

    def hours(step_s: float | None) -> float | None:
        return None if step_s is None else steps * step_s / at(step_s).share / 3600 if at(step_s).share else None

    here, took = at(estimate.step_s), hours(estimate.step_s)
    if took is None or not took < 1e12:
        raise ArgumentError(
            f"with a failure every {format_seconds(failure_s)} on {devices} devices, and {format_seconds(restart_s)} "
            "to restart, training never gets ahead; give a longer mtbf, or fewer devices"
        )
    rate = plan.price.per_hour * devices if plan.price else None
    low, high = hours(estimate.low_s), hours(estimate.high_s)

    def cost(hours: float | None) -> float | None:
        return None if rate is None or hours is None else hours * rate

    return Training(
        amount=amount,
        unit=unit,
        steps=steps,
        hours=took,
        low_hours=low,
        high_hours=high,
        device_hours=took * devices,
        cost=cost(took),
        low_cost=cost(low),
        high_cost=cost(high),
        goodput=here.share,
        failure_s=failure_s,
        failure_source="given" if request.mtbf else MTBF_SOURCE,
        save_every_s=here.interval_s,
        save_every_steps=math.ceil(here.interval_s / estimate.step_s * (1 - 1e-9)),
        save_stops_s=stall_s,
        save_takes_s=lag_s,
        restart_s=restart_s,
        restart_source="given" if request.restart else RESTART_SOURCE,
    )
