"""Seconds of computing for one copy of a segment and a micro-batch, by kind of operation.

Operands of 8-bit matmuls are cast from 16 bits for each use, forward and backward; attention, routers and the
embedding stay in 16 bits. The bytes of a cast are those of torchao's roofline (pytorch/ao,
torchao/testing/training/roofline_utils.py): one read for the largest value, one read for scaling, and writes in the
layouts that the matmuls need.

An attention kernel is described by the share of the device's 16-bit peak that it reaches with heads of 128 features,
long sequences and no mask (`DeviceSpec.attention`). Corrections:

- Every score needs one exponential, whatever the head size, so the rate of d features falls as d / (d + c): Shah et al.
  2024, arXiv 2407.08608, section 3; c from the kernels' published tables.
- A causal kernel computes half of the scores, full tiles of 128 keys along the diagonal, and a tail of last tiles.
- Queries, keys, values and results are read and written, which bounds short sequences.

Attention that writes its scores is two matmuls of activations forward, four backward, and traffic between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from atorch.cost.comm import expert_load, is_whole, itemsize, tokens_share
from atorch.cost.gemm import GemmShape, ProductTimes, peak_flops
from atorch.cost.memory_timeline import is_gathered
from atorch.cost.profile import MULTIPLE, Matmul, Segment
from atorch.cost.state import Cost, Fp8Scaling


class _Cast(NamedTuple):
    """Bytes moved per element of an input, a gradient and a weight, in forward and backward."""

    input_forward: float
    input_backward: float
    gradient: float
    weight_forward: float
    weight_backward: float


_CASTS: Mapping[Fp8Scaling, _Cast] = {
    # A compiler fuses the first read of an input or a gradient into its producer.
    "delayed": _Cast(4.0, 0.0, 4.0, 4.0, 0.0),  # one read, writes in both layouts; scales are known in advance
    "tensorwise": _Cast(4.0, 0.0, 4.0, 5.0, 3.0),
    "rowwise": _Cast(3.0, 3.0, 6.0, 3.0, 7.0),
    "rowwise_gw_hp": _Cast(1.0, 0.0, 1.0, 3.0, 3.0),
    "blockwise": _Cast(1.0, 3.0, 4.0, 3.0, 3.0),
}
_EAGER = 6.0
"""Factor on the bytes of an unfused cast: absolute value, maximum, matmul in fp32, clamp and cast run separately."""
_ROWWISE = 1.17
"""Factor on the seconds of a matmul with row scales: 374, 362, 161 and 159 µs instead of cuBLAS's 310, 330, 132 and
139 with one scale, pytorch/FBGEMM #2764."""


def takes_fp8(cost: Cost, segment: Segment, product: Matmul) -> bool:
    """True if this product of a segment, of the size that a rank has of it, runs in 8 bits."""
    if cost.fp8 is None or not (segment.is_block or cost.fp8_outside):
        return False
    _, inner, columns, _ = _local_shape(cost, product, 1.0)
    is_whole = not product.stored_itemsize  # a quantized weight has a dtype of its own
    return is_whole and inner % MULTIPLE == 0 and columns % MULTIPLE == 0


def cast_bytes(cost: Cost, shape: tuple[float, float, float, float], again: float) -> float:
    """Bytes that casts move in all passes over matmuls of a shape (rows, inner, columns, count)."""
    assert cost.fp8 is not None
    rows, inner, columns, count = shape
    cast = _CASTS[cost.fp8]
    activations = rows * inner * ((1.0 + again) * cast.input_forward + cast.input_backward)
    activations += rows * columns * cast.gradient
    weights = inner * columns * ((1.0 + again) * cast.weight_forward + cast.weight_backward)
    fused = cost.compiled or cost.fp8 == "delayed"  # delayed scaling has fused kernels of its own
    if cost.fp8_once:
        weights = inner * columns * (cast.weight_forward + cast.weight_backward) / cost.num_micro_batches
    return count * (activations + weights) * (1.0 if fused else _EAGER)


_SCORES_TRAFFIC = 3.0  # bytes moved between attention's matmuls per saved byte of scores

_ADDED = 2.0  # passes over a weight's gradient per chunk of rows: a read and a write
_OF_CHUNK = 30.0  # operations per chunk of logits: its loss and its gradients

_Local = tuple[float, float, float, float]  # rows, inner, columns and count of matmuls on one device


class Computed(NamedTuple):
    """Seconds of forward, backward and recomputed forward."""

    matmul_s: float
    traffic_s: float
    launch_s: float


