"""What the planner expects of pipelines' schedules against torch's own, drawn on a simulated clock."""

from typing import Literal

import pytest

from atorch.cluster.spec import ClusterSpec, DeviceSpec, LinkSpec
from atorch.cost.pipeline_stages import stages_of
from atorch.cost.profile import Matmul, ModelProfile, Segment
from atorch.cost.state import Cost, plain_cost
from atorch.cost.time import step_time
from atorch.report.schedule import Timeline, timeline
from atorch.runtime.pipeline.schedules import order

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULES: list[tuple[Schedule, int]] = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1),
]  # fmt: skip
SIZES = [(2, 4), (4, 8), (4, 32), (8, 16)]


def cost_of(schedule: Schedule, pieces: int, processes: int, micro_batches: int) -> Cost:
    """Equal stages of blocks that are one product each."""
    blocks = processes * pieces
    product = Matmul(rows=1024.0 * micro_batches, inner=1024, columns=1024)
    block = Segment(
        name="block.0", count=blocks, is_block=True, num_params=2.0**20, num_trainable=2.0**20, matmuls=(product,)
    )
    profile = ModelProfile(
        segments=(block,), batch_size=micro_batches, num_params=blocks * 2**20, num_trainable=blocks * 2**20,
        param_bytes=blocks * 2**22, trainable_bytes=blocks * 2**22,
    )  # fmt: skip
    return plain_cost(profile).replace(
        axes={"pipeline": processes},
        stages=processes,
        schedule=schedule,
        interleave=pieces,
        num_micro_batches=float(micro_batches),
    )


def drawn(schedule: Schedule, pieces: int, processes: int, micro_batches: int) -> Timeline:
    return timeline(order(schedule, processes, micro_batches, pieces))


@pytest.mark.parametrize(("schedule", "pieces"), SCHEDULES)
@pytest.mark.parametrize(("processes", "micro_batches"), SIZES)
def test_the_bubble_is_the_drawn_one(schedule: Schedule, pieces: int, processes: int, micro_batches: int) -> None:
    link = LinkSpec(bandwidth=1e18, latency_s=0.0)
    device = DeviceSpec(type="cpu", name="cpu", memory_bytes=2.0**34, peak_flops={"float32": 1e12}, launch_s=0.0)
    cluster = ClusterSpec(device=device, num_nodes=1, devices_per_node=processes, intra_node=link, inter_node=link)
    found = step_time(cost_of(schedule, pieces, processes, micro_batches), cluster)
    expected = found.bubble_s / (found.matmul_s + found.traffic_s + found.bubble_s)
    assert expected == pytest.approx(drawn(schedule, pieces, processes, micro_batches).bubble, rel=0.01)


@pytest.mark.parametrize(("schedule", "pieces"), SCHEDULES)
@pytest.mark.parametrize(("processes", "micro_batches"), SIZES)
def test_stages_hold_activations_of_as_many_micro_batches(
    schedule: Schedule, pieces: int, processes: int, micro_batches: int
) -> None:
    expected = [stage.in_flight for stage in stages_of(cost_of(schedule, pieces, processes, micro_batches))]
    timeline = drawn(schedule, pieces, processes, micro_batches)
    assert expected == [timeline.most_held(process) for process in range(processes)]
