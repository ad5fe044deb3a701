"""Scores compositions: estimates of seconds and bytes by arithmetic, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping

from atorch.auto.planner.plan import Estimate
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, StepTime, StepTimes, peak_memory
from atorch.cost.memory import RESERVE
from atorch.cost.parallelism import BATCH_AXES
from atorch.units import format_bytes

_SIXTEEN_BITS = ("bfloat16", "float16", "float32")  # MFU is a share of the peak of the first that a device has


def useful_flops(cost: Cost) -> float:
    """FLOPs of a step on all devices together: forward once and backward once, without recomputation.

    For every product of forward, backward has two, or one if the weight is frozen; attention also has two. Causal
    attention computes half of the scores (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, counts all of them).
    """
    samples = cost.batch_size * cost.size(*BATCH_AXES) / cost.traced_batch
    return samples * sum(
        segment.count
        * (
            sum(product.flops * (3 if product.trainable else 2) for product in segment.matmuls)
            + 3 * segment.attention_flops
        )
        for segment in cost.segments
    )


def utilisation_peak(peak_flops: Mapping[str, float]) -> float:
    """A device's dense FLOP/s in 16 bits, the base of MFU, or in fp32 if it has no others; 0: unknown."""
    return next((peak_flops[name] for name in _SIXTEEN_BITS if name in peak_flops), 0.0)


def estimate_of(cost: Cost, cluster: ClusterSpec, times: StepTimes | None = None) -> Estimate:
    """The estimate of the seconds and bytes of a step; `times` caches common terms of many estimates.

    The uncertainty of the seconds takes several times as long to compute: see `uncertainty`.
    """
    memory, spent = peak_memory(cost), (times or StepTimes(cluster)).of(cost)
    rate = cost.batch_size * cost.size(*BATCH_AXES) / spent.total_s if spent.total_s else 0.0
    flops = useful_flops(cost) / (spent.total_s * cluster.world_size) if spent.total_s else None
    peak = utilisation_peak(cluster.device.peak_flops)
    length = max((segment.sequence_length for segment in cost.segments), default=0)
    return Estimate(
        step_s=spent.total_s,
        peak_bytes=memory.total,
        reserve_bytes=memory.needed - memory.total,
        memory={name: held for name, held in memory.by_category().items() if name != "slack"},
        stage=memory.stage,
        on_host_bytes=memory.on_host,
        time=_by_category(spent),
        samples_per_s=rate,
        tokens_per_s=rate * length if length else None,
        flops_per_s=flops,
        mfu=flops / peak if flops and peak else None,
    )


def _by_category(spent: StepTime) -> dict[str, float]:
    """Seconds by category, the largest first. Launches count only the part that work does not hide."""
    named = {name.removesuffix("_s"): getattr(spent, name) for name in StepTime._fields if name != "total_s"}
    named["launch"] = max(0.0, spent.total_s - sum(named.values()) + named["launch"])
    return {name: value for name, value in sorted(named.items(), key=lambda item: -item[1]) if value > 0}


def usable_bytes(cluster: ClusterSpec, reserve: float = RESERVE) -> float:
    return cluster.device.memory_bytes * (1 - reserve)


def usable_host_bytes(cluster: ClusterSpec, reserve: float = RESERVE) -> float:
    return cluster.host_memory_bytes / cluster.devices_per_node * (1 - reserve)


def needs(estimate: Estimate, limit: float) -> str:
    """The reason why an estimate does not fit: the missing bytes, and the largest categories."""
    most = ", ".join(f"{name} {format_bytes(held)}" for name, held in list(estimate.memory.items())[:3])
    short, stage = format_bytes(estimate.needed_bytes - limit), f" on stage {estimate.stage}" if estimate.stage else ""
    return f"is {short} short{stage} of the {format_bytes(estimate.needed_bytes)} that it needs: {most}"
