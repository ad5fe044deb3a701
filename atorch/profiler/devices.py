"""What PyTorch would run on another device, where that changes what is kept for backward.

On CPUs, attention with dropout or with a learned bias writes its scores out, and dropout keeps a mask as large as its
input; on GPUs attention is one kernel in either case, and a mask is a byte an element.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from atorch.profiler.tensors import map_tensors

_IN_FP32 = (
    *("softmax", "softmin", "log_softmax", "layer_norm", "group_norm", "norm", "softplus", "cross_entropy", "nll_loss"),
    *("binary_cross_entropy_with_logits", "kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "exp", "log", "log1p"),
    *("pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "sum", "prod", "cumsum", "cumprod"),
)
"""Operations that autocast runs in fp32 on GPUs, most of them not on CPUs: https://docs.pytorch.org/docs/stable/amp.html"""


def as_on(device_type: str) -> AbstractContextManager[Any]:
    """Operations on tensors of the CPU are traced as they would be on a device of this type."""
    return _AsOnGpu() if device_type == "cuda" else nullcontext()


class _AsOnGpu(TorchFunctionMode):
    """Chooses the operations that CUDA devices have for dropout and attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in _IN_FP32:
            args, kwargs = map_tensors(_widened, (args, kwargs))
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    mask = attn_mask if attn_mask is None else attn_mask.detach()
    return functional.scaled_dot_product_attention(query, key, value, mask, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0 or inplace:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
