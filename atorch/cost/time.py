"""Seconds of a step: a roofline over operations, launches, the pipeline's bubble, collectives, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from atorch.cluster import ClusterSpec, DeviceSpec
from atorch.cost.collectives import comm_seconds
from atorch.cost.memory import micro_batch_share
from atorch.cost.profile import Segment
from atorch.cost.stages import Stage, stages_of
from atorch.cost.state import Comm, Cost

_DEFAULT_PEAK = 1e11  # FLOP/s of a device that says nothing of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Where a step's seconds go, on a device of the slowest pipeline stage."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    bubble_s: float
    optimizer_s: float
    exposed_comm_s: float
    extra_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageTime:
    """One stage's seconds: of all micro-batches, then of what happens once a step."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    computing_s: float
    block_comm_s: float
    comm_s: float
    optimizer_s: float


def step_time(cost: Cost, cluster: ClusterSpec) -> StepTime:
    """The seconds of one optimizer step.

    Matrix products run at the dtype's peak times the reachable share of it; everything else moves its bytes at the
    memory's bandwidth (Williams, Waterman and Patterson 2009, "Roofline"). A CPU runs an operation after it
    is launched; a GPU while the next ones are, so that the longer of both counts. A pipeline of p stages fills and
    drains while all but one stage wait (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    stages = [_stage_time(cost, stage, cluster) for stage in stages_of(cost)]
    slowest = max(stages, key=lambda each: each.computing_s + each.block_comm_s + each.comm_s + each.optimizer_s)
    bubble = _bubble(cost, stages)
    exposed = slowest.block_comm_s + slowest.comm_s
    return StepTime(
        matmul_s=slowest.matmul_s,
        traffic_s=slowest.traffic_s,
        launch_s=slowest.launch_s,
        bubble_s=bubble,
        optimizer_s=slowest.optimizer_s,
        exposed_comm_s=exposed,
        extra_s=cost.extra_s,
        total_s=slowest.computing_s + bubble + slowest.optimizer_s + exposed + cost.extra_s,
    )


def step_seconds(cost: Cost, cluster: ClusterSpec) -> float:
    """The total of `step_time`."""
    return step_time(cost, cluster).total_s


def _bubble(cost: Cost, stages: list[_StageTime]) -> float:
    """What the slowest stage waits for the first micro-batch to arrive and the last one to return."""
    micro = [(each.computing_s + each.block_comm_s) / cost.num_micro_batches for each in stages]
    filling = sum(micro) - max(micro)
    if cost.schedule == "zero_bubble":
        return (
            filling / 3
        )  # the weights' gradients, a third of the work, fill the gaps: Qi et al. 2023, arXiv 2401.10241
    return filling / cost.interleave


def _stage_time(cost: Cost, stage: Stage, cluster: ClusterSpec) -> _StageTime:
    device = cluster.device
    bandwidth = device.memory_bandwidth * device.efficiency.traffic
    matmul = traffic = launches = 0.0
    for segment, copies in stage.parts:
        again = cost.recompute if segment.is_block else 0.0
        matmul += copies * _matmul_seconds(cost, segment, again, device)
        traffic += copies * _traffic_bytes(cost, segment, again) / bandwidth
        launches += copies * (3.0 + again) * segment.num_ops * cost.ops_scale * device.launch_s
    traffic += _cast_bytes(cost, stage) / bandwidth
    matmul, traffic, launches = (cost.num_micro_batches * each for each in (matmul, traffic, launches))
    computing = max(matmul + traffic, launches) if device.type == "cuda" else matmul + traffic + launches
    blocks, once = _exposed(cost, stage, cluster, computing)
    return _StageTime(
        matmul_s=matmul,
        traffic_s=traffic,
        launch_s=launches,
        computing_s=computing,
        block_comm_s=blocks,
        comm_s=once,
        optimizer_s=_optimizer_bytes(cost, stage) / bandwidth,
    )


def _tokens_share(cost: Cost) -> float:
    """What a micro-batch of one device is of the traced batch, tokens split over sequence and context axes."""
    return micro_batch_share(cost) / (cost.sequence * cost.context)


def _matmul_seconds(cost: Cost, segment: Segment, again: float, device: DeviceSpec) -> float:
    """Forward, backward and recomputation of one copy's products and attention, for a micro-batch.

    Backward multiplies every matrix twice where forward did once, for the gradients of its input and of its weight;
    frozen weights need the first alone (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). Attention that does not
    keep its scores recomputes them: five products in backward for two in forward (Dao et al. 2022, arXiv 2205.14135).
    """
    share, peak, reached = _tokens_share(cost), _peak_flops(device, cost.dtype), device.efficiency
    seconds = 0.0
    for each in segment.matmuls:
        flops = share * each.flops / each.count / (cost.tensor if each.split != "none" else 1)
        passes = (3.0 if each.trainable else 2.0) + again
        seconds += each.count * passes * flops / (peak * reached.matmul_share(flops))
    attention = share * segment.attention_flops * (3.5 + again) / cost.tensor
    return seconds + attention / (peak * reached.attention)


def _traffic_bytes(cost: Cost, segment: Segment, again: float) -> float:
    """Bytes that one copy's other operations move for a micro-batch; backward moves about twice what forward does."""
    norms = cost.tensor if cost.splits_norms else 1
    forward = segment.inside.traffic_bytes / cost.tensor + segment.outside.traffic_bytes / norms
    return _tokens_share(cost) * cost.traffic_scale * forward * (3.0 + again)


