"""Seconds of matmuls by their shape and dtype on one device.

A GPU computes a matmul in tiles of its result, a wave of one tile per multiprocessor at a time. Partial tiles and
partial waves cost as much as full ones (NVIDIA, Matrix Multiplication Background User's Guide, section 3; Anthony et
al. 2024, arXiv 2401.14489, section III). Smaller tiles waste less and run slower. With too few tiles, the inner
dimension is split as well. Start-up time and memory traffic are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from atorch.cluster.spec import DeviceSpec

_DEFAULT_PEAK = 1e11  # FLOP/s of a device without a description
_TILES = ((128.0, 128.0, 1.0), (128.0, 64.0, 0.9), (64.0, 128.0, 0.9), (64.0, 64.0, 0.7))
"""Rows and columns of a result's tiles, and their speed relative to the largest. Fitted to 72 matmuls on an H100 in
OpenXLA's xla/service/gpu/model/matmul_interpolator_data.h, with a mean error of 5 %."""
_DEEP = 4096.0  # inner dimension above which it is split over the wave; none of those 72 is deeper
_ALIGNED_BYTES = 16.0  # a thread's load; rows in memory should start at multiples of it
_UNALIGNED = 1.6  # factor on the seconds if they do not: 99 instead of 61 µs, pytorch/pytorch #196992
_UNALIGNED_ON_HOPPER: Mapping[float, float] = {4.0: 2.4, 2.0: 5.2}
"""The same from Hopper on, whose kernels need aligned rows, by alignment in bytes: 281 and 97 to 154 TFLOP/s instead of
668, for matmuls of 4,096 on an H200 with rows of 4,098 and 4,097 numbers (`docs/accuracy.md`)."""
_SCALAR = 0.75  # of the fp32 peak, if neither operand is a weight: see `docs/cost_model.md`
_FP8_SHARE = 0.96  # of the share that 16 bits reach: 8192³ on an H100, 1,126 and 585 TFLOP/s, pytorch/FBGEMM #2546


class GemmShape(NamedTuple):
    """`number` matmuls (rows, inner) @ (inner, columns), and bytes of an element of the operands and of the result."""

    rows: float
    inner: float
    columns: float
    dtype: str
    itemsize: float
    result_itemsize: float
    number: float = 1.0
    pitch: float = 0.0  # greatest common divisor of row strides, in elements; 0: unknown
    of_activations: bool = False  # both operands are activations, as in attention; else one is a weight


class ProductTimes:
    """Seconds of matmuls on one device, cached by shape."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device
        self.bandwidth = device.memory_bandwidth * device.efficiency.traffic  # bytes/s in practice
        self._cache: dict[GemmShape, float] = {}

    def seconds(self, shape: GemmShape) -> float:
        seconds = self._cache.get(shape)
        if seconds is None:
            seconds = self._cache[shape] = self._seconds(shape)
        return seconds

    def _seconds(self, shape: GemmShape) -> float:
        """A start-up plus the longer of computing and memory traffic: Williams, Waterman and Patterson 2009.

        Matmuls of activations, one for each head, share one launch.
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
        """Factor on the seconds of a matmul whose rows are not aligned to a GPU thread's loads."""
        starts = shape.pitch * shape.itemsize
        if self.device.type != "cuda" or starts % _ALIGNED_BYTES == 0 or shape.dtype == "float32":
            return 1.0
        if not shape.of_activations:
            is_new = self.device.capability is not None and self.device.capability >= (9, 0)
            return _UNALIGNED_ON_HOPPER[4.0 if starts % 4.0 == 0 else 2.0] if is_new else _UNALIGNED
        return max(1.0, peak / (_SCALAR * peak_flops(self.device, "float32")))

    def _padded(self, shape: GemmShape) -> float:
        """FLOPs of one matmul including padding of tiles and idle multiprocessors, with the best tile size."""
        least, at_once = math.inf, self.device.multiprocessors
        for height, width, speed in _TILES:
            tiles = shape.number * math.ceil(shape.rows / height) * math.ceil(shape.columns / width)
            depth = max(tiles / at_once * shape.inner, math.ceil(tiles / at_once) * min(shape.inner, _DEEP))
            least = min(least, 2.0 * height * width * depth * at_once / speed)
        return max(least / shape.number, 2.0 * shape.rows * shape.inner * shape.columns)


def peak_flops(device: DeviceSpec, dtype: str) -> float:
    """Peak FLOP/s of a dtype; one that the device does not list runs like fp32."""
    return device.peak_flops.get(dtype) or device.peak_flops.get("float32") or _DEFAULT_PEAK
