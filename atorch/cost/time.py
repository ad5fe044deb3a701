"""Seconds of a step: what each pipeline stage computes and sends for a micro-batch, the bubble, and the step's end."""

from __future__ import annotations

from dataclasses import dataclass

from atorch.cluster import ClusterSpec
from atorch.cost.collectives import Group, comm_seconds, group_of, group_of_neighbours
from atorch.cost.communication import EXPERT_AXIS, boundary_bytes, of_copy
from atorch.cost.offload import host_seconds
from atorch.cost.operations import Computed, seconds_of_copy
from atorch.cost.profile import Segment
from atorch.cost.stages import Stage, stages_of
from atorch.cost.state import Comm, Cost

BACKWARD = 2 / 3  # of computing, the share that is in backward
SHARPNESS = 6.0  # of the knee between being bound by launches and by work: where both are alike, neither hides all
COLLECTIVE_LAUNCHES = 4.0  # a collective is launched as slowly as so many other operations


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Where a step's seconds go, on a device of the slowest pipeline stage."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    bubble_s: float
    optimizer_s: float
    exposed_comm_s: float
    offload_s: float
    extra_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """A stage's seconds for one micro-batch, forward and backward."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    computing_s: float
    comm_s: float  # not hidden

    @property
    def total_s(self) -> float:
        return self.computing_s + self.comm_s


def step_time(cost: Cost, cluster: ClusterSpec) -> StepTime:
    """The seconds of one optimizer step.

    A pipeline of p stages is filled and drained while all but one stage wait (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2); in between, the slowest stage sets the pace, and waits for what its neighbours send.
    """
    stages = stages_of(cost)
    segments = {id(segment): segment for stage in stages for segment, _ in stage.parts}
    copies = {key: _of_copy(cost, segment, cluster) for key, segment in segments.items()}
    micro = [_micro_batch(cost, stage, copies, cluster) for stage in stages]
    slowest = max(micro, key=lambda each: each.total_s)
    times, sending = cost.num_micro_batches, _sending_seconds(cost, cluster)
    bubble = _bubble(cost, micro) + 2.0 * (cost.stages - 1) * sending
    once, optimizer = _ending(cost, stages, micro, cluster)
    offload = max(
        host_seconds(cost, stage, cluster, times * each.computing_s) for stage, each in zip(stages, micro, strict=True)
    )
    exposed = times * slowest.comm_s + 2.0 * (times - 1.0) * cost.interleave * sending + once
    return StepTime(
        matmul_s=times * slowest.matmul_s,
        traffic_s=times * slowest.traffic_s,
        launch_s=times * slowest.launch_s,
        bubble_s=bubble,
        optimizer_s=optimizer,
        exposed_comm_s=exposed,
        offload_s=offload,
        extra_s=cost.extra_s,
        total_s=times * slowest.computing_s + bubble + optimizer + exposed + offload + cost.extra_s,
    )


def step_seconds(cost: Cost, cluster: ClusterSpec) -> float:
    """The total of `step_time`."""
    return step_time(cost, cluster).total_s


def _of_copy(cost: Cost, segment: Segment, cluster: ClusterSpec) -> tuple[Computed, float, float]:
    """What one copy computes; seconds of what it sends that nothing hides, and of what computing can hide."""
    computed = seconds_of_copy(cost, segment, cluster.device)
    exposed = hidden = calls = 0.0
    for comm in of_copy(cost, segment):
        seconds = _group(cost, comm, cluster).seconds(comm.kind, comm.count, comm.num_bytes)
        exposed += (1.0 - comm.overlap) * seconds
        hidden += comm.overlap * seconds
        calls += comm.count
    launch = computed.launch_s + calls * COLLECTIVE_LAUNCHES * cluster.device.launch_s
    return Computed(computed.matmul_s, computed.traffic_s, launch), exposed, hidden


def _group(cost: Cost, comm: Comm, cluster: ClusterSpec) -> Group:
    if comm.axis == (EXPERT_AXIS,):
        return group_of_neighbours(cost.expert, cluster, cost.tensor)
    return group_of(comm.axis, cost.axes, cluster)


def _micro_batch(
    cost: Cost, stage: Stage, copies: dict[int, tuple[Computed, float, float]], cluster: ClusterSpec
) -> _MicroBatch:
    """A GPU runs an operation while the next ones are launched, so that the longer of both counts; a CPU does not."""
    device = cluster.device
    matmul = traffic = launch = exposed = hidden = 0.0
    for segment, count in stage.parts:
        computed, shown, behind = copies[id(segment)]
        matmul += count * computed.matmul_s
        traffic += count * computed.traffic_s
        launch += count * computed.launch_s
        exposed += count * shown
        hidden += count * behind
    traffic += _cast_bytes(cost, stage) / (device.memory_bandwidth * device.efficiency.traffic)
    for comm in cost.comm:
        if comm.each_micro_batch or comm.scales_with == "blocks":
            share = 1.0 if comm.each_micro_batch else 1.0 / cost.num_micro_batches
            seconds = share * _share(cost, stage, comm) * comm_seconds(comm, cost.axes, cluster)
            exposed += (1.0 - comm.overlap) * seconds
            hidden += comm.overlap * seconds
    if device.type != "cuda":
        computing = matmul + traffic + launch
        return _MicroBatch(matmul, traffic, launch, computing, exposed + max(0.0, hidden - computing))
    working = matmul + traffic
    exposed += max(0.0, hidden - working)
    busy = working + exposed
    total = (busy**SHARPNESS + launch**SHARPNESS) ** (1 / SHARPNESS)
    return _MicroBatch(matmul, traffic, launch, total - exposed, exposed)


def _cast_bytes(cost: Cost, stage: Stage) -> float:
    """Weights that are cast, and gradients that are added to those of earlier micro-batches."""
    params = sum(copies * cost.local_params(segment) for segment, copies in stage.parts)
    trainable = sum(copies * cost.local_trainable(segment) for segment, copies in stage.parts)
    accumulated = 3.0 * trainable * cost.grad_itemsize * (1.0 - 1.0 / cost.num_micro_batches)
    return params * cost.cast_traffic_bytes + accumulated


def _bubble(cost: Cost, micro: list[_MicroBatch]) -> float:
    """What the slowest stage waits for the first micro-batch to arrive and the last one to return."""
    filling = sum(each.total_s for each in micro) - max(each.total_s for each in micro)
    if cost.schedule == "zero_bubble":
        return filling / 3  # the weights' gradients, a third of the work, fill gaps: Qi et al. 2023, arXiv 2401.10241
    return filling / cost.interleave


def _sending_seconds(cost: Cost, cluster: ClusterSpec) -> float:
    """Of one micro-batch's activations from a stage to the next."""
    if cost.stages == 1:
        return 0.0
    group = group_of(("pipeline",), cost.axes, cluster)
    return group.seconds("send", 1.0, boundary_bytes(cost))