def seconds_of_copy(cost: Cost, segment: Segment, products: ProductTimes) -> Computed:
    """A roofline by operation: Williams, Waterman and Patterson 2009, "Roofline".

    Matmuls and attention run at the share of the dtype's peak that their shape and kernel reach, other operations at
    the reached memory bandwidth. Every operation also costs a launch.
    """
    again = cost.recompute if segment.is_block else 0.0
    share = tokens_share(cost, segment)
    load = expert_load(cost, segment)
    multiplying, casting, place = _attention_seconds(cost, segment, share, again, products), 0.0, 0.0
    for product in segment.matmuls:
        in_fp8, shape = takes_fp8(cost, segment, product), _local_shape(cost, product, share, load)
        repeats = again * _recomputed(cost, product, place)
        multiplying += _product_seconds(cost, product, shape, repeats, in_fp8, products)
        if in_fp8:
            casting += cast_bytes(cost, shape, repeats)
        if product.stored_itemsize:
            casting += _dequantized_bytes(cost, product, shape, repeats)
        place += product.count
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
    """The share of these matmuls that recomputation repeats; `place` matmuls come before them."""
    if cost.recompute_keeps in ("inputs", "nothing"):
        return 1.0
    if cost.recompute_keeps == "every second":
        before, after = int(place) // 2, int(place + product.count) // 2
        return (after - before) / product.count
    return 0.0


def _local_shape(cost: Cost, product: Matmul, share: float, load: float = 1.0) -> _Local:
    """Rows, inner, columns and count of matmuls on one device; experts have `load` times the mean rows."""
    rows, inner, columns, count = product.rows * share, float(product.inner), float(product.columns), product.count
    rows *= load if product.of_experts else 1.0
    if product.of_experts and cost.expert > 1:
        # Fewer experts, each with tokens of more ranks; tensor ranks send a part of theirs each.
        count, rows = count / cost.expert, rows * cost.expert / cost.tensor
    elif product.split == "columns":
        columns /= cost.tensor
    elif product.split == "rows":
        inner /= cost.tensor
    return rows, inner, columns, count


def _product_seconds(
    cost: Cost, product: Matmul, shape: _Local, again: float, in_fp8: bool, products: ProductTimes
) -> float:
    """Seconds of all passes over matmuls of one shape.

    Backward has two matmuls for each forward matmul, for the gradients of its input and of its weight; frozen weights
    need the first alone (Kaplan et al. 2020, arXiv 2001.08361, section 2.1). All three move the same three matrices.
    """
    rows, inner, columns, count = shape
    pitch, wide = _pitch(inner, columns), itemsize(cost)

    def one(height: float, depth: float, width: float, dtype: str, result: float = wide) -> float:
        is_narrow = dtype == "float8"
        times = _ROWWISE if is_narrow and cost.fp8 in ("rowwise", "rowwise_gw_hp") else 1.0
        narrow = 1.0 if is_narrow else wide
        return times * products.seconds(GemmShape(height, depth, width, dtype, narrow, result, count, pitch))

    dtype = "float8" if in_fp8 else cost.dtype
    of_gradient = cost.dtype if cost.fp8 == "rowwise_gw_hp" else dtype
    seconds = (1.0 + again) * one(rows, inner, columns, dtype) + one(rows, columns, inner, dtype)
    if not product.trainable:
        return seconds
    result = 2.0 * cost.grad_itemsize if cost.adds_in_products else wide  # a read and a write
    return seconds + one(inner, rows, columns, of_gradient, result)


def added_elements(cost: Cost, segment: Segment) -> float:
    """Elements of one copy whose gradients separate operations add to those of earlier micro-batches."""
    trained = cost.local_trainable(segment)
    if not cost.adds_in_products:
        return trained
    shapes = [_local_shape(cost, product, 1.0) for product in segment.matmuls if product.trainable]
    return max(0.0, trained - sum(inner * columns * count for _, inner, columns, count in shapes))


def micro_batch_bytes(cost: Cost, params: float, added: float) -> float:
    """Bytes moved in a micro-batch by casts of weights and accumulation of gradients."""
    first = 1.0 / cost.num_micro_batches  # the first micro-batch adds nothing, but copies if gradients persist
    accumulated = added * cost.grad_itemsize * (3.0 * (1.0 - first) + (2.0 * first if cost.grads_persist else 0.0))
    return params * cost.cast_traffic_bytes + accumulated


def optimizer_bytes(cost: Cost) -> float:
    """Bytes moved by the optimizer per element: reads and writes of parameters and state, reads of gradients."""
    moved = 2.0 * (cost.param_itemsize + cost.optim_itemsize + cost.master_itemsize) + cost.grad_itemsize
    return moved * cost.optim_traffic * (1.0 - cost.optim_offload)  # `offload` counts the host's step


def _dequantized_bytes(cost: Cost, product: Matmul, shape: _Local, again: float) -> float:
    """Bytes moved to dequantize a weight before each matmul: a read, and a write in full precision."""
    _, inner, columns, count = shape
    passes = (3.0 if product.trainable else 2.0) + again
    return count * passes * (product.stored_itemsize + itemsize(cost)) * inner * columns


