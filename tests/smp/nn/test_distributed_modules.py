"""On one process the modules of `smp.nn` compute what plain modules of their kind do."""

import logging
import math
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import atorch.smp as smp
from atorch import logs
from atorch.errors import ArgumentError
from atorch.smp.nn import layers

SIZES: dict[str, Any] = {
    "num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16,
    "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip


def plain_attention(layer: Any, hidden: Tensor, states: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """As the reference implementation of the documents has it, product by product."""

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], 4, 4).permute(0, 2, 1, 3)

    query, key, value = heads(layer.query(hidden)), heads(layer.key(states)), heads(layer.value(states))
    scores = query @ key.transpose(-1, -2) / math.sqrt(4)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e9)
    if mask is not None:
        scores = scores + mask
    mixed = (scores.softmax(-1) @ value).permute(0, 2, 1, 3).reshape(hidden.shape)
    return layer.dense(mixed)


def masked() -> Tensor:
    """(2, 1, 1, 5), of which the second row hides its last two."""
    mask = torch.zeros(2, 1, 1, 5)
    mask[1, :, :, 3:] = -1e4
    return mask


@pytest.mark.parametrize("causal", [None, 8])
@pytest.mark.parametrize("mask", [None, masked()], ids=["all", "masked"])
@pytest.mark.parametrize(("pre", "post"), [(False, True), (True, False), (True, True)])
def test_self_attention(causal: int | None, mask: Tensor | None, pre: bool, post: bool) -> None:
    layer = smp.nn.DistributedAttentionLayer(**SIZES, causal_mask_size=causal, pre_layernorm=pre, post_layernorm=post)
    x = torch.randn(2, 5, 16)
    normed = layer.pre_layernorm(x) if pre else x
    expected = x + plain_attention(layer, normed, normed, mask, causal=causal is not None)
    expected = layer.layernorm(expected) if post else expected
    torch.testing.assert_close(layer((x, mask)), expected)


def test_cross_attention_asks_other_states_and_has_no_causal_mask() -> None:
    layer = smp.nn.DistributedAttentionLayer(**SIZES, cross_attention=True, causal_mask_size=8)
    x, other = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    expected = layer.layernorm(x + plain_attention(layer, x, other, masked(), causal=False))
    torch.testing.assert_close(layer((x, other, masked())), expected)


def test_one_layer_is_torchs_encoder_layer() -> None:
    layer = smp.nn.DistributedTransformerLayer(**SIZES, intermediate_size=24)
    theirs = nn.TransformerEncoderLayer(16, 4, 24, 0.0, F.gelu, batch_first=True)
    attention = layer.attention
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(
            torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])
        )
        theirs.self_attn.in_proj_bias.copy_(torch.cat([attention.query.bias, attention.key.bias, attention.value.bias]))
    theirs.self_attn.out_proj.load_state_dict(attention.dense.state_dict())
    theirs.linear1.load_state_dict(layer.output.dense1.state_dict())
    theirs.linear2.load_state_dict(layer.output.dense2.state_dict())
    x = torch.randn(2, 5, 16)
    hidden, mask = layer((x, None))
    assert mask is None
    torch.testing.assert_close(hidden, theirs(x))


def test_states_pass_through_layers_with_cross_attention() -> None:
    model = smp.nn.DistributedTransformer(
        num_layers=2, **SIZES, intermediate_size=24, add_cross_attention=True, activation="relu"
    )
    given = torch.randn(2, 3, 16), torch.randn(2, 5, 16), None, masked()
    first, second = model.seq_layers
    assert first.cross_attention.is_cross_attention
    hidden, cross, mask, cross_mask = model(given)
    assert (cross, mask, cross_mask) == given[1:]
    seen = first.cross_attention((first.attention((given[0], None)), cross, cross_mask))
    after_first = first.output.layernorm(seen + first.output.dense2(F.relu(first.output.dense1(seen))))
    torch.testing.assert_close(hidden, second((after_first, cross, mask, cross_mask))[0])


def language_model(**settings: Any) -> Any:
    return smp.nn.DistributedTransformerLMHead(
        num_layers=1, **{**SIZES, **settings}, intermediate_size=24, vocab_size=11, num_positions=8
    )


def test_language_model_masks_ties_and_scores() -> None:
    model = language_model(causal_mask_size=8, pre_layernorm=True, post_layernorm=False, num_token_types=2)
    assert model.lm_head.weight is model.word_embedding.weight
    ids, types = torch.randint(0, 11, (2, 5)), torch.randint(0, 2, (2, 5))
    hidden_positions = torch.zeros(2, 5, dtype=torch.long)
    hidden_positions[1, 1:3] = 1
    loss, logits = model((ids, hidden_positions, types, None, ids))
    embedded = model.word_embedding(ids) + model.position_embedding.weight[:5] + model.token_type_embedding(types)
    added = hidden_positions[:, None, None].float() * -1e4
    torch.testing.assert_close(logits, model.transformer((embedded, added))[0] @ model.word_embedding.weight.T)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:]))
    torch.testing.assert_close(model((ids, hidden_positions, types, None, None)), logits)
    reversed_positions = torch.arange(5).flip(0)[None]
    assert not torch.allclose(model((ids, None, types, reversed_positions, None)), logits)


