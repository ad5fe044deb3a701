"""On a GPU attention is one operation, dropout keeps a byte an element, and autocast runs more in fp32."""

import pytest
import torch
from torch.nn import functional

from atorch.profiler.devices import as_on


def saved_bytes(function, *tensors):
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*tensors)
    own = {tensor.untyped_storage()._cdata for tensor in tensors}
    return sum(size for storage, size in kept.items() if storage not in own)


def test_dropout_keeps_a_mask_of_bytes():
    inputs = torch.randn(100, requires_grad=True)
    assert saved_bytes(functional.dropout, inputs) == 400
    with as_on("cuda"):
        assert saved_bytes(functional.dropout, inputs) == 100
        assert torch.equal(functional.dropout(inputs, training=False), inputs)
        assert saved_bytes(torch.nn.Dropout(0.5), inputs) == 100


def test_autocast_runs_in_fp32_what_gpus_do():
    """Lists of https://docs.pytorch.org/docs/stable/amp.html; without autocast nothing changes."""
    narrow, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, 8)
    wide = [
        lambda: functional.layer_norm(narrow, (8,)),
        lambda: narrow.softmax(dim=-1),
        lambda: torch.pow(narrow, 3.0),
        lambda: narrow**2,
        lambda: narrow.sum(),
    ]
    with as_on("cuda"):
        assert {each().dtype for each in wide} == {torch.bfloat16}
        with torch.autocast("cpu", torch.bfloat16):
            assert {each().dtype for each in wide} == {torch.float32}
            assert functional.linear(narrow, weight).dtype == functional.gelu(narrow).dtype == torch.bfloat16


def test_attention_writes_no_scores():
    query, key, value = (torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 64, 64, requires_grad=True)

    def attend(*tensors):
        return functional.scaled_dot_product_attention(*tensors, dropout_p=0.1)

    scores = 4 * 2 * 64 * 64
    assert saved_bytes(attend, query, key, value) > scores
    with as_on("cuda"):
        assert saved_bytes(attend, query, key, value) < scores
        assert saved_bytes(attend, query, key, value, bias) < scores
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.allclose(out, functional.scaled_dot_product_attention(query, key, value, is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, torch.float32, torch.bool])
def test_attention_writes_scores_where_no_kernel_takes_it(mask, is_causal):
    """By what torch 2.11 chooses and keeps on an H200: grouped keys in fp32, and masks that do not lie in rows."""
    query = torch.randn(1, 4, 64, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(2))
    bias = None if mask is None or is_causal else (torch.randn(1, 4, 64, 64) > 0).to(mask)
    kwargs = {"is_causal": is_causal, "enable_gqa": True}
    scores = 4 * 4 * 64 * 64

    def attend(*tensors, **kwargs):
        return functional.scaled_dot_product_attention(*tensors, **kwargs)

    with as_on("cuda"):
        found = attend(query, key, value, bias, **kwargs)
        assert saved_bytes(lambda *each: attend(*each, bias, **kwargs), query, key, value) > scores
        with torch.autocast("cpu", torch.bfloat16):
            assert saved_bytes(lambda *each: attend(*each, bias, **kwargs), query, key, value) < scores
        turned = torch.randn(1, 64, 64, 4).permute(0, 3, 1, 2)  # as T5's bias
        narrow = [each.detach().bfloat16().requires_grad_() for each in (query, key, value)]
        assert saved_bytes(lambda *each: attend(*each, turned.bfloat16(), enable_gqa=True), *narrow) > scores
        assert attend(*narrow, turned.bfloat16(), enable_gqa=True).dtype == torch.bfloat16
    assert torch.allclose(found, attend(query, key, value, bias, **kwargs), atol=1e-6)
