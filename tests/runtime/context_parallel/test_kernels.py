"""Kernels agree with the formula and with torch's attention, parts of rows included."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from atorch.runtime.context_parallel.load_balancing import (
    CPU,
    EFFICIENT,
    FLASH,
    FORMULA,
    Attended,
    Kernel,
    PartialAttention,
    _kernel,
    attend,
)
from atorch.runtime.context_parallel.load_balancing import gradients as part_gradients

BATCH, HEADS, GROUPS, ROWS, DIM = 2, 4, 2, 8, 8


def tensors(dtype: torch.dtype = torch.float32, columns: int = ROWS, device: str = "cpu") -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (HEADS, ROWS), (GROUPS, columns), (GROUPS, columns)
    return tuple(torch.randn(BATCH, *shape, DIM, dtype=dtype, device=device) for shape in shapes)


def masks() -> dict[str, Tensor | None]:
    sees = torch.rand(BATCH, 1, ROWS, ROWS, generator=torch.Generator().manual_seed(1)) > 0.3
    sees[0, 0, 2] = False  # a query that sees nothing
    learnt = torch.randn(1, HEADS, ROWS, ROWS, generator=torch.Generator().manual_seed(2))
    return {"none": None, "causal": None, "padded": sees[:, :, 3:4], "bool": sees, "added": learnt}


@pytest.mark.parametrize("kernel", [CPU, FORMULA], ids=["fused", "formula"])
@pytest.mark.parametrize("name", masks())
def test_it_is_torchs_attention(kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atorch.runtime.context_parallel.load_balancing._kernel", lambda _: kernel)
    mask, is_causal = masks()[name], name == "causal"
    inputs = [each.requires_grad_() for each in tensors()]
    expected = scaled_dot_product_attention(*inputs, mask, is_causal=is_causal, enable_gqa=True)
    grad = torch.randn(expected.shape)
    wanted = torch.autograd.grad(expected, inputs, grad)
    query, key, value = (each.detach() for each in inputs)
    part = PartialAttention(query, key, value, mask, is_causal, DIM**-0.5)
    found = attend(part)
    scores = query @ part.repeated(key).transpose(-2, -1) * part.scale
    bias = part.bias(torch.float32)
    scores = scores if bias is None else scores + bias
    logs = (scores.masked_fill(~torch.ones(ROWS, ROWS).tril().bool(), -torch.inf) if is_causal else scores).logsumexp(
        -1
    )
    torch.testing.assert_close(found.out, expected.detach())
    torch.testing.assert_close(found.logs, logs)
    whole = Attended(found.out, found.logs.masked_fill(found.logs == -torch.inf, 0.0))
    for one, other in zip(part_gradients(part, grad, whole), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_dropout_drops_its_share_keeps_the_mean_and_has_its_own_gradients() -> None:
    query, key, value = (each.double() for each in tensors())
    parts = [PartialAttention(query, key, value, scale=DIM**-0.5, dropout_p=0.25, seed=seed) for seed in range(400)]
    mean = torch.stack([attend(part).out for part in parts]).mean(0)
    expected = attend(PartialAttention(query, key, value, scale=DIM**-0.5)).out
    assert (mean - expected).norm() < 0.1 * expected.norm()
    assert not attend(parts[0]).out.equal(attend(parts[1]).out)
    found, grad = attend(parts[0]), torch.randn(query.shape, dtype=torch.float64)
    exact = part_gradients(parts[0], grad, found)
    step, along = 1e-6, torch.randn(key.shape, dtype=torch.float64)
    moved = attend(PartialAttention(query, key + step * along, value, scale=DIM**-0.5, dropout_p=0.25, seed=0)).out
    assert float(((moved - found.out) * grad).sum() / step) == pytest.approx(float((exact[1] * along).sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("kernel", "dtype", "mask", "rows"),
    [(FLASH, torch.bfloat16, False, 24), (EFFICIENT, torch.float32, False, 20), (EFFICIENT, torch.float16, True, 24)],
)
def test_what_is_asked_of_kernels_of_cuda(
    kernel: Kernel, dtype: torch.dtype, mask: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their signatures and shapes, on fakes; tests/gpu has their numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with FakeTensorMode():
        query = torch.empty(BATCH, HEADS, rows, 16, dtype=dtype, device="cuda")
        key = torch.empty(BATCH, GROUPS, 16, 16, dtype=dtype, device="cuda")
        sees = torch.empty(BATCH, 1, rows, 16, dtype=torch.bool, device="cuda") if mask else None
        part = PartialAttention(query, key, key, sees)
        found = attend(part)
        assert found.logs.shape == query.shape[:-1]
        assert kernel.forward(part).out.shape == found.out.shape == query.shape
        assert [each.shape for each in part_gradients(part, query, found)] == [query.shape, key.shape, key.shape]


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_efficient_kernel_gets_results_as_it_lays_them_out(
    is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a row of all heads to be one piece of memory, and in 16 bits reads results so: on a GPU, tests/gpu."""
    strides = []

    def backward(grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, *_: Any, **__: Any) -> Any:
        strides.append(out.stride())
        return query, key, value, None

    monkeypatch.setattr(
        "atorch.runtime.context_parallel.load_balancing._aten",
        SimpleNamespace(_scaled_dot_product_efficient_attention_backward=backward),
    )
    query = torch.randn(BATCH, HEADS, ROWS, DIM)
    out = query.transpose(1, 2).contiguous().transpose(1, 2) if is_turned else query.clone()
    EFFICIENT.backward(PartialAttention(query, query, query), query, Attended(out, torch.zeros(BATCH, HEADS, ROWS)))
    assert strides == [(ROWS * HEADS * DIM, DIM, HEADS * DIM, 1)]


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "kernel"),
    [
        ((7, 0), torch.float16, 64, EFFICIENT),
        ((7, 5), torch.bfloat16, 64, FORMULA),
        ((8, 0), torch.bfloat16, 256, FLASH),
        ((8, 9), torch.float16, 64, FLASH),
        ((8, 9), torch.float16, 256, EFFICIENT),
        ((9, 0), torch.float32, 64, EFFICIENT),
    ],
)
def test_a_device_gets_a_kernel_that_it_has(
    capability: tuple[int, int], dtype: torch.dtype, dim: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        tensor = torch.empty(BATCH, HEADS, ROWS, dim, dtype=dtype, device="cuda")
    assert _kernel(PartialAttention(tensor, tensor, tensor)) is kernel
