"""The best of a plan simulated: methods applied for real to fake tensors on a fake world of the cluster's size.

Simulation counts what the estimate computes. It needs a model that was traced and methods that can be applied; where it
cannot be, the reason stands in its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atorch.auto.strategy import Strategy
from atorch.errors import AtorchError
from atorch.logs import logger

if TYPE_CHECKING:
    from atorch.auto.offline import Subject


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

    if subject.ctx is None:
        return {"why_not": "there is no model, only its shape"}
    planned = [each.name for each in strategy if not each.can_apply()]
    if planned:
        return {"why_not": f"{', '.join(planned)} can be planned for, and not applied yet"}
    began = time.monotonic()
    try:
        found = simulate(subject.ctx, strategy, subject.batch, world_size=world_size, global_batch=global_batch)
    except AtorchError as error:
        return {"why_not": str(error)}
    except Exception as error:  # a model may fail on fakes in any way, and the plan stands without
        logger.info("%s cannot be simulated", strategy, exc_info=error)
        return {"why_not": f"the model does not run on fake tensors ({type(error).__name__}: {error})"}
    return {**found.to_json_data(), "seconds": time.monotonic() - began}
