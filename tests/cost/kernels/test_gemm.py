"""What a product takes by its shape: never less for more, never less than the roofline, and as others measured it."""

import itertools
import math
from dataclasses import replace

import pytest

from atorch.cluster.spec import ClusterSpec, DeviceSpec, Efficiency
from atorch.cost.gemm import GemmShape, ProductTimes

H100 = ClusterSpec.load("h100_80g").device
A100 = ClusterSpec.load("a100_80g").device
SIZES = (64, 65, 120, 128, 1000, 1024, 4096, 4100, 16384)

# (count, rows, columns, inner) → TFLOP/s on an H100 in bf16: OpenXLA, xla/service/gpu/model/matmul_interpolator_data.h.
MEASURED = {
    (1, 4096, 4096, 4096): 783.3, (4, 2048, 2048, 4096): 779.1, (2, 4096, 2048, 2048): 733.3,
    (1, 4096, 4096, 1024): 677.4, (1, 2048, 2048, 2048): 632.0, (4, 4096, 4096, 512): 619.9,
    (2, 2048, 2048, 1024): 600.2, (1, 2048, 1024, 2048): 523.3, (1, 4096, 2048, 512): 447.0,
    (1, 4096, 4096, 256): 392.2, (1, 1024, 1024, 2048): 350.0, (1, 4096, 256, 2048): 304.7,
    (1, 1024, 512, 4096): 298.9, (1, 256, 1024, 4096): 172.3, (1, 256, 512, 4096): 91.7,
}  # fmt: skip


def seconds(device, rows, inner, columns, dtype="bfloat16", **others):
    return ProductTimes(device).seconds(GemmShape(rows, inner, columns, dtype, 2.0, 2.0, **others))


def test_products_alone_on_an_h100_are_told_to_a_tenth():
    alone = Efficiency(matmul=0.85, matmul_half_flops=6e-6 * 0.85 * H100.peak_flops["bfloat16"], traffic=0.8)
    device = replace(H100, efficiency=alone)
    errors = []
    for (count, rows, columns, inner), tflops in MEASURED.items():
        taken = seconds(device, rows, inner, columns, number=count, of_activations=True)
        errors.append(abs(math.log(taken * tflops * 1e12 / (2.0 * count * rows * columns * inner))))
    assert sum(errors) / len(errors) < 0.07
    assert max(errors) < 0.25


@pytest.mark.parametrize("device", [H100, A100, replace(H100, multiprocessors=0)])
def test_more_of_anything_never_takes_less_where_memory_is_aligned(device):
    for others in itertools.product(SIZES, repeat=2):
        for place in range(3):
            shapes = [(*others[:place], size, *others[place:]) for size in SIZES]
            taken = [seconds(device, *shape) for shape in shapes]
            assert taken == sorted(taken)


@pytest.mark.parametrize("parts", [2, 3, 7, 16])
def test_rows_in_parts_never_take_less_than_together(parts):
    for rows, inner, columns in itertools.product((64, 900, 8192), SIZES, SIZES):
        assert parts * seconds(H100, rows, inner, columns) >= seconds(H100, parts * rows, inner, columns) * (1 - 1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8", "float32"])
def test_no_product_is_faster_than_the_roofline(dtype):
    for shape in itertools.product(SIZES, repeat=3):
        rows, inner, columns = shape
        computing = 2.0 * rows * inner * columns / (H100.peak_flops[dtype] * H100.efficiency.matmul)
        moving = 2.0 * (rows * inner + inner * columns + rows * columns) / H100.memory_bandwidth
        assert seconds(H100, *shape, dtype) >= max(computing, moving)


def test_tiles_that_do_not_fill_waves_cost_as_if_they_did():
    one, more = seconds(A100, 108 * 128, 4096, 128), seconds(A100, 108 * 128 + 1, 4096, 128)
    assert more > 1.05 * one


@pytest.mark.parametrize("head", [108, 150, 450])
def test_scores_of_heads_that_are_not_aligned_do_without_tensor_cores(head):
    shape = {"number": 64, "of_activations": True}
    aligned = seconds(A100, 2048, 8 * (head // 8), 2048, pitch=8 * (head // 8), **shape)
    assert seconds(A100, 2048, head, 2048, pitch=head, **shape) > 3 * aligned


def test_a_vocabulary_that_is_not_padded_takes_longer():
    padded = seconds(A100, 8192, 1024, 50304, pitch=math.gcd(1024, 50304))
    assert seconds(A100, 8192, 1024, 50257, pitch=1) > 1.5 * padded


def test_a_device_that_says_nothing_of_itself_has_no_tiles():
    plain = DeviceSpec(type="cpu", name="toy", memory_bytes=1e9, peak_flops={"float32": 1e9}, memory_bandwidth=1e12)
    assert seconds(plain, 100, 100, 100, "float32") == pytest.approx(2e6 / 1e9)
