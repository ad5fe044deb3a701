"""Seconds that one copy of a segment computes for a micro-batch, by kind of operation."""

from __future__ import annotations

import math
from typing import NamedTuple

from atorch.cost.comm.communication import expert_load, is_whole, itemsize, tokens_share
from atorch.cost.kernels.attention import fused_seconds, written_seconds
from atorch.cost.kernels.fp8 import cast_bytes, gradient_dtype, slower, takes_fp8
from atorch.cost.kernels.gemm import GemmShape, ProductTimes
from atorch.cost.memory_timeline import is_gathered
from atorch.cost.profile import Matmul, Segment
from atorch.cost.state import Cost

_SCORES_TRAFFIC = 3.0  # bytes that move between attention's products for each byte of scores that is kept

_ADDED = 2.0  # passes over a weight's gradient for each chunk of rows: it is read, and written
_OF_CHUNK = 30.0  # operations of a chunk of logits, its loss and its gradients

_Local = tuple[float, float, float, float]  # rows, inner, columns and count of products as one device has them


class Computed(NamedTuple):
    """Forward, backward, and forward again where it is recomputed."""

    matmul_s: float
    traffic_s: float
    launch_s: float


def seconds_of_copy(cost: Cost, segment: Segment, products: ProductTimes) -> Computed:
    """A roofline by operation: Williams, Waterman and Patterson 2009, "Roofline".

    Products and attention run at what their shape and kernel reach of the dtype's peak, everything else at what it
    reaches of the memory's bandwidth; every operation is launched.
    """
    again = cost.recompute if segment.is_block else 0.0
    share = tokens_share(cost, segment)
    load = expert_load(cost, segment)
    multiplying, casting, place = _attention_seconds(cost, segment, share, again, products), 0.0, 0.0
    for each in segment.matmuls:
        in_fp8, shape = takes_fp8(cost, segment, each), _local_shape(cost, each, share, load)
        repeats = again * _recomputed(cost, each, place)
        multiplying += _product_seconds(cost, each, shape, repeats, in_fp8, products)
        if in_fp8:
            casting += cast_bytes(cost, shape, repeats)
        if each.stored_itemsize:
            casting += _dequantized_bytes(cost, each, shape, repeats)
        place += each.count
    traffic = share * _traffic_bytes(cost, segment, again) + casting
    traffic += _ADDED * segment.early_gradient_bytes * segment.loss_chunks
    return Computed(
        matmul_s=multiplying,
        traffic_s=traffic / products.bandwidth,
        launch_s=((3.0 + again) * segment.num_ops + _OF_CHUNK * (segment.loss_chunks - 1.0))
        * cost.ops_scale
        * products.device.launch_s,
    )


def _recomputed(cost: Cost, product: Matmul, place: float) -> float:
    """The share of some products that run again where blocks are recomputed; `place` others come before them."""
    if cost.recompute_keeps in ("inputs", "nothing"):
        return 1.0
    if cost.recompute_keeps == "every second":
        before, after = int(place) // 2, int(place + product.count) // 2
        return (after - before) / product.count
    return 0.0


def _local_shape(cost: Cost, product: Matmul, share: float, load: float = 1.0) -> _Local:
    """Rows, inner, columns and count of some products as one device has them; of experts, so many times the mean."""
    rows, inner, columns, count = product.rows * share, float(product.inner), float(product.columns), product.count
    rows *= load if product.of_experts else 1.0
    if product.of_experts and cost.expert > 1:
        count, rows = count / cost.expert, rows * cost.expert  # fewer experts here, and tokens of more ranks for each
    elif product.split == "columns":
        columns /= cost.tensor
    elif product.split == "rows":
        inner /= cost.tensor
    return rows, inner, columns, count


