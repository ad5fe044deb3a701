"""Seconds of attention by the kernel that computes it, the heads' size, the mask and the direction.

Kernels are described by what they reach of the device's 16-bit peak with heads of 128 features, long sequences and no
mask (`DeviceSpec.attention`). From there:

- an exponential is taken of every score, whatever the features of a head, so that a kernel's rate falls with them as
  d / (d + c): Shah et al. 2024, arXiv 2407.08608, section 3; c from the kernels' published tables;
- a causal kernel computes half of the scores, whole tiles of 128 keys along the diagonal, and its last tiles alone;
- queries, keys, values and results are read and written, which is what short sequences wait for.

Attention that writes its scores out is products of activations, two forward and four backward, and traffic between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from atorch.cost.kernels.gemm import GemmShape, ProductTimes, peak_flops
from atorch.cost.profile import Segment

_HEAD = 128.0  # features that kernels' figures are of
_STEP = 32.0  # kernels are made for multiples of so many
_SOFTMAX: Mapping[str, float] = {"flash2": 22.0, "efficient": 22.0, "flash3": 56.0, "cudnn": 56.0}
"""Features that a score's exponential takes as long as, where the kernel does not hide it: from 176 and 203 TFLOP/s
with heads of 64 and 128 on an A100, 296 and 338 on an H100 (flash2: Dao 2023, arXiv 2307.08691, figures 4 and 7), 497
and 648 (flash3 forward: arXiv 2407.08608, figure 5). The kernels before are no slower with small heads."""
_TILE = 128.0  # queries, or keys
_TAIL = 1.03  # a causal kernel's last tiles leave part of the device idle: 203 and 189 TFLOP/s at 16,384 tokens
_PASSES = 3.5  # Dao et al. 2022, arXiv 2205.14135: backward computes five products where forward does two
_TENSORS = 4.0  # queries, keys, values, results; backward moves them, and the gradients of each


def fused_seconds(
    segment: Segment, kernel: str, flops: float, again: float, dtype: str, products: ProductTimes
) -> float:
    """Forward, backward, and `again` times forward, of `flops` forward; scores are recomputed in backward."""
    kernel = _taken(kernel, products)
    forward, backward = _shares(kernel, products)
    peak = peak_flops(products.device, dtype)
    per_flop = _slower(segment, kernel) * ((1.0 + again) / forward + (_PASSES - 1.0) / backward) / peak
    busy = max(flops, _least_flops(segment, products))
    return busy * per_flop + flops * (3.0 + again) * _moving(segment) / products.bandwidth


def written_seconds(segment: Segment, flops: float, again: float, dtype: str, products: ProductTimes) -> float:
    """The same where scores are written out: every product has two in backward; what is moved between is traffic."""
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


def _taken(kernel: str, products: ProductTimes) -> str:
    """The kernel, or the first that the device lists, which is what PyTorch takes there, where it does not list it."""
    known = products.device.attention
    return kernel if kernel in known else next(iter(known), "flash2")


def _shares(kernel: str, products: ProductTimes) -> tuple[float, float]:
    """The shares of the peak that the kernel reaches forward and backward."""
    reached, spec = products.device.efficiency.attention, products.device.attention.get(kernel)
    return (reached, reached) if spec is None else (reached * spec.forward, reached * spec.backward)


def _slower(segment: Segment, kernel: str) -> float:
    """Seconds of a FLOP against those of heads of 128 features and long sequences without a mask."""
    slower = 1.0
    if segment.head_dim:
        padded = _STEP * math.ceil(segment.head_dim / _STEP)
        softmax = _SOFTMAX.get(kernel, 0.0)
        slower = (padded + softmax) / segment.head_dim * _HEAD / (_HEAD + softmax)
    if segment.is_causal and segment.sequence_length:
        slower *= _TAIL + _TILE / segment.sequence_length
    return slower


def _least_flops(segment: Segment, products: ProductTimes) -> float:
    """FLOPs of one tile of queries on every multiprocessor, forward, where there are no more tiles than those."""
    if not (segment.head_dim and segment.sequence_length):
        return 0.0
    keys = segment.sequence_length / 2.0 if segment.is_causal else float(segment.sequence_length)
    queries = min(_TILE, float(segment.sequence_length))
    return 4.0 * segment.head_dim * keys * queries * products.device.multiprocessors


def _moving(segment: Segment) -> float:
    """Bytes of a FLOP in a forward pass, of 16-bit numbers: of queries, keys, values and results."""
    if not segment.sequence_length:
        return 0.0
    keys = segment.sequence_length / 2.0 if segment.is_causal else float(segment.sequence_length)
    shared = segment.num_kv_heads / segment.num_heads if segment.num_heads and segment.num_kv_heads else 1.0
    return 2.0 * (_TENSORS / 2.0) * (1.0 + shared) / (4.0 * keys)
