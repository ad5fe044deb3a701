"""Checks and draws that the distributed transformer's layers share."""

from __future__ import annotations

import torch
from torch import nn

from atorch.errors import ArgumentError


def need_layernorm(cls: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raise an ArgumentError where there is no layer norm at all."""
    if not (pre_layernorm or post_layernorm):
        raise ArgumentError(
            f"{cls} was given pre_layernorm False and post_layernorm False; at least one of them has to be True"
        )


@torch.no_grad()
def drawn_normal(module: nn.Module, initializer_range: float) -> None:
    """Give linear layers and tables below `module` normal weights of this standard deviation, and biases of 0."""
    for each in module.modules():
        if isinstance(each, (nn.Linear, nn.Embedding)):
            each.weight.normal_(0.0, initializer_range)
        if isinstance(each, nn.Linear) and each.bias is not None:
            each.bias.zero_()
