"""The base of the distributed modules: whole weights at first, split over the tensor ranks at the first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from atorch.errors import ArgumentError, shown

WITHOUT_EFFECT: Mapping[str, str] = {
    "fused_softmax": "torch's attention is one kernel",
    "flash_attention": "torch chooses the kernel of its attention",
    "query_key_layer_scaling": "torch's attention scales before it sums",
    "attention_in_fp32": "torch's attention keeps its softmax in fp32",
    "fused_bias_gelu": "torch.compile fuses it",
    "fused_dropout": "torch.compile fuses it",
    "distribute_embedding": "an embedding that is marked is split",
    "zero_init": "sharded parameters are whole on a process until the first step, or delayed",
}
"""Keywords of `tensor_parallelism` that chose among the original's kernels, and why they have no effect here."""


class DistributedModule(nn.Module):
    """The base of modules that are split over the tensor ranks at the first step, unless they are marked against it.

    Until then it has its whole weights and computes as a plain module does. A subclass adds nothing else: the split
    follows from its computation.
    """


def refuse(cls: str, given: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Raise an ArgumentError for an argument that asks for an unsupported feature.

    neutral: the accepted values, which ask for nothing, by name.
    """
    for name, value in given.items():
        if value != neutral[name]:
            raise ArgumentError(
                f"{cls} was given {name} {shown(value)}, which atorch.smp has not; leave it at {neutral[name]!r}"
            )


def need_layernorm(cls: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raise an ArgumentError if a layer has no layer norm at all."""
    if not (pre_layernorm or post_layernorm):
        raise ArgumentError(
            f"{cls} was given pre_layernorm False and post_layernorm False; at least one of them has to be True"
        )


@torch.no_grad()
def drawn_normal(module: nn.Module, initializer_range: float) -> None:
    """Draw normal weights of this standard deviation for linear layers and embeddings in `module`; biases are 0."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            layer.weight.normal_(0.0, initializer_range)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.bias.zero_()
