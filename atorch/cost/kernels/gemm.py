"""Seconds of matrix products by their shape and dtype on one device.

A GPU computes a product in tiles of its result, a wave of them at a time, one for each multiprocessor: rows and columns
that do not fill tiles, and tiles that do not fill waves, cost as if they did (NVIDIA, Matrix Multiplication Background
User's Guide, section 3; Anthony et al. 2024, arXiv 2401.14489, section III). Smaller tiles waste less and run slower;
where tiles are too few, the inner dimension is split instead. A start-up comes beside that, and what the product moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from atorch.cluster.spec import DeviceSpec

_DEFAULT_PEAK = 1e11  # FLOP/s of a device that says nothing of itself
_TILES = ((128.0, 128.0, 1.0), (128.0, 64.0, 0.9), (64.0, 128.0, 0.9), (64.0, 64.0, 0.7))
"""Rows and columns of a result's tiles, and how fast they run beside the largest. Fitted to the seconds of 72 products
on an H100 in OpenXLA's xla/service/gpu/model/matmul_interpolator_data.h, which they tell to 5 % on average."""
_DEEP = 4096.0  # of the inner dimension; what is deeper is shared out over the wave, as none of those 72 is
_ALIGNED_BYTES = 16.0  # a thread loads as much at once; rows in memory should start at multiples of it
_UNALIGNED = 1.6  # times the seconds where they do not: 99 for 61 µs, pytorch/pytorch #196992
_UNALIGNED_ON_HOPPER: Mapping[float, float] = {4.0: 2.4, 2.0: 5.2}
"""The same from Hopper on, whose own kernels need aligned rows, by the bytes that rows start at multiples of: 281 and
97 to 154 TFLOP/s for 668, products of 4,096 on an H200 with rows of 4,098 and 4,097 numbers (`docs/accuracy.md`)."""
_SCALAR = 0.75  # of the fp32 peak, where neither operand is a weight: see `how_the_planner_chooses.md`
_FP8_SHARE = 0.96  # of the share that 16 bits reach: 8192³ on an H100, 1,126 and 585 TFLOP/s, pytorch/FBGEMM #2546


class GemmShape(NamedTuple):
    """`number` products (rows, inner) @ (inner, columns), and bytes of an element of the operands and of the result."""

    rows: float
    inner: float
    columns: float
    dtype: str
    itemsize: float
    result_itemsize: float
    number: float = 1.0
    pitch: float = 0.0  # elements by which rows of memory start apart, their greatest common divisor; 0: not known
    of_activations: bool = False  # both operands, as of attention's scores; else one is a weight


class ProductTimes:
    """Seconds of products on one device; a shape that came before is not worked out again."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self.bandwidth = device.memory_bandwidth * device.efficiency.traffic  # bytes/s that are reached
        self._found: dict[GemmShape, float] = {}

    def seconds(self, shape: GemmShape) -> float:
        found = self._found.get(shape)
        if found is None:
            found = self._found[shape] = self._seconds(shape)
        return found

    def _seconds(self, shape: GemmShape) -> float:
        """A start-up, and the longer of computing and moving: Williams, Waterman and Patterson 2009.

        Products of activations, one for each head, are launched together.
        """
        flops = 2.0 * shape.rows * shape.inner * shape.columns
        if not flops:
            return 0.0
        efficiency = self.device.efficiency
        peak = peak_flops(self.device, shape.dtype) * (_FP8_SHARE if shape.dtype == "float8" else 1.0)
        start = efficiency.matmul_half_flops / (efficiency.matmul * peak)
        operands = shape.itemsize * shape.inner * (shape.rows + shape.columns)
        moving = (operands + shape.result_itemsize * shape.rows * shape.columns) / self.bandwidth
        done = self._padded(shape) if self.device.multiprocessors else flops
        computing = self._slower(shape, peak) * done / (efficiency.matmul * peak)
        return (1.0 if shape.of_activations else shape.number) * start + shape.number * max(computing, moving)

    def _slower(self, shape: GemmShape, peak: float) -> float:
        """Times the seconds of a product whose rows do not start where a GPU's threads load from."""
        starts = shape.pitch * shape.itemsize
        if self.device.type != "cuda" or starts % _ALIGNED_BYTES == 0 or shape.dtype == "float32":
            return 1.0
        if not shape.of_activations:
            is_new = self.device.capability is not None and self.device.capability >= (9, 0)
            return _UNALIGNED_ON_HOPPER[4.0 if starts % 4.0 == 0 else 2.0] if is_new else _UNALIGNED
        return max(1.0, peak / (_SCALAR * peak_flops(self.device, "float32")))

    def _padded(self, shape: GemmShape) -> float:
        """The FLOPs of one product that the whole device could do meanwhile, with the best of the usual tiles."""
        least, at_once = math.inf, self.device.multiprocessors
        for height, width, speed in _TILES:
            tiles = shape.number * math.ceil(shape.rows / height) * math.ceil(shape.columns / width)
            depth = max(tiles / at_once * shape.inner, math.ceil(tiles / at_once) * min(shape.inner, _DEEP))
            least = min(least, 2.0 * height * width * depth * at_once / speed)
        return max(least / shape.number, 2.0 * shape.rows * shape.inner * shape.columns)


def peak_flops(device: DeviceSpec, dtype: str) -> float:
    """FLOP/s of a dtype; one that the device does not list runs as fp32 does."""
    return device.peak_flops.get(dtype) or device.peak_flops.get("float32") or _DEFAULT_PEAK
