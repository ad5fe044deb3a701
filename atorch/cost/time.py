"""Seconds of a step: a roofline over matrix products and memory traffic, launches, collectives, and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from atorch.cluster import ClusterSpec, DeviceSpec, LinkSpec
from atorch.cost.collectives import collective_seconds
from atorch.cost.state import Cost

_DEFAULT_PEAK = 1e11  # FLOP/s of a device that says nothing of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Where a step's seconds go, on one device."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    optimizer_s: float
    exposed_comm_s: float
    extra_s: float
    total_s: float


def step_time(cost: Cost, cluster: ClusterSpec) -> StepTime:
    """The seconds of one optimizer step.

    Matrix products run at the dtype's peak times the reachable share of it; everything else moves its bytes at the
    memory's bandwidth (Williams, Waterman and Patterson 2009, "Roofline"). A CPU runs an operation after it
    is launched; a GPU while the next ones are, so that the longer of both counts. Of each collective the share that
    `overlap` names hides behind computation, as far as there is any.
    """
    device = cluster.device
    matmul = (cost.matmul_flops + cost.attention_flops) / _reached_flops(device, cost.dtype)
    traffic = cost.traffic_bytes / device.memory_bandwidth
    launches = cost.num_ops * device.launch_s
    busy = matmul + traffic
    computing = max(busy, launches) if device.type == "cuda" else busy + launches
    optimizer = cost.optim_traffic_bytes / device.memory_bandwidth
    hidden, exposed = 0.0, 0.0
    for comm in cost.comm:
        link = _link(cluster, cost.size(*comm.axis))
        seconds = collective_seconds(comm, cost.size(*comm.axis), link.bandwidth, link.latency_s)
        hidden += comm.overlap * seconds
        exposed += (1.0 - comm.overlap) * seconds
    # Backward is two thirds of the computation, and that is what gradients' communication can hide behind.
    exposed += max(0.0, hidden - computing * 2 / 3)
    return StepTime(
        matmul_s=matmul,
        traffic_s=traffic,
        launch_s=launches,
        optimizer_s=optimizer,
        exposed_comm_s=exposed,
        extra_s=cost.extra_s,
        total_s=computing + optimizer + exposed + cost.extra_s,
    )


def step_seconds(cost: Cost, cluster: ClusterSpec) -> float:
    """The total of `step_time`."""
    return step_time(cost, cluster).total_s


def _reached_flops(device: DeviceSpec, dtype: str) -> float:
    """FLOP/s of a dtype; one that the device does not list runs as fp32 does."""
    peak = device.peak_flops.get(dtype) or device.peak_flops.get("float32") or _DEFAULT_PEAK
    return peak * device.matmul_efficiency


def _link(cluster: ClusterSpec, num_ranks: int) -> LinkSpec:
    """The slowest link in a group: groups larger than a node cross nodes."""
    return cluster.intra_node if num_ranks <= cluster.devices_per_node else cluster.inter_node
