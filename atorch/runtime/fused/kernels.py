"""LayerNorm and cross entropy by the kernels of other packages, on CUDA.

torch computes LayerNorm in one operation on every device, so nothing is faster on a CPU. On CUDA, NVIDIA's apex has
another kernel for it (built from its repository: the package of that name on PyPI is not NVIDIA's). Liger's cross
entropy computes the gradient in the forward pass, in the memory of the logits.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from atorch.model.module_swap import SwapReport, swap_candidates


def fuse_layer_norms(model: nn.Module, device: torch.device) -> SwapReport:
    """Replace `nn.LayerNorm` by apex's `FusedLayerNorm`, if the model will run on CUDA and apex is installed.

    `device` is the device on which the model will run. On other devices, and without apex, the report states why
    torch's own is kept.
    """
    fused = _attribute("apex.normalization", "FusedLayerNorm")

    def build(name: str, module: Any) -> nn.Module | str:
        if device.type != "cuda":
            return "torch's LayerNorm is one operation here already; nothing is faster"
        if fused is None:
            return "torch's LayerNorm is one operation already, and apex, which has another kernel, is not installed"
        if module.elementwise_affine and module.bias is None:
            return "apex has no LayerNorm with a weight and no bias"
        twin: nn.Module = fused(module.normalized_shape, module.eps, module.elementwise_affine)
        if module.elementwise_affine:
            twin.weight, twin.bias = module.weight, module.bias
        return twin

    return swap_candidates(model, lambda module: type(module) is nn.LayerNorm, build)


def fuse_cross_entropy(model: nn.Module, device: torch.device) -> SwapReport:
    """Replace `nn.CrossEntropyLoss` modules by Liger's kernel, on CUDA.

    The kernel overwrites the logits with the gradient. So code that reads them after the loss, such as an accuracy,
    gets wrong values. This cannot be detected, so the replacement is only done on request. A loss that is computed by
    a function, as in transformers, is no module and stays.
    """
    liger = _attribute("liger_kernel.transformers.cross_entropy", "LigerCrossEntropyLoss")

    def build(name: str, module: Any) -> nn.Module | str:
        if device.type != "cuda":
            return "the fused cross entropy is a CUDA kernel; nothing is faster here"
        if liger is None:
            return "liger-kernel, which has the fused cross entropy, is not installed"
        knobs = {
            "weight": module.weight,
            "ignore_index": module.ignore_index,
            "label_smoothing": module.label_smoothing,
            "reduction": module.reduction,
        }
        return FlatCrossEntropy(module, liger(**knobs))

    return swap_candidates(model, lambda module: type(module) is nn.CrossEntropyLoss, build)


class FlatCrossEntropy(nn.Module):
    """`kernel` if logits are (rows, classes) and targets are class numbers; else torch's loss."""

    def __init__(self, source: nn.CrossEntropyLoss, kernel: nn.Module) -> None:
        super().__init__()
        self.source, self.kernel = source, kernel

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        flat = input.is_cuda and input.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
        flat = flat and type(input) is torch.Tensor  # no tensor that is sharded over processes
        loss: torch.Tensor = (self.kernel if flat else self.source)(input, target)
        return loss


def _attribute(module: str, name: str) -> Any:
    """`module.name`, or None if the package is not installed or has no such attribute."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
