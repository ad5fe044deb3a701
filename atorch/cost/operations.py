"""Seconds that one copy of a segment computes for a micro-batch, by kind of operation."""

from __future__ import annotations

from typing import NamedTuple

from atorch.cluster import DeviceSpec
from atorch.cost.communication import is_whole, itemsize, tokens_share
from atorch.cost.moments import is_gathered
from atorch.cost.profile import Matmul, Segment
from atorch.cost.state import Cost

_DEFAULT_PEAK = 1e11  # FLOP/s of a device that says nothing of itself


class Computed(NamedTuple):
    """Forward, backward, and forward again where it is recomputed."""

    matmul_s: float
    traffic_s: float
    launch_s: float


def seconds_of_copy(cost: Cost, segment: Segment, device: DeviceSpec) -> Computed:
    """A roofline by operation: Williams, Waterman and Patterson 2009, "Roofline".

    Products and attention run at what they reach of the dtype's peak, everything else at what it reaches of the
    memory's bandwidth; every operation is launched. Selective recomputation keeps the results of the former.
    """
    again = cost.recompute if segment.is_block else 0.0
    multiplied = 0.0 if cost.recompute_keeps in ("selective", "results") else again  # whose results are kept
    rates = _Rates(
        share=tokens_share(cost, segment),
        itemsize=itemsize(cost),
        peak=peak_flops(device, cost.dtype),
        bandwidth=device.memory_bandwidth * device.efficiency.traffic,
    )
    multiplying = _attention_seconds(cost, segment, multiplied, rates, device)
    for each in segment.matmuls:
        multiplying += _product_seconds(cost, each, multiplied, rates, device)
    return Computed(
        matmul_s=multiplying,
        traffic_s=rates.share * _traffic_bytes(cost, segment, again) / rates.bandwidth,
        launch_s=(3.0 + again) * segment.num_ops * cost.ops_scale * device.launch_s,
    )


class _Rates(NamedTuple):
    """What holds for all operations of a copy."""

    share: float  # of the traced tokens, those that a device computes in a micro-batch
    itemsize: float
    peak: float  # FLOP/s
    bandwidth: float  # bytes/s that are reached


def _product_seconds(cost: Cost, product: Matmul, again: float, rates: _Rates, device: DeviceSpec) -> float:
    """Every pass over one product: its FLOPs at what is reached of the peak, and its operands and result to and fro.

    Backward multiplies every matrix twice where forward did once, for the gradients of its input and of its weight;
    frozen weights need the first alone (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). All three move the same
    three matrices.
    """
    rows, inner, columns = product.rows * rates.share, float(product.inner), float(product.columns)
    count = product.count
    if product.of_experts and cost.expert > 1:
        count, rows = count / cost.expert, rows * cost.expert  # fewer experts here, and tokens of more ranks for each
    elif product.split == "columns":
        columns /= cost.tensor
    elif product.split == "rows":
        inner /= cost.tensor
    flops = 2.0 * rows * inner * columns
    passes = (3.0 if product.trainable else 2.0) + again
    moved = rates.itemsize * (rows * inner + inner * columns + rows * columns)
    if product.stored_itemsize:  # a quantized weight is read, and written whole, before it is multiplied with
        moved += (product.stored_itemsize + rates.itemsize) * inner * columns
    return count * passes * (flops / (rates.peak * device.efficiency.matmul_share(flops)) + moved / rates.bandwidth)


def _attention_seconds(cost: Cost, segment: Segment, again: float, rates: _Rates, device: DeviceSpec) -> float:
    """Attention that does not keep its scores recomputes them: five products in backward for two in forward.

    Dao et al. 2022, arXiv 2205.14135.
    """
    flops = rates.share * segment.attention_flops / cost.tensor
    return (3.5 + again) * cost.attention_scale * flops / (rates.peak * device.efficiency.attention)


def _traffic_bytes(cost: Cost, segment: Segment, again: float) -> float:
    """Bytes that one copy's other operations move for the traced tokens; backward moves half as much again as forward.

    A norm or an activation reads one tensor and writes one, and in backward reads two and writes one.
    """
    inside = 1 if is_gathered(cost, segment) else cost.tensor
    outside = cost.tensor if cost.splits_norms and not is_whole(cost, segment) else 1
    forward = segment.inside.traffic_bytes / inside + segment.outside.traffic_bytes / outside
    return cost.traffic_scale * forward * (2.5 + again)


def peak_flops(device: DeviceSpec, dtype: str) -> float:
    """FLOP/s of a dtype; one that the device does not list runs as fp32 does."""
    return device.peak_flops.get(dtype) or device.peak_flops.get("float32") or _DEFAULT_PEAK
