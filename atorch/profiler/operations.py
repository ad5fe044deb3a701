"""Classifies aten operations for the planner: matmuls with a weight, attention, and a few other kinds.

Operations are recorded below autograd, where `nn.Linear`, `einsum`, `Conv1D` and `@` are a few kinds of matmuls.
Scaled dot-product attention is one fused operation or matmuls of activations (torch's own FLOP counter misses the CPU
kernel). FLOPs count a multiply-add as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

OpKind = Literal["product", "attention", "reduction", "join", "sum", "choice", "gather", "table", "other"]
IsWeight = Callable[[torch.Tensor], bool]

_aten = torch.ops.aten
_FUSED_ATTENTION = frozenset(
    (
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_fused_attention_overrideable,
    )
)
_PLACES: Mapping[Any, tuple[int, int]] = {  # positions of a matmul's two matrices
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.mv, _aten._grouped_mm), (0, 1)),
    **dict.fromkeys((_aten.addmm, _aten._addmm_activation, _aten.baddbmm, _aten.addmv), (1, 2)),
}
_KINDS: Mapping[Any, OpKind] = {
    # Reductions over all features of a token need them at once: norms.
    **dict.fromkeys(
        (
            _aten.native_layer_norm, _aten._fused_rms_norm, _aten.native_group_norm, _aten.mean, _aten.sum, _aten.var,
            _aten.var_mean, _aten.std, _aten.std_mean, _aten.linalg_vector_norm, _aten.norm, _aten.amax,
        ),
        "reduction",
    ),
    **dict.fromkeys((_aten.cat, _aten.stack, _aten.copy_), "join"),
    **dict.fromkeys((_aten.add, _aten.add_, _aten.sub, _aten.sub_), "sum"),
    **dict.fromkeys((_aten.topk, _aten.sort, _aten.argsort, _aten.argmax, _aten.max, _aten.multinomial), "choice"),
    **dict.fromkeys((_aten.index, _aten.index_select, _aten.gather, _aten.take_along_dim), "gather"),
    _aten.embedding: "table",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatmulOp:
    """`count` matmuls `(rows, inner) @ (inner, columns)` of activations `data` with `weight`."""

    rows: float
    inner: int
    columns: int
    count: int
    data: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    splits: bool = True  # False if its columns and rows cannot be split, as in a convolution
    stacked: bool = False  # one weight for each expert


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """Matmuls of activations: fused attention, its scores, or its weighted values."""

    flops: float
    query: torch.Tensor
    key: torch.Tensor
    head_dim: int
    num_heads: int = 0
    num_kv_heads: int = 0
    batch: int = 0  # batch times heads, if they are one dimension
    is_causal: bool = False


def kind_of(packet: Any) -> OpKind:
    """The kind of an operation that is neither matmul nor attention."""
    return _KINDS.get(packet, "other")


def product_of(packet: Any, args: tuple[Any, ...], out: Any, is_weight: IsWeight) -> MatmulOp | AttentionOp | None:
    """A product of matrices: with a weight, or of activations; None for any other operation."""
    if packet is _aten.convolution:
        return _convolution(args, out)
    if packet not in _PLACES:
        return None
    left, right = (args[place] for place in _PLACES[packet])
    bias = args[0] if packet in (_aten.addmm, _aten._addmm_activation) and is_weight(args[0]) else None
    if packet is _aten._grouped_mm:  # of tokens sorted by expert, assumed to be spread evenly
        experts, tokens = right.shape[0], left.numel() / left.shape[-1]
        return MatmulOp(tokens / experts, left.shape[-1], right.shape[-1], experts, left, right, stacked=True)
    if right.dim() == 1:
        right = right.unsqueeze(1)
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    count = left.shape[0] if left.dim() == 3 else 1
    data, weight = (left, right) if is_weight(right) else (right, left)
    if not is_weight(weight):
        return AttentionOp(2.0 * rows * inner * columns * count, left, right, head_dim=inner, batch=count)
    if weight is left:
        rows, columns = columns, rows
    stacked = count > 1 and weight.stride(0) > 0
    if count > 1 and not stacked:  # one weight, expanded over the batch
        rows, count = rows * count, 1
    return MatmulOp(float(rows), inner, columns, count, data, weight, bias, stacked=stacked)


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> MatmulOp:
    """The implicit product of a convolution: output positions are rows, a window of the input is inner."""
    data, weight, transposed, groups = args[0], args[1], args[6], args[8]
    positions = (data if transposed else out).numel() / (data if transposed else out).shape[1]
    columns = math.prod(weight.shape[1:]) if transposed else weight.shape[0] // groups
    inner = weight.shape[0] // groups if transposed else math.prod(weight.shape[1:])
    return MatmulOp(positions, inner, columns, groups, data, weight, splits=False)


def attention_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionOp | None:
    """Fused attention on query, key, value of shape (batch, heads, tokens, head_dim); None for any other operation.

    Causal attention computes half of the scores.
    """
    if func._overloadpacket not in _FUSED_ATTENTION:
        return None
    query, key, value = args[:3]
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    is_causal = bool(named.get("is_causal")) and query.shape[-2] == key.shape[-2]
    share = 0.5 if is_causal else 1.0
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return AttentionOp(
        flops=share * 2.0 * scores * (query.shape[-1] + value.shape[-1]),
        query=query,
        key=key,
        head_dim=query.shape[-1],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        is_causal=is_causal,
    )
