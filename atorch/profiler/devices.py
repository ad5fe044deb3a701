"""Stand-ins for the operations of another device, where these change what is kept for backward.

On CPUs, attention with dropout or with a learned bias writes its scores out, and dropout keeps a mask as large as its
input; on GPUs attention is one kernel in either case, and a mask is a byte an element. GPUs write scores out where none
of their kernels takes a call: in fp32 with keys that heads share, and with a mask of which rows do not lie in a row.
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

_NARROW = (torch.float16, torch.bfloat16)


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
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """One kernel that writes no scores, where a GPU has one: `torch._fused_sdp_choice`, asked on an H200."""
    is_narrow = query.dtype in _NARROW or torch.is_autocast_enabled("cpu")
    is_grouped = query.shape[-3] != key.shape[-3]  # keys that several heads share: kernels of 16 bits alone take them
    if (is_grouped and not is_narrow) or (attn_mask is not None and attn_mask.stride(-1) != 1):
        return _written_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    mask = attn_mask if attn_mask is None else attn_mask.detach()
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _written_attention(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> Any:
    """The formula, 16 bits in fp32, as torch computes it on a GPU where no kernel takes the call."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    with torch.autocast("cpu", enabled=False):
        times, factor = query.shape[-3] // key.shape[-3], (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        query, key, value = (_widened(each.to(dtype)) for each in (query, key, value))
        if times > 1:
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = (query * factor) @ (key * factor).transpose(-2, -1)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        return (_dropout(weights, dropout_p) @ value).to(dtype)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0 or inplace:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