def _pitch(inner: float, columns: float) -> float:
    """The common divisor of row strides: inputs and weights have `inner` elements in a row, results `columns`."""
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
    """Bytes that one copy's other operations move for the traced tokens; backward moves 1.5 times as much as forward.

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


_HEAD = 128.0  # features of a head in kernels' figures
_STEP = 32.0  # kernels pad heads to multiples of this
_SOFTMAX: Mapping[str, float] = {"flash2": 22.0, "efficient": 22.0, "flash3": 56.0, "cudnn": 56.0}
"""Time of a score's exponential, in features, if the kernel does not hide it: from 176 and 203 TFLOP/s with heads of 64
and 128 on an A100, 296 and 338 on an H100 (flash2: Dao 2023, arXiv 2307.08691, figures 4 and 7), 497 and 648 (flash3
forward: arXiv 2407.08608, figure 5). Earlier kernels are no slower with small heads."""
_TILE = 128.0  # queries, or keys
_TAIL = 1.03  # a causal kernel's last tiles leave devices partly idle: 203 and 189 TFLOP/s at 16,384 tokens
_PASSES = 3.5  # Dao et al. 2022, arXiv 2205.14135: backward computes five matmuls where forward does two
_TENSORS = 4.0  # queries, keys, values, results; backward moves them, and the gradients of each


def fused_seconds(
    segment: Segment, kernel: str, flops: float, again: float, dtype: str, products: ProductTimes
) -> float:
    """Seconds of forward, backward, and `again` more forwards, of `flops` each; backward recomputes scores."""
    if kernel not in products.device.attention:
        kernel = next(iter(products.device.attention), "flash2")  # the first listed one: PyTorch's choice
    forward, backward = _shares(kernel, products)
    peak = peak_flops(products.device, dtype)
    per_flop = _slower(segment, kernel) * ((1.0 + again) / forward + (_PASSES - 1.0) / backward) / peak
    busy = max(flops, _least_flops(segment, products))
    return busy * per_flop + flops * (3.0 + again) * _moving(segment) / products.bandwidth


def written_seconds(segment: Segment, flops: float, again: float, dtype: str, products: ProductTimes) -> float:
    """The same for attention that writes its scores; the memory traffic between matmuls counts elsewhere."""
    tokens, head = float(segment.sequence_length), float(segment.head_dim or _HEAD)
    if not tokens:
        return (3.0 + again) * flops / (peak_flops(products.device, dtype) * products.device.efficiency.matmul)
    itemsize = 4.0 if dtype in ("float32", "tfloat32") else 2.0
    of_one = 4.0 * tokens * tokens * head
    count = max(1.0, flops / of_one)
    passes = (
        (tokens, head, tokens, 1.0 + again), (tokens, tokens, head, 1.0 + again),  # scores, results
        (tokens, head, tokens, 1.0), (tokens, tokens, head, 3.0),  # and the gradients of what they came from
    )  # fmt: skip
    seconds = 0.0
    for rows, inner, columns, times in passes:
        shape = GemmShape(
            rows, inner, columns, dtype, itemsize, itemsize, number=count, pitch=head, of_activations=True
        )
        seconds += times * products.seconds(shape)
    return seconds * flops / (count * of_one)


def _shares(kernel: str, products: ProductTimes) -> tuple[float, float]:
    reached, spec = products.device.efficiency.attention, products.device.attention.get(kernel)
    return (reached, reached) if spec is None else (reached * spec.forward, reached * spec.backward)


def _slower(segment: Segment, kernel: str) -> float:
    """Seconds of a FLOP, relative to heads of 128 features and long sequences without a mask."""
    slower = 1.0
    if segment.head_dim:
        padded = _STEP * math.ceil(segment.head_dim / _STEP)
        softmax = _SOFTMAX.get(kernel, 0.0)
        slower = (padded + softmax) / segment.head_dim * _HEAD / (_HEAD + softmax)
    if segment.is_causal and segment.sequence_length:
        slower *= _TAIL + _TILE / segment.sequence_length
    return slower


def _least_flops(segment: Segment, products: ProductTimes) -> float:
    """Lower bound of forward FLOPs: one tile of queries on every multiprocessor."""
    if not (segment.head_dim and segment.sequence_length):
        return 0.0
    keys = segment.sequence_length / 2.0 if segment.is_causal else float(segment.sequence_length)
    queries = min(_TILE, float(segment.sequence_length))
    return 4.0 * segment.head_dim * keys * queries * products.device.multiprocessors


def _moving(segment: Segment) -> float:
    """Bytes per FLOP in a forward pass: queries, keys, values and results in 16 bits."""
    if not segment.sequence_length:
        return 0.0
    keys = segment.sequence_length / 2.0 if segment.is_causal else float(segment.sequence_length)
    shared = segment.num_kv_heads / segment.num_heads if segment.num_heads and segment.num_kv_heads else 1.0
    return 2.0 * (_TENSORS / 2.0) * (1.0 + shared) / (4.0 * keys)
