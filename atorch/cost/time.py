"""Seconds of a step: what each pipeline stage computes and sends for a micro-batch, the bubble, and the step's end."""

from __future__ import annotations

from typing import NamedTuple

from atorch.cluster import ClusterSpec
from atorch.cost.collectives import Group, comm_seconds, group_of, group_of_neighbours, rounds_of
from atorch.cost.communication import EXPERT_AXIS, boundary_bytes, of_copy
from atorch.cost.memory import uses_host
from atorch.cost.offload import host_seconds
from atorch.cost.operations import seconds_of_copy
from atorch.cost.profile import Segment
from atorch.cost.stages import Parts, heaviest_stages, parts_of_stages
from atorch.cost.state import Comm, Cost

BACKWARD = 2 / 3  # of computing, the share that is in backward
SHARPNESS = 6.0  # of the knee between being bound by launches and by work: where both are alike, neither hides all
COLLECTIVE_LAUNCHES = 1.5  # a collective is launched as slowly as so many other operations
SEND_LAUNCHES = 12.0  # as many operations' launches are lost where a stage waits for what a neighbour sends


class StepTime(NamedTuple):
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


class _Copy(NamedTuple):
    """One copy of a segment for a micro-batch: what it computes, and what it sends that nothing or computing hides."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    exposed_s: float
    hidden_s: float
    params: float
    trainable: float


class _MicroBatch(NamedTuple):
    """A stage's seconds for one micro-batch, forward and backward, and its elements."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    computing_s: float
    exposed_s: float
    total_s: float
    params: float
    trainable: float


class _Whole(NamedTuple):
    """What stages have shares of: elements, blocks, and seconds of what the whole model sends besides its splits.

    Nothing hides the first of two, computing can hide the second.
    """

    num_params: float
    num_blocks: int
    once: tuple[float, float]
    by_parameters: tuple[float, float]  # in every micro-batch
    by_blocks: tuple[float, float]  # in every micro-batch


def step_time(cost: Cost, cluster: ClusterSpec) -> StepTime:
    """The seconds of one optimizer step.

    A pipeline of p stages is filled and drained while all but one stage wait (Narayanan et al. 2021, arXiv 2104.04473,
    section 2.2); in between, the slowest stage sets the pace, and waits for what its neighbours send.
    """
    whole = _whole(cost, cluster)
    micro = _micro_batches(cost, whole, cluster)
    slowest = max(micro, key=lambda each: each.total_s)
    times, sending = cost.num_micro_batches, _sending_seconds(cost, cluster)
    bubble = _bubble(cost, micro, slowest) + 2.0 * (cost.stages - 1) * sending
    once, optimizer = _ending(cost, micro, whole, cluster)
    exposed = times * slowest.exposed_s + 2.0 * (times - 1.0) * cost.interleave * sending + once
    offload = 0.0
    if uses_host(cost):
        computing = ((stage, times * micro[stage.index].computing_s) for stage in heaviest_stages(cost))
        offload = max(host_seconds(cost, stage, cluster, seconds) for stage, seconds in computing)
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


def _whole(cost: Cost, cluster: ClusterSpec) -> _Whole:
    once, by_parameters, by_blocks = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for comm in cost.comm:
        seconds = comm_seconds(comm, cost.axes, cluster)
        if comm.each_micro_batch:
            into = by_parameters if comm.scales_with == "parameters" else by_blocks
        elif comm.scales_with == "blocks":
            into, seconds = by_blocks, seconds / cost.num_micro_batches
        else:
            into = once
        into[0] += (1.0 - comm.overlap) * seconds
        into[1] += comm.overlap * seconds
    return _Whole(
        num_params=cost.num_params,
        num_blocks=max(1, cost.num_blocks),
        once=(once[0], once[1]),
        by_parameters=(by_parameters[0], by_parameters[1]),
        by_blocks=(by_blocks[0], by_blocks[1]),
    )


def _micro_batches(cost: Cost, whole: _Whole, cluster: ClusterSpec) -> list[_MicroBatch]:
    """Every stage's; of stages with equal parts the same."""
    waiting = _waiting_seconds(cost, cluster)
    copies: dict[int, _Copy] = {}
    groups: dict[tuple[str, ...], Group] = {}
    known: dict[int, _MicroBatch] = {}
    stages = parts_of_stages(cost)
    for parts in stages:
        if id(parts) not in known:
            for segment, _ in parts:
                if id(segment) not in copies:
                    copies[id(segment)] = _of_copy(cost, segment, waiting, groups, cluster)
            known[id(parts)] = _micro_batch(cost, parts, copies, whole, cluster)
    return [known[id(parts)] for parts in stages]


def _of_copy(
    cost: Cost, segment: Segment, waiting_s: float, groups: dict[tuple[str, ...], Group], cluster: ClusterSpec
) -> _Copy:
    computed, exposed, hidden = seconds_of_copy(cost, segment, cluster.device), 0.0, 0.0
    launch, launching = computed.launch_s, COLLECTIVE_LAUNCHES * cost.ops_scale * cluster.device.launch_s
    for comm in of_copy(cost, segment):
        if comm.axis not in groups:
            groups[comm.axis] = _group(cost, comm, cluster)
        group = groups[comm.axis]
        seconds = group.seconds(comm.kind, comm.count, comm.num_bytes)
        exposed += (1.0 - comm.overlap) * seconds
        hidden += comm.overlap * seconds
        launch += comm.count * (launching + waiting_s * rounds_of(comm.kind) * (group.size - 1))
    return _Copy(
        matmul_s=computed.matmul_s,
        traffic_s=computed.traffic_s,
        launch_s=launch,
        exposed_s=exposed,
        hidden_s=hidden,
        params=cost.local_params(segment),
        trainable=cost.local_trainable(segment),
    )