def _product_seconds(
    cost: Cost, product: Matmul, shape: _Local, again: float, in_fp8: bool, products: ProductTimes
) -> float:
    """Every pass over some products of one shape.

    Backward multiplies every matrix twice where forward did once, for the gradients of its input and of its weight;
    frozen weights need the first alone (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). All three move the same
    three matrices.
    """
    rows, inner, columns, count = shape
    pitch, wide = _pitch(inner, columns), itemsize(cost)

    def one(height: float, depth: float, width: float, dtype: str, result: float = wide) -> float:
        is_narrow = dtype == "float8"
        narrow, times = (1.0, slower(cost)) if is_narrow else (wide, 1.0)
        return times * products.seconds(GemmShape(height, depth, width, dtype, narrow, result, count, pitch))

    dtype, of_gradient = ("float8", gradient_dtype(cost)) if in_fp8 else (cost.dtype, cost.dtype)
    seconds = (1.0 + again) * one(rows, inner, columns, dtype) + one(rows, columns, inner, dtype)
    if not product.trainable:
        return seconds
    result = 2.0 * cost.grad_itemsize if cost.adds_in_products else wide  # read, and written
    return seconds + one(inner, rows, columns, of_gradient, result)


def added_elements(cost: Cost, segment: Segment) -> float:
    """Elements of one copy whose gradients are added to earlier micro-batches' by operations of their own."""
    trained = cost.local_trainable(segment)
    if not cost.adds_in_products:
        return trained
    shapes = [_local_shape(cost, each, 1.0) for each in segment.matmuls if each.trainable]
    return max(0.0, trained - sum(inner * columns * count for _, inner, columns, count in shapes))


def micro_batch_bytes(cost: Cost, params: float, added: float) -> float:
    """Moved in a micro-batch by weights that are cast, and gradients that are added to those of earlier ones."""
    first = 1.0 / cost.num_micro_batches  # of whose gradients none is a sum; where they have a place, they are copied
    accumulated = added * cost.grad_itemsize * (3.0 * (1.0 - first) + (2.0 * first if cost.grads_persist else 0.0))
    return params * cost.cast_traffic_bytes + accumulated


def optimizer_bytes(cost: Cost) -> float:
    """Moved by the optimizer for one element: it reads and writes parameters and state, and reads gradients."""
    moved = 2.0 * (cost.param_itemsize + cost.optim_itemsize + cost.master_itemsize) + cost.grad_itemsize
    return moved * cost.optim_traffic * (1.0 - cost.optim_offload)  # the host's step is counted with the transfers


def _dequantized_bytes(cost: Cost, product: Matmul, shape: _Local, again: float) -> float:
    """A quantized weight is read, and written whole, before it is multiplied with."""
    _, inner, columns, count = shape
    passes = (3.0 if product.trainable else 2.0) + again
    return count * passes * (product.stored_itemsize + itemsize(cost)) * inner * columns


def _pitch(inner: float, columns: float) -> float:
    """The pitch of rows in memory: inputs and weights have `inner` elements in a row, results `columns`."""
    if inner != int(inner) or columns != int(columns):
        return 0.0
    return float(math.gcd(int(inner), int(columns)))


def _attention_seconds(cost: Cost, segment: Segment, share: float, again: float, products: ProductTimes) -> float:
    flops = cost.attention_load * share * segment.attention_flops / cost.tensor
    if not flops:
        return 0.0
    repeats = again if cost.recompute_keeps in ("inputs", "nothing", "scores") else 0.0
    if segment.writes_scores:
        return written_seconds(segment, flops, repeats, cost.dtype, products)
    return fused_seconds(segment, cost.attention_kernel, flops, repeats, cost.dtype, products)


def _traffic_bytes(cost: Cost, segment: Segment, again: float) -> float:
    """Bytes that one copy's other operations move for the traced tokens; backward moves half as much again as forward.

    A norm or an activation reads one tensor and writes one, and in backward reads two and writes one.
    """
    inside = 1 if is_gathered(cost, segment) else cost.tensor
    outside = cost.tensor if cost.splits_norms and not is_whole(cost, segment) else 1
    forward = segment.inside.traffic_bytes / inside + segment.outside.traffic_bytes / outside
    if cost.recompute_keeps == "scores":
        repeated = again * _SCORES_TRAFFIC * segment.scores_bytes / inside
    else:
        repeated = again * forward
    return cost.traffic_scale * (2.5 * forward + repeated)
