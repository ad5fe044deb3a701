"""Argument checks and weight initialization that the distributed transformer's layers share."""

from __future__ import annotations

import torch
from torch import nn

from atorch.errors import ArgumentError


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
