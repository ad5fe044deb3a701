"""Scores compositions: what arithmetic says of each, and whether that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from atorch.auto.planner.plan import Estimate, Rejected
from atorch.auto.planner.search.space import SearchNode
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, StepTime, StepTimes, peak_memory
from atorch.cost.memory import RESERVE
from atorch.cost.parallelism import SAMPLE_AXES
from atorch.units import format_bytes

_SIXTEEN_BITS = ("bfloat16", "float16", "float32")  # the first that a device has is what MFU is a share of


def useful_flops(cost: Cost) -> float:
    """FLOPs of a step on all devices together: forward once and backward once, nothing that runs again.

    Backward has two products for each of forward, one where the weight is frozen, and two for attention, of which a
    causal one computes half of the scores (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, which counts them all).
    """
    samples = cost.batch_size * cost.size(*SAMPLE_AXES) / cost.traced_batch
    return samples * sum(
        each.count
        * (sum(product.flops * (3 if product.trainable else 2) for product in each.matmuls) + 3 * each.attention_flops)
        for each in cost.segments
    )


def utilisation_peak(peak_flops: Mapping[str, float]) -> float:
    """A device's dense FLOP/s in 16 bits, of which MFU is a share, or in fp32 where it has no others; 0: unknown."""
    return next((peak_flops[name] for name in _SIXTEEN_BITS if name in peak_flops), 0.0)


@dataclass(frozen=True)
class Scored:
    """A composition with what arithmetic says of it."""

    strategy: Strategy
    estimate: Estimate


def scored(leaves: Iterable[SearchNode], cluster: ClusterSpec) -> list[Scored]:
    return fastest_first(Scored(Strategy(leaf.methods), estimate_of(leaf.cost, cluster)) for leaf in leaves)


def fastest_first(found: Iterable[Scored]) -> list[Scored]:
    return sorted(found, key=lambda each: (each.estimate.step_s, each.estimate.peak_bytes, str(each.strategy)))


def estimate_of(cost: Cost, cluster: ClusterSpec, times: StepTimes | None = None) -> Estimate:
    """The seconds and bytes of a step; `times`, where many are asked for, keeps what they have in common.

    How far off the seconds may be takes several times as long to tell: `doubt`.
    """
    memory, spent = peak_memory(cost), (times or StepTimes(cluster)).of(cost)
    rate = cost.batch_size * cost.size(*SAMPLE_AXES) / spent.total_s if spent.total_s else 0.0
    flops = useful_flops(cost) / (spent.total_s * cluster.world_size) if spent.total_s else None
    peak = utilisation_peak(cluster.device.peak_flops)
    length = max((each.sequence_length for each in cost.segments), default=0)
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
    """Seconds by category, the largest first. Launches count as far as work does not hide them."""
    named = {name.removesuffix("_s"): getattr(spent, name) for name in StepTime._fields if name != "total_s"}
    named["launch"] = max(0.0, spent.total_s - sum(named.values()) + named["launch"])
    return {name: value for name, value in sorted(named.items(), key=lambda item: -item[1]) if value > 0}


def usable_bytes(cluster: ClusterSpec, reserve: float = RESERVE) -> float:
    return cluster.device.memory_bytes * (1 - reserve)


def usable_host_bytes(cluster: ClusterSpec, reserve: float = RESERVE) -> float:
    """Bytes of host memory that a strategy may take for each device."""
    return cluster.host_memory_bytes / cluster.devices_per_node * (1 - reserve)


def split_by_memory(candidates: Sequence[Scored], cluster: ClusterSpec) -> tuple[list[Scored], list[Rejected]]:
    """Candidates that fit, and those that cannot, with bytes by category."""
    limit = usable_bytes(cluster)
    fitting = [each for each in candidates if each.estimate.needed_bytes <= limit]
    rejected = [
        Rejected(strategy=each.strategy, why="memory", reason=needs(each.estimate, limit), estimate=each.estimate)
        for each in candidates
        if each.estimate.needed_bytes > limit
    ]
    return fitting, rejected


def needs(estimate: Estimate, limit: float) -> str:
    """Why an estimate does not fit: how much is short, and what takes the most."""
    most = ", ".join(f"{name} {format_bytes(held)}" for name, held in list(estimate.memory.items())[:3])
    short, stage = format_bytes(estimate.needed_bytes - limit), f" on stage {estimate.stage}" if estimate.stage else ""
    return f"is {short} short{stage} of the {format_bytes(estimate.needed_bytes)} that it needs: {most}"