def test_without_causal_mask_labels_stand_where_they_are() -> None:
    model = language_model()
    ids, labels = torch.randint(0, 11, (2, 5)), torch.full((2, 5), -100)
    labels[0, 2] = 7
    loss, logits = model((ids, None, None, None, labels))
    torch.testing.assert_close(loss, F.cross_entropy(logits[0, 2], torch.tensor(7)))


def test_without_a_head_there_are_hidden_states() -> None:
    model = language_model(add_lm_head=False)
    ids = torch.randint(0, 11, (2, 5))
    assert model((ids, None, None, None, None)).shape == (2, 5, 16)
    with pytest.raises(ArgumentError, match="add_lm_head True"):
        model((ids, None, None, None, ids))


def test_documented_defaults() -> None:
    with torch.device("meta"):
        model = smp.nn.DistributedTransformerLMHead()
    assert len(model.transformer.seq_layers) == 12
    layer = model.transformer.seq_layers[0]
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters() if "weight" in name}
    assert shapes["attention.query.weight"] == shapes["attention.dense.weight"] == (1024, 1024)
    assert shapes["output.dense1.weight"] == (4096, 1024)
    assert layer.attention.pre_layernorm is None
    assert layer.attention.layernorm.eps == 1e-5
    assert (layer.attention.attention_dropout_prob, layer.attention.dropout.p, layer.output.dropout.p) == (0.1,) * 3
    assert model.word_embedding.weight.shape == (30522, 1024)
    assert model.position_embedding.weight.shape == (1024, 1024)
    assert model.token_type_embedding is None


def test_dropouts_act_in_training_alone() -> None:
    for prob in ("attention_dropout_prob", "hidden_dropout_prob"):
        layer = smp.nn.DistributedTransformerLayer(**{**SIZES, prob: 0.5}, intermediate_size=24)
        x = torch.randn(2, 5, 16)
        assert not torch.equal(layer((x, None))[0], layer((x, None))[0])
        layer.eval()
        assert torch.equal(layer((x, None))[0], layer((x, None))[0])


def test_normal_initialization() -> None:
    layer = smp.nn.DistributedTransformerLayer(
        **SIZES, intermediate_size=64, use_normal_initialization=True, initializer_range=0.5
    )
    assert layer.output.dense1.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert not layer.output.dense1.bias.any()
    table = smp.nn.DistributedEmbedding(100, 64, padding_idx=3)
    assert table.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not table.weight[3].any()
    given = torch.randn(4, 2)
    assert torch.equal(smp.nn.DistributedEmbedding(4, 2, _weight=given).weight, given)


def test_residuals_are_added_in_fp32_where_that_is_asked() -> None:
    large = torch.linspace(40_000, 60_000, 16).half()[None, None]
    finite = {}
    for in_fp32 in (False, True):
        layer = smp.nn.DistributedTransformerOutputLayer(16, 24, 0.0, fp32_residual_addition=in_fp32).half()
        nn.init.zeros_(layer.dense2.weight)
        nn.init.constant_(layer.dense2.bias, 30_000.0)
        nn.init.zeros_(layer.dense1.weight)
        result = layer(large)
        assert result.dtype == torch.float16
        finite[in_fp32] = bool(result.isfinite().all())
    assert finite == {False: False, True: True}


SHAPES: list[Any] = [6, (6,), [3, 6], torch.Size([2, 3, 6])]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_gradients_and_state_are_torchs(shape: Any, affine: bool) -> None:
    plain, fused = nn.LayerNorm(shape, 1e-3, affine), smp.nn.FusedLayerNorm(shape, 1e-3, affine)
    assert list(fused.state_dict()) == list(plain.state_dict()) == (["weight", "bias"] if affine else [])
    for each in plain.parameters():
        nn.init.normal_(each)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(4, 2, 3, 6)
    given = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(each) for module, each in zip((plain, fused), given, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.pow(3).sum().backward()
    assert torch.equal(given[0].grad, given[1].grad)
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("affine", [True, False])
def test_apexs_kernel_is_called_on_cuda(monkeypatch: pytest.MonkeyPatch, affine: bool) -> None:
    calls: list[str] = []
    apex = types.ModuleType("apex.normalization.fused_layer_norm")

    def fused_layer_norm(input: Tensor, shape: Any, eps: float = 1e-6) -> Tensor:
        calls.append("plain")
        return F.layer_norm(input, shape, eps=eps)

    def fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float = 1e-6) -> Tensor:
        calls.append("affine")
        return F.layer_norm(input, shape, weight, bias, eps)

    vars(apex).update(fused_layer_norm=fused_layer_norm, fused_layer_norm_affine=fused_layer_norm_affine)
    for name in ("apex", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, apex.__name__, apex)
    module, plain, x = smp.nn.FusedLayerNorm(4, 0.1, affine), nn.LayerNorm(4, 0.1, affine), torch.randn(3, 4)
    assert torch.equal(module(x), plain(x))
    assert calls == []
    monkeypatch.setattr(layers, "_is_cuda", lambda input: True)
    assert torch.equal(module(x), plain(x))
    assert calls == ["affine" if affine else "plain"]


def test_that_it_is_torchs_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logs.log_once.cache_clear()
    with caplog.at_level(logging.INFO, "atorch"):
        for _ in range(3):
            smp.nn.FusedLayerNorm(4)
    assert len([message for message in caplog.messages if "FusedLayerNorm is torch's" in message]) == 1
