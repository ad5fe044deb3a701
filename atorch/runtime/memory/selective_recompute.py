"""Selective recomputation: keep the results of products with weights and of attention, and recompute the rest.

Products and attention do nearly all of a block's work, while norms, activations and dropout take much of its memory. So
little is computed twice (Korthikanti et al. 2022, arXiv 2205.05198, section 5; unlike there, attention is kept, since
fused attention saves no scores). It uses torch's selective checkpointing.

Products of activations with one another (`bmm`, in eager attention) are recomputed, since their results grow with the
square of the sequence. So is attention with dropout: with a kept result it would draw no random numbers in the
recompute, and all later ones of the block would differ from forward's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_PRODUCTS: Set[Any] = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._grouped_mm.default,
    }
)
_ATTENTION: Set[Any] = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.aten._flash_attention_forward.default,
        torch.ops.aten._efficient_attention_forward.default,
    }
)


def selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The modes of forward and its recompute: the first keeps results, the second returns them."""
    contexts: tuple[TorchDispatchMode, TorchDispatchMode] = create_selective_checkpoint_contexts(policy)
    return contexts


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep an operation's result, or recompute it."""
    if op in _PRODUCTS or (op in _ATTENTION and not _draws(op, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if attention draws random numbers, for dropout."""
    names = (argument.name for argument in op._schema.arguments)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(arguments.get("dropout_p", 0.0))