def _cast_bytes(cost: Cost, stage: Stage) -> float:
    params = sum(copies * cost.local_params(segment) for segment, copies in stage.parts)
    trainable = sum(copies * cost.local_trainable(segment) for segment, copies in stage.parts)
    accumulated = 3.0 * trainable * cost.grad_itemsize * (cost.num_micro_batches - 1) / cost.num_micro_batches
    return params * cost.cast_traffic_bytes + accumulated


def _optimizer_bytes(cost: Cost, stage: Stage) -> float:
    """Parameters, gradients and state are read; parameters and state are written."""
    trainable = sum(copies * cost.local_trainable(segment) for segment, copies in stage.parts)
    each = 2.0 * (cost.param_itemsize + cost.optim_itemsize + cost.master_itemsize) + cost.grad_itemsize
    return trainable * each / cost.optim_shards


def _exposed(cost: Cost, stage: Stage, cluster: ClusterSpec, computing: float) -> tuple[float, float]:
    """Seconds of communication that nothing hides: of the blocks, and of what happens once a step.

    Of each collective the share that `overlap` names hides behind computation, as far as there is any: backward is two
    thirds of it, and that is what gradients' communication can hide behind.
    """
    of_blocks = of_step = hidden = 0.0
    for comm in cost.comm:
        times = cost.num_micro_batches if comm.each_micro_batch else 1.0
        seconds = times * _share(cost, stage, comm) * comm_seconds(comm, cost.axes, cluster)
        hidden += comm.overlap * seconds
        if comm.scales_with == "blocks":
            of_blocks += (1.0 - comm.overlap) * seconds
        else:
            of_step += (1.0 - comm.overlap) * seconds
    return of_blocks, of_step + max(0.0, hidden - computing * 2 / 3)


def _share(cost: Cost, stage: Stage, comm: Comm) -> float:
    """The stage's part of a message of the whole model."""
    if cost.stages == 1:
        return 1.0
    if comm.scales_with == "blocks":
        return stage.num_blocks / max(1, cost.num_blocks)
    return sum(copies * cost.local_params(segment) for segment, copies in stage.parts) / cost.num_params


def _peak_flops(device: DeviceSpec, dtype: str) -> float:
    """FLOP/s of a dtype; one that the device does not list runs as fp32 does."""
    return device.peak_flops.get(dtype) or device.peak_flops.get("float32") or _DEFAULT_PEAK
