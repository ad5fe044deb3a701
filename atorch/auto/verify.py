"""The best of a plan simulated: methods applied for real to fake tensors on a fake world of the cluster's size.

Simulation counts what the estimate computes. It needs a model that was traced and methods that can be applied; where it
cannot be, the reason stands in its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from atorch.auto.strategy import Strategy
from atorch.errors import AtorchError
from atorch.logs import logger
from atorch.units import format_bytes

if TYPE_CHECKING:
    from atorch.auto.offline import Subject
    from atorch.auto.planner.simulate import Simulated


def simulated(
    subject: Subject, candidates: Iterable[tuple[Strategy, float]], world_size: int, global_batch: int
) -> tuple[dict[str, Any], ...]:
    """What simulating each `(strategy, estimated bytes)` found, or why it was not, as plain JSON data."""
    return tuple(
        {
            "strategy": [str(each) for each in strategy],
            "estimated_bytes": estimated,
            **_outcome(subject, strategy, world_size, global_batch),
        }
        for strategy, estimated in candidates
    )


def _outcome(subject: Subject, strategy: Strategy, world_size: int, global_batch: int) -> dict[str, Any]:
    from atorch.auto.planner.simulate import simulate
    from atorch.auto.planner.stages import ranks_of_stages

    if subject.ctx is None:
        return {"why_not": "there is no model, only its shape"}
    planned = [each.name for each in strategy if not each.can_apply()]
    if planned:
        return {"why_not": f"{', '.join(planned)} can be planned for, and not applied yet"}
    began = time.monotonic()
    try:
        stages = {
            place: simulate(
                subject.ctx, strategy, subject.batch, world_size=world_size, global_batch=global_batch, rank=rank
            )
            for place, rank in ranks_of_stages(strategy, world_size).items()
        }
    except AtorchError as error:
        return {"why_not": str(error)}
    except Exception as error:  # a model may fail on fakes in any way, and the plan stands without
        logger.info("%s cannot be simulated", strategy, exc_info=error)
        return {"why_not": f"the model does not run on fake tensors ({type(error).__name__}: {error})"}
    return {**_fullest(stages), "seconds": time.monotonic() - began}


def _fullest(stages: Mapping[int, Simulated]) -> dict[str, Any]:
    """The stage that holds most, by its place in the pipeline, and what each of them holds."""
    place = max(stages, key=lambda each: stages[each].peak_bytes)
    found = stages[place].to_json_data()
    if len(stages) > 1:
        found["stages"] = [{"stage": each, "peak_bytes": held.peak_bytes} for each, held in stages.items()]
        found["notes"] = [f"on stage {place}, the fullest of {_listed(stages)}", *found["notes"]]
    return found


def _listed(stages: Mapping[int, Simulated]) -> str:
    return ", ".join(f"{place} ({format_bytes(held.peak_bytes)})" for place, held in stages.items())
