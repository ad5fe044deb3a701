"""Simulates the best candidates of a plan: methods applied to fake tensors in a fake world of the cluster's size.

Simulation counts what the estimate computes. It needs a traced model and methods that can be applied. If it is
impossible, or exceeds the limits for this machine, the result is the reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atorch.auto.strategy import Strategy
from atorch.cost import ModelProfile
from atorch.errors import AtorchError
from atorch.logs import logger
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.plan_for_cluster import Subject
    from atorch.auto.planner.simulate.simulation import Simulated

Doing = Callable[[str], AbstractContextManager[Any]]  # reports a description of the work while the context is open
COPIES = 3  # parameters, their gradients, and the reference that they are compared with


@dataclass(frozen=True)
class SimulationLimits:
    """Limits of simulations on this machine."""

    until: float = math.inf  # a time of `time.monotonic`
    real_bytes: float = math.inf  # bytes of the copy with values that methods observe

    def why_not(self, subject: Subject, strategy: Strategy) -> str | None:
        """The reason against a simulation of the strategy, or None."""
        if subject.ctx is None:
            return "there is no model, only its shape"
        if any(method.simulated == "by itself" for method in strategy):  # `simulate` gives a more specific reason
            return None
        if time.monotonic() > self.until:
            return self.out_of_time
        watching = [method.name for method in strategy if method.needs_sample]
        size = _watched_bytes(subject.profile)
        if not watching or size <= self.real_bytes:
            return None
        return (
            f"{', '.join(watching)} would watch a few real blocks of the model at work, which takes "
            f"{format_bytes(size)} here; {format_bytes(self.real_bytes)} is what a plan may take"
        )

    @property
    def out_of_time(self) -> str:
        return "there was no time left for it; give verify (--verify N) to take as long as it needs"


def simulated(
    subject: Subject,
    candidates: Iterable[tuple[Strategy, float]],
    world_size: int,
    global_batch: int,
    allowance: SimulationLimits | None = None,
    doing: Doing = nullcontext,
) -> tuple[dict[str, Any], ...]:
    """The result of simulating each `(strategy, estimated bytes)`, or the reason against it, as plain JSON data."""
    allowance, outcomes = allowance or SimulationLimits(), list[dict[str, Any]]()
    for strategy, estimated in candidates:
        why_not = allowance.why_not(subject, strategy)
        outcome: dict[str, Any] = {"why_not": why_not}
        if why_not is None:
            with doing(f"simulating {strategy}"):
                outcome = _outcome(subject, strategy, world_size, global_batch, allowance)
        outcomes.append({"strategy": [str(method) for method in strategy], "estimated_bytes": estimated, **outcome})
    return tuple(outcomes)


def _outcome(
    subject: Subject, strategy: Strategy, world_size: int, global_batch: int, allowance: SimulationLimits
) -> dict[str, Any]:
    from atorch.auto.planner.simulate.simulation import simulate
    from atorch.auto.planner.simulate.small_simulation import ranks_of_stages

    assert subject.ctx is not None, "there is a model"
    began = time.monotonic()
    try:
        stages = {
            place: simulate(
                subject.ctx,
                strategy,
                subject.batch,
                world_size=world_size,
                global_batch=global_batch,
                rank=rank,
                until=allowance.until,
            )
            for place, rank in ranks_of_stages(strategy, world_size).items()
        }
    except Exception as error:  # a model may fail on fakes in any way; the plan is valid without simulation
        if time.monotonic() > allowance.until:
            return {"why_not": allowance.out_of_time}
        if isinstance(error, AtorchError):
            return {"why_not": str(error)}
        logger.info("%s cannot be simulated", strategy, exc_info=error)
        return {"why_not": f"the model does not run on fake tensors ({type(error).__name__}: {error})"}
    return {**_fullest(stages), "seconds": time.monotonic() - began}


def _watched_bytes(profile: ModelProfile) -> float:
    """Bytes for methods that observe the model: copies of a few of its blocks, in its own dtype."""
    from atorch.auto.planner.simulate.small_simulation import LONG

    counts = ((min(segment.count, LONG) if segment.is_block else segment.count) for segment in profile.segments)
    few = sum(count * segment.num_params for count, segment in zip(counts, profile.segments, strict=True))
    return COPIES * few * profile.param_bytes / max(1, profile.num_params)


def _fullest(stages: Mapping[int, Simulated]) -> dict[str, Any]:
    """The figures of the stage with the highest peak, and the peak of every simulated stage."""
    place = max(stages, key=lambda stage: stages[stage].peak_bytes)
    fullest = stages[place].to_json_data()
    if len(stages) > 1:
        fullest["stages"] = [{"stage": stage, "peak_bytes": held.peak_bytes} for stage, held in stages.items()]
        peaks = ", ".join(f"{stage} ({format_bytes(held.peak_bytes)})" for stage, held in stages.items())
        fullest["notes"] = [f"on stage {place}, the fullest of {peaks}", *fullest["notes"]]
    return fullest