def _waiting_seconds(cost: Cost, cluster: ClusterSpec) -> float:
    """What a hop of a collective takes longer to start, in a pipeline whose stages send from node to node."""
    if not cost.hop_wait_s or cost.stages == 1 or group_of(("pipeline",), cost.axes, cluster).num_nodes == 1:
        return 0.0
    return cost.hop_wait_s


def _group(cost: Cost, comm: Comm, cluster: ClusterSpec) -> Group:
    if comm.axis == (EXPERT_AXIS,):
        return group_of_neighbours(cost.expert, cluster, cost.tensor)
    return group_of(comm.axis, cost.axes, cluster)


def _micro_batch(
    cost: Cost, parts: Parts, copies: dict[int, _Copy], whole: _Whole, cluster: ClusterSpec
) -> _MicroBatch:
    """A GPU runs an operation while the next ones are launched, so that the longer of both counts; a CPU does not."""
    matmul = traffic = launch = exposed = hidden = params = trainable = blocks = 0.0
    for segment, count in parts:
        copy = copies[id(segment)]
        matmul += count * copy.matmul_s
        traffic += count * copy.traffic_s
        launch += count * copy.launch_s
        exposed += count * copy.exposed_s
        hidden += count * copy.hidden_s
        params += count * copy.params
        trainable += count * copy.trainable
        blocks += count if segment.is_block else 0.0
    traffic += _cast_bytes(cost, params, trainable) / reached_bandwidth(cluster)
    if cost.stages > 1:  # activations and gradients, to and from neighbours
        launch += 4.0 * cost.interleave * SEND_LAUNCHES * cost.ops_scale * cluster.device.launch_s
    of_parameters, of_blocks = (params / whole.num_params, blocks / whole.num_blocks) if cost.stages > 1 else (1.0, 1.0)
    exposed += of_parameters * whole.by_parameters[0] + of_blocks * whole.by_blocks[0]
    hidden += of_parameters * whole.by_parameters[1] + of_blocks * whole.by_blocks[1]
    if cluster.device.type != "cuda":
        exposed += max(0.0, hidden - matmul - traffic - launch)
        total = matmul + traffic + launch + exposed
    else:
        exposed += max(0.0, hidden - matmul - traffic)
        total = ((matmul + traffic + exposed) ** SHARPNESS + launch**SHARPNESS) ** (1 / SHARPNESS)
    return _MicroBatch(matmul, traffic, launch, total - exposed, exposed, total, params, trainable)


def reached_bandwidth(cluster: ClusterSpec) -> float:
    """Bytes a second that operations move which do little else."""
    return cluster.device.memory_bandwidth * cluster.device.efficiency.traffic


def _cast_bytes(cost: Cost, params: float, trainable: float) -> float:
    """Weights that are cast, and gradients that are added to those of earlier micro-batches."""
    accumulated = 3.0 * trainable * cost.grad_itemsize * (1.0 - 1.0 / cost.num_micro_batches)
    return params * cost.cast_traffic_bytes + accumulated


def _bubble(cost: Cost, micro: list[_MicroBatch], slowest: _MicroBatch) -> float:
    """What the slowest stage waits for the first micro-batch to arrive and the last one to return."""
    filling = sum(each.total_s for each in micro) - slowest.total_s
    if cost.schedule == "zero_bubble":
        return filling / 3  # the weights' gradients, a third of the work, fill gaps: Qi et al. 2023, arXiv 2401.10241
    return filling / cost.interleave


def _sending_seconds(cost: Cost, cluster: ClusterSpec) -> float:
    """Of one micro-batch's activations from a stage to the next."""
    if cost.stages == 1:
        return 0.0
    return group_of(("pipeline",), cost.axes, cluster).seconds("send", 1.0, boundary_bytes(cost))


def _ending(cost: Cost, micro: list[_MicroBatch], whole: _Whole, cluster: ClusterSpec) -> tuple[float, float]:
    """Seconds of communication, then of the optimizer, that end the step on the stage that is done last.

    What can overlap hides behind the backward of the last micro-batch. Later stages are done with theirs earlier, while
    the first ones still wait for gradients.
    """
    optimizer_s = _optimizer_bytes(cost) / reached_bandwidth(cluster)
    waited, last, longest = 0.0, (0.0, 0.0), 0.0
    for stage in micro:
        share = stage.params / whole.num_params if cost.stages > 1 else 1.0
        backward = BACKWARD * stage.total_s
        exposed = share * whole.once[0] + max(0.0, share * whole.once[1] - backward)
        optimizer = stage.trainable * optimizer_s
        if exposed + optimizer - waited > longest:
            last = max(0.0, exposed - waited), optimizer
            longest = last[0] + last[1]
        waited += backward
    return last


def _optimizer_bytes(cost: Cost) -> float:
    """Of one element: parameters, gradients and state are read; parameters and state are written."""
    moved = 2.0 * (cost.param_itemsize + cost.optim_itemsize + cost.master_itemsize) + cost.grad_itemsize
    return moved / cost.optim_shards
