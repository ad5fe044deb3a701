"""Layer normalization by apex's kernel, where apex is installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from atorch.logs import say_once

NormShape = int | list[int] | torch.Size


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, computed by apex's kernel for CUDA inputs if apex is installed, else by torch.

    torch computes it in one operation, too. A missing apex is logged once.

    Args:
        normalized_shape: the last dimensions of the input, over which to normalize.
        eps: added to the variance.
        elementwise_affine: multiply by `weight` and add `bias`, each of that shape.
    """

    def __init__(self, normalized_shape: NormShape, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self._has_apex = _apex() is not None  # once: a search for a missing package scans the whole path
        if not self._has_apex and torch.cuda.is_available():
            say_once(
                "smp.nn.FusedLayerNorm is torch's layer_norm, which computes the same: apex is not installed (build "
                "NVIDIA's from its repository)",
                logging.WARNING,
            )
        elif not torch.cuda.is_available():
            say_once("smp.nn.FusedLayerNorm is torch's layer_norm, which computes the same: there is no CUDA device")

    def forward(self, input: Tensor) -> Tensor:
        """`input` of `(…, *normalized_shape)`, normalized."""
        apex = _apex() if self._has_apex and _is_cuda(input) else None
        if apex is None:
            return super().forward(input)
        affine = (self.weight, self.bias) if self.elementwise_affine else ()
        kernel: Callable[..., Tensor] = apex.fused_layer_norm_affine if affine else apex.fused_layer_norm
        return kernel(input, *affine, self.normalized_shape, self.eps)


def _is_cuda(input: Tensor) -> bool:
    return input.is_cuda


def _apex() -> ModuleType | None:
    try:
        return importlib.import_module("apex.normalization.fused_layer_norm")
    except ImportError:
        return None
