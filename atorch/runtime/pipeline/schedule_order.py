"""The passes of each process of a pipeline in a step, in the order of torch's schedule.

Creates the schedule used in training for empty stages, and reads its plan (`pipeline_order`). This needs no other
processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from atorch.errors import StrategyError
from atorch.runtime.pipeline.schedules import make_schedule, stages_of

PassKind = Literal["forward", "backward", "input", "weight"]

KINDS: Mapping[str, PassKind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
}
"""Torch's names of the kinds of passes; its plan also has other actions, such as reductions of gradients."""


class StagePass(NamedTuple):
    """One pass of one micro-batch through one stage: forward, backward, or backward of only inputs or weights."""

    kind: PassKind
    stage: int
    micro_batch: int


def order(schedule: str, processes: int, micro_batches: int, pieces: int = 1) -> list[list[StagePass]]:
    """The passes of each process under the schedule of that name, with `pieces` stages on each process.

    Raises:
        StrategyError: torch's schedule does not accept this number of micro-batches.
    """
    indices = stages_of(0, processes, pieces)
    stages: Sequence[Any] = [_Hollow(index, processes * pieces, processes) for index in indices]
    try:
        plan = make_schedule(schedule, stages, micro_batches, train=True).pipeline_order
    except ValueError as error:
        raise StrategyError(
            f"{micro_batches} micro-batches do not go with the schedule {schedule} on {processes} processes; give "
            f"a multiple of {processes} (torch: {error})"
        ) from error
    return [_numbered(plan[place]) for place in range(processes)]


def _numbered(actions: Sequence[Any]) -> list[StagePass]:
    """Number micro-batches by their order in each stage: under 1f1b torch numbers those of the last differently."""
    done: Counter[tuple[PassKind, int]] = Counter()
    passes = []
    for action in actions:
        if action is None or action.computation_type.name not in KINDS:  # idle, or no pass
            continue
        key = KINDS[action.computation_type.name], action.stage_index
        passes.append(StagePass(*key, done[key]))
        done[key] += 1
    return passes


@dataclass(eq=False)
class _Hollow:
    """Replaces a stage of the first process in a schedule."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
