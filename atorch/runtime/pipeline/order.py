"""What each process of a pipeline computes in a step, in order, as torch's own schedule has it done.

The schedule is the very object that trains, and its own step is run: on stages that compute, send and receive nothing,
and note what they are asked for. So nobody needs other processes to see it, and it cannot differ from what happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from atorch.errors import StrategyError
from atorch.runtime.pipeline.schedules import make_schedule, stages_of


class Pass(NamedTuple):
    """One micro-batch through one stage: forward, backward, or backward for inputs and for weights alone."""

    kind: Literal["forward", "backward", "input", "weight"]
    stage: int
    micro_batch: int


def order(schedule: str, processes: int, micro_batches: int, pieces: int = 1) -> list[list[Pass]]:
    """The passes of each process under the schedule of that name, with `pieces` stages on each process.

    Raises:
        StrategyError: torch's schedule does not take so many micro-batches.
    """
    done: list[list[Pass]] = []
    for place in range(processes):
        noted: list[Pass] = []
        held = stages_of(place, processes, pieces)
        stages: Sequence[Any] = [_Noting(stage, processes * pieces, place, processes, noted) for stage in held]
        try:
            made = make_schedule(schedule, stages, micro_batches, train=True)
        except ValueError as error:
            raise StrategyError(
                f"{micro_batches} micro-batches do not go with the schedule {schedule} on {processes} processes; give "
                f"a multiple of {processes} (torch: {error})"
            ) from error
        made.step(target=torch.zeros(micro_batches), return_outputs=False)
        done.append(noted)
    return done


@dataclass(eq=False)
class _Noting:
    """Stands where a schedule has a stage."""

    stage_index: int
    num_stages: int
    group_rank: int
    group_size: int
    noted: list[Pass]
    device: str = "cpu"
    submod: None = None
    has_backward: bool = True

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.noted.append(Pass("forward", self.stage_index, micro_batch))
        return torch.zeros(())

    def backward_one_chunk(self, micro_batch: int, *, full_backward: bool = True, **kwargs: Any) -> None:
        self.noted.append(Pass("backward" if full_backward else "input", self.stage_index, micro_batch))

    def backward_weight_one_chunk(self, micro_batch: int, **kwargs: Any) -> None:
        self.noted.append(Pass("weight", self.stage_index, micro_batch))

    @property
    def args_recv_info(self) -> dict[int, tuple[Any, ...]]:
        return {0: ()}

    @property
    def act_send_info(self) -> dict[int, list[int]]:
        return {}

    def _nothing_to_send(self, *args: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing_to_send
    _get_init_p2p_neighbors_ops = _nothing_to_send

    def _nothing_to_do(self, *args: Any, **kwargs: Any) -> None:
        return None

    _prepare_forward_infra = _prepare_backward_infra = _nothing_to_do
    set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = _nothing_to_do
    clear_runtime_states = perform_reduce_grad = _nothing_to_do
