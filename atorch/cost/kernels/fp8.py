"""The cost of 8-bit products: the products that they replace, and the casts of their operands.

Operands are cast from 16 bits for each use, forward and backward; attention, routers and the embedding stay in 16 bits.
The bytes of a cast are those of torchao's roofline (pytorch/ao, torchao/testing/training/roofline_utils.py): one read
for the largest value, one read for scaling, and writes in the layouts that the products need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from atorch.cost.profile import Matmul, Segment
from atorch.cost.state import Cost, Fp8Scaling

MULTIPLE = 16  # 8-bit products need both dimensions of a weight divisible by this


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
"""Factor on the bytes of an unfused cast: absolute value, maximum, product in fp32, clamp and cast run separately."""
_ROWWISE = 1.17
"""Factor on the seconds of a product with row scales: 374, 362, 161 and 159 µs instead of cuBLAS's 310, 330, 132 and
139 with one scale, pytorch/FBGEMM #2764."""


def takes_fp8(cost: Cost, segment: Segment, product: Matmul) -> bool:
    """True if this product of a segment runs in 8 bits."""
    if cost.fp8 is None or not (segment.is_block or cost.fp8_outside):
        return False
    is_whole = not product.stored_itemsize  # a quantized weight has a dtype of its own
    return is_whole and product.inner % MULTIPLE == 0 and product.columns % MULTIPLE == 0


def gradient_dtype(cost: Cost) -> str:
    return cost.dtype if cost.fp8 == "rowwise_gw_hp" else "float8"


def cast_bytes(cost: Cost, shape: tuple[float, float, float, float], again: float) -> float:
    """Bytes that casts move in all passes over products of a shape (rows, inner, columns, count)."""
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


def slower(cost: Cost) -> float:
    """Factor on the seconds of an 8-bit product with one scale per operand."""
    return _ROWWISE if cost.fp8 in ("rowwise", "rowwise_gw_hp") else 1.0