def _ending(
    cost: Cost, stages: tuple[Stage, ...], micro: list[_MicroBatch], cluster: ClusterSpec
) -> tuple[float, float]:
    """Seconds of communication, then of the optimizer, that end the step on the stage that is done last.

    What can overlap hides behind the backward of the last micro-batch. Later stages are done with theirs earlier, while
    the first ones still wait for gradients.
    """
    device = cluster.device
    bandwidth = device.memory_bandwidth * device.efficiency.traffic
    waited, last = 0.0, (0.0, 0.0)
    for stage, each in zip(stages, micro, strict=True):
        exposed = hidden = 0.0
        for comm in cost.comm:
            if not comm.each_micro_batch and comm.scales_with == "parameters":
                seconds = _share(cost, stage, comm) * comm_seconds(comm, cost.axes, cluster)
                exposed += (1.0 - comm.overlap) * seconds
                hidden += comm.overlap * seconds
        exposed += max(0.0, hidden - BACKWARD * each.total_s)
        optimizer = _optimizer_bytes(cost, stage) / bandwidth
        if exposed + optimizer - waited > sum(last):
            last = (max(0.0, exposed - waited), optimizer)
        waited += BACKWARD * each.total_s
    return last


def _optimizer_bytes(cost: Cost, stage: Stage) -> float:
    """Parameters, gradients and state are read; parameters and state are written."""
    trainable = sum(copies * cost.local_trainable(segment) for segment, copies in stage.parts)
    each = 2.0 * (cost.param_itemsize + cost.optim_itemsize + cost.master_itemsize) + cost.grad_itemsize
    return trainable * each / cost.optim_shards


def _share(cost: Cost, stage: Stage, comm: Comm) -> float:
    """The stage's part of a message of the whole model."""
    if cost.stages == 1:
        return 1.0
    if comm.scales_with == "blocks":
        return stage.num_blocks / max(1, cost.num_blocks)
    return sum(copies * cost.local_params(segment) for segment, copies in stage.parts) / cost.num_params
