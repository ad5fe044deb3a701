"""The cost of 8-bit products: which products they replace, and the casts of their operands.

Operands are cast where they are used, forward and backward, from 16 bits; attention, routers and the embedding stay.
The bytes of a cast are those of torchao's roofline (pytorch/ao, torchao/testing/training/roofline_utils.py): read once
for the largest value and once to be scaled, written in the layouts that the products want.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from atorch.cost.profile import Matmul, Segment
from atorch.cost.state import Cost, Fp8Scaling

MULTIPLE = 16  # of both dimensions of a weight, which 8-bit products ask for


class _Cast(NamedTuple):
    """Bytes moved for an element of an input or a gradient, and of a weight: in forward, and in backward."""

    input_forward: float
    input_backward: float
    gradient: float
    weight_forward: float
    weight_backward: float


_CASTS: Mapping[Fp8Scaling, _Cast] = {
    # A compiler fuses the first read of an input or a gradient with what computes it.
    "delayed": _Cast(4.0, 0.0, 4.0, 4.0, 0.0),  # read once, written in both layouts; scales are known before
    "tensorwise": _Cast(4.0, 0.0, 4.0, 5.0, 3.0),
    "rowwise": _Cast(3.0, 3.0, 6.0, 3.0, 7.0),
    "rowwise_gw_hp": _Cast(1.0, 0.0, 1.0, 3.0, 3.0),
    "blockwise": _Cast(1.0, 3.0, 4.0, 3.0, 3.0),
}
_EAGER = 6.0
"""Times the bytes where no compiler fuses a cast: absolute values, their largest, a product in fp32, a clamp and a cast
are operations of their own."""
_ROWWISE = 1.17
"""Times the seconds of a product whose rows have scales: 374, 362, 161 and 159 µs for cuBLAS's 310, 330, 132 and 139
with one scale, pytorch/FBGEMM #2764."""


def takes_fp8(cost: Cost, segment: Segment, product: Matmul) -> bool:
    """True if some products of a segment are multiplied in 8 bits."""
    if cost.fp8 is None or not (segment.is_block or cost.fp8_outside):
        return False
    is_whole = not product.stored_itemsize  # a quantized weight has its own numbers
    return is_whole and product.inner % MULTIPLE == 0 and product.columns % MULTIPLE == 0


def gradient_dtype(cost: Cost) -> str:
    return cost.dtype if cost.fp8 == "rowwise_gw_hp" else "float8"


def cast_bytes(cost: Cost, shape: tuple[float, float, float, float], again: float) -> float:
    """Bytes that casts move for every pass over products of a shape: rows, inner, columns and count."""
    assert cost.fp8 is not None
    rows, inner, columns, count = shape
    cast = _CASTS[cost.fp8]
    activations = rows * inner * ((1.0 + again) * cast.input_forward + cast.input_backward)
    activations += rows * columns * cast.gradient
    weights = inner * columns * ((1.0 + again) * cast.weight_forward + cast.weight_backward)
    fused = cost.compiled or cost.fp8 == "delayed"  # whose kernels are its own
    if cost.fp8_once:
        weights = inner * columns * (cast.weight_forward + cast.weight_backward) / cost.num_micro_batches
    return count * (activations + weights) * (1.0 if fused else _EAGER)


def slower(cost: Cost) -> float:
    """Times the seconds of an 8-bit product with one scale for each operand."""
    return _ROWWISE if cost.fp8 in ("rowwise", "rowwise_gw_hp") else 1.0
