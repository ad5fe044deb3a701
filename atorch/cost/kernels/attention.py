"""Seconds of attention by kernel, head size, mask and direction.

A kernel is described by the share of the device's 16-bit peak that it reaches with heads of 128 features, long
sequences and no mask (`DeviceSpec.attention`). Corrections:

- Every score needs one exponential, whatever the head size, so the rate of d features falls as d / (d + c): Shah et al.
  2024, arXiv 2407.08608, section 3; c from the kernels' published tables.
- A causal kernel computes half of the scores, full tiles of 128 keys along the diagonal, and a tail of last tiles.
- Queries, keys, values and results are read and written, which bounds short sequences.

Attention that writes its scores is two products of activations forward, four backward, and traffic between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from atorch.cost.kernels.gemm import GemmShape, ProductTimes, peak_flops
from atorch.cost.profile import Segment

_HEAD = 128.0  # features of a head in kernels' figures
_STEP = 32.0  # kernels pad heads to multiples of this
_SOFTMAX: Mapping[str, float] = {"flash2": 22.0, "efficient": 22.0, "flash3": 56.0, "cudnn": 56.0}
"""Time of a score's exponential, in features, if the kernel does not hide it: from 176 and 203 TFLOP/s with heads of 64
and 128 on an A100, 296 and 338 on an H100 (flash2: Dao 2023, arXiv 2307.08691, figures 4 and 7), 497 and 648 (flash3
forward: arXiv 2407.08608, figure 5). Earlier kernels are no slower with small heads."""
_TILE = 128.0  # queries, or keys
_TAIL = 1.03  # a causal kernel's last tiles leave devices partly idle: 203 and 189 TFLOP/s at 16,384 tokens
_PASSES = 3.5  # Dao et al. 2022, arXiv 2205.14135: backward computes five products where forward does two
_TENSORS = 4.0  # queries, keys, values, results; backward moves them, and the gradients of each


def fused_seconds(
    segment: Segment, kernel: str, flops: float, again: float, dtype: str, products: ProductTimes
) -> float:
    """Seconds of forward, backward, and `again` more forwards, of `flops` each; backward recomputes scores."""
    kernel = _listed_kernel(kernel, products)
    forward, backward = _shares(kernel, products)
    peak = peak_flops(products.device, dtype)
    per_flop = _slower(segment, kernel) * ((1.0 + again) / forward + (_PASSES - 1.0) / backward) / peak
    busy = max(flops, _least_flops(segment, products))
    return busy * per_flop + flops * (3.0 + again) * _moving(segment) / products.bandwidth


def written_seconds(segment: Segment, flops: float, again: float, dtype: str, products: ProductTimes) -> float:
    """The same for attention that writes its scores; the memory traffic between products counts elsewhere."""
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


def _listed_kernel(kernel: str, products: ProductTimes) -> str:
    """The kernel if the device lists it, else the first listed one: PyTorch's choice on that device."""
    listed = products.device.attention
    return kernel if kernel in listed else next(iter(listed), "flash2")


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
