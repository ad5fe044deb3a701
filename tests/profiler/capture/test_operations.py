"""The matrices of products, whatever operation they come as."""

import pytest
import torch
from torch import nn

from atorch.profiler.operations import AttentionOp, MatmulOp, attention_of, kind_of, product_of

aten = torch.ops.aten


def shapes(packet, weight, *operands, out=None):
    found = product_of(packet, operands, out, lambda tensor: tensor is weight)
    assert isinstance(found, MatmulOp)
    return found.rows, found.inner, found.columns, found.count


def test_products_of_weights():
    data, weight, bias = torch.empty(6, 4), torch.empty(4, 5), torch.empty(5)
    assert shapes(aten.mm, weight, data, weight) == (6, 4, 5, 1)
    assert shapes(aten.mm, data, data, weight) == (5, 4, 6, 1)  # the weight on the left
    assert shapes(aten.addmm, weight, bias, data, weight) == (6, 4, 5, 1)
    assert shapes(aten.mv, weight, weight, torch.empty(5)) == (1, 5, 4, 1)
    assert product_of(aten.addmm, (bias, data, weight), None, lambda tensor: tensor is not data).bias is bias

    data = torch.empty(3, 6, 4)
    once, each = torch.empty(4, 5).expand(3, 4, 5), torch.empty(3, 4, 5)
    assert shapes(aten.bmm, once, data, once) == (18, 4, 5, 1)
    assert shapes(aten.bmm, each, data, each) == (6, 4, 5, 3)
    assert product_of(aten.bmm, (data, each), None, lambda tensor: tensor is each).stacked
    assert not product_of(aten.bmm, (data, once), None, lambda tensor: tensor is once).stacked

    weight = torch.empty(8, 4, 5)
    assert shapes(aten._grouped_mm, weight, torch.empty(24, 4), weight) == (3, 4, 5, 8)

    assert [kind_of(each) for each in (aten.native_layer_norm, aten.cat, aten.topk, aten.gelu)] == [
        "reduction", "join", "choice", "other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "image", "expected"),
    [
        (nn.Conv2d(6, 10, 3, stride=2), (2, 6, 9, 9), (2 * 4 * 4, 6 * 9, 10, 1)),
        (nn.Conv2d(6, 12, 3, groups=3), (2, 6, 9, 9), (2 * 7 * 7, 2 * 9, 4, 3)),
        (nn.Conv1d(6, 6, 4, groups=6), (2, 6, 9), (2 * 6, 4, 1, 6)),
        (nn.ConvTranspose2d(6, 10, 2, stride=2), (2, 6, 5, 5), (2 * 5 * 5, 6, 10 * 4, 1)),
    ],
)
def test_convolutions_are_their_implicit_products(layer, image, expected):
    data, out = torch.empty(image), layer(torch.empty(image))
    args = (data, layer.weight, None, None, None, None, isinstance(layer, nn.ConvTranspose2d), None, layer.groups)
    assert shapes(aten.convolution, layer.weight, *args, out=out) == expected


def test_products_of_activations_are_attention():
    found = product_of(aten.bmm, (torch.empty(8, 6, 4), torch.empty(8, 4, 6)), None, lambda tensor: False)
    assert isinstance(found, AttentionOp)
    assert (found.flops, found.head_dim, found.batch) == (2 * 8 * 6 * 4 * 6, 4, 8)

    func = aten._scaled_dot_product_flash_attention_for_cpu.default
    query, key = torch.empty(2, 8, 6, 4), torch.empty(2, 2, 6, 4)
    whole, half = (attention_of(func, (query, key, key, 0.0, causal), {}) for causal in (False, True))
    assert whole.flops == 2 * half.flops == 2 * 2 * 2 * 8 * 6 * 6 * 4
    assert (whole.num_heads, whole.num_kv_heads, whole.head_dim) == (8, 2, 4)
    assert attention_of(aten.mm.default, (query, key), {}) is None
