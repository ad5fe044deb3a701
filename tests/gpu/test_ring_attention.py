"""Kernels of CUDA give parts of attention, and of its gradients, as the formula does."""

from dataclasses import replace

import pytest
import torch

from atorch.runtime.context_parallel.load_balancing import (
    EFFICIENT,
    FLASH,
    FORMULA,
    Kernel,
    PartialAttention,
    attend,
    gradients,
)
from atorch.runtime.context_parallel.load_balancing import _kernel as kernel_of

pytestmark = pytest.mark.gpu

BATCH, HEADS, GROUPS, COLUMNS, DIM = 2, 4, 2, 40, 64


@pytest.mark.parametrize(
    ("dtype", "masked", "rows", "kernel", "close"),
    [
        (torch.bfloat16, False, 40, FLASH, 1.5e-2),
        (torch.float16, False, 24, FLASH, 3e-3),
        (torch.float32, False, 24, EFFICIENT, 2e-3),
        (torch.float32, True, 40, EFFICIENT, 2e-3),
        (torch.bfloat16, True, 24, EFFICIENT, 1.5e-2),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_agree_with_the_formula(
    dtype: torch.dtype, masked: bool, rows: int, kernel: Kernel, close: float, is_causal: bool
) -> None:
    """Bands: two roundings of the dtype; fp32 products may be TF32's. The first query of a mask sees nothing."""
    if is_causal and (masked or rows != COLUMNS):
        pytest.skip("a causal part is square and has no mask")
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, rows), (GROUPS, COLUMNS), (GROUPS, COLUMNS), (HEADS, rows)
    query, key, value, grad = (
        torch.randn(BATCH, *shape, DIM, generator=generator).to("cuda", dtype) for shape in shapes
    )
    mask = torch.rand(BATCH, 1, rows, COLUMNS, generator=generator).cuda() > 0.3 if masked else None
    if mask is not None:
        mask[:, :, 0] = False
    part = PartialAttention(query, key, value, mask, is_causal, DIM**-0.5)
    assert kernel_of(part) is kernel
    exact = replace(part, query=query.double(), key=key.double(), value=value.double())
    assert kernel_of(exact) is FORMULA
    found, expected = attend(part), attend(exact)
    torch.testing.assert_close(found.logs.isinf(), expected.logs.isinf())
    finite = [each._replace(logs=each.logs.masked_fill(each.logs == -torch.inf, 0.0)) for each in (found, expected)]
    got = found.out, finite[0].logs, *gradients(part, grad, finite[0])
    wanted = expected.out, finite[1].logs, *gradients(exact, grad.double(), finite[1])
    for one, other in zip(got, wanted, strict=True):
        assert (one.double() - other).norm() <= close * other.norm()
