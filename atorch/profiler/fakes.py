"""Fake tensors, with real values for integers, that save what another device's operations would save.

Positions, masks and tokens do not depend on weights. They are computed for real, so a model may inspect them, for
example to skip the mask if no sequence is padded. Everything computed from a weight is fake and has no memory.

On CPUs, attention with dropout or a learned bias writes its scores, and dropout saves a mask as large as its input. On
GPUs both kinds of attention are one kernel, and a mask takes a byte an element. GPUs write scores if no kernel accepts
a call. That is so with grouped keys in fp32 before Ampere, and with a mask whose last dimension is not contiguous. It
is so with any mask on devices other than Hopper and data-center Blackwell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from atorch.errors import ArgumentError
from atorch.model.pytree import local_part, map_tensors, tensors_in

_MOST = 2**26  # elements that an operation on known values may create
_aten = torch.ops.aten


class Fakes:
    """Makes fake tensors of a device, and runs a model on them.

    dtype: replaces floating-point dtypes; None: keeps each tensor's own.
    """

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = torch.device(device), dtype
        # Real tensors that a model still holds, in lists or closures, become fakes on use.
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape without memory; for a DTensor, of this process's local part.

        Raises:
            ArgumentError: the tensor is sparse or ragged.
        """
        tensor = local_part(tensor)
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ArgumentError(f"there are no fakes of tensors of layout {tensor.layout}")
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        with self._mode:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=self._device)
        return made.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def fake_unless_known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake, or a real copy of integers with values."""
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
            return self.fake(tensor)
        return tensor.detach().to(self._device, copy=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._mode, _Known():  # type: ignore[no-untyped-call]
            yield


class _Known(TorchDispatchMode):
    """Runs operations on known integers for real, and leaves others to the fakes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_known(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func._overloadpacket is _aten._grouped_mm and args[0].dim() == 2:
            return _grouped(args, kwargs.get("offs"))
        return func(*args, **kwargs)


def _is_known(func: Any, args: Any, kwargs: Any) -> bool:
    tensors = tensors_in((args, kwargs))
    if not tensors:
        is_small = all(abs(number) <= _MOST for number in args if isinstance(number, (int, float)))
        return func._overloadpacket is _aten.arange and is_small
    if any(isinstance(tensor, FakeTensor) or tensor.is_floating_point() for tensor in tensors):
        return False
    if math.prod(max(1, tensor.numel()) for tensor in tensors) <= _MOST:
        return True
    try:
        made = func(*args, **kwargs)  # on fakes, to get the real size: elementwise operations and joins create no pairs
    except (DynamicOutputShapeException, DataDependentOutputException):
        return False
    return sum(tensor.numel() for tensor in tensors_in(made)) <= _MOST


def _grouped(args: Any, offsets: Any = None) -> torch.Tensor:
    """Result of (tokens, inner) @ (experts, inner, columns), or of the weights' gradients (inner, tokens) @ (tokens,
    columns) for every expert; the fakes' own kernel refuses all dtypes but bfloat16.
    """
    data, weight, *others = args
    ends = others[0] if others else offsets
    experts = () if weight.dim() == 3 else (ends.shape[0],)
    return torch.empty(*experts, data.shape[0], weight.shape[-1], dtype=data.dtype, device=data.device)


_IN_FP32 = (
    *("softmax", "softmin", "log_softmax", "layer_norm", "group_norm", "norm", "softplus", "cross_entropy", "nll_loss"),
    *("binary_cross_entropy_with_logits", "kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "exp", "log", "log1p"),
    *("pow", "__pow__", "__rpow__", "rsqrt", "reciprocal", "sum", "prod", "cumsum", "cumprod"),
)
"""Operations that autocast runs in fp32 on GPUs, but mostly not on CPUs (docs.pytorch.org/docs/stable/amp.html)."""

_NARROW = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)  # compute capability
_CUDNN_FIRST = (9, 10)  # Hopper and Blackwell: only there PyTorch tries cuDNN before it writes scores
_WIDEST = 256  # features of a head


def as_on(device_type: str, capability: tuple[int, int] | None = None) -> AbstractContextManager[Any]:
    """Trace operations on CPU tensors as on a device of this type.

    capability: of a CUDA device, which decides its kernels; None: an A100's.
    """
    return _AsOnGpu(capability or _AMPERE) if device_type == "cuda" else nullcontext()


class _AsOnGpu(TorchFunctionMode):
    """Substitutes the operations of CUDA devices for dropout and attention."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__()
        self._capability = capability

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "") in _IN_FP32:
            args, kwargs = map_tensors(_widened, (args, kwargs))
        if func is functional.scaled_dot_product_attention:
            return _attention(self._capability, *args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _attention(
    capability: tuple[int, int],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """A fused kernel that writes no scores, if the GPU has one for the call."""
    if query.dim() != 4:  # no kernel accepts these, neither on CPUs
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    is_grouped = enable_gqa and query.shape[1] != key.shape[1]
    if not _has_kernel(capability, query, key, value, attn_mask, dtype in _NARROW, is_grouped):
        return _written_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, dtype)
    mask = attn_mask if attn_mask is None else attn_mask.detach()
    if query.shape[-1] != value.shape[-1] and isinstance(query, FakeTensor):  # no CPU kernel accepts these
        return _efficient(query, key, value, mask, is_causal, scale, dtype)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _has_kernel(
    capability: tuple[int, int], query: Any, key: Any, value: Any, mask: Any, is_narrow: bool, is_grouped: bool
) -> bool:
    """True if PyTorch 2.11 finds a fused kernel: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

    Checked with `torch._fused_sdp_choice` on an H200 (benchmarks/measured/h200.json, `attention_kernels`).
    """
    if (mask is not None and mask.stride(-1) != 1) or (not is_grouped and query.shape[1] != key.shape[1]):
        return False
    head, of_value = int(query.shape[-1]), int(value.shape[-1])
    flash = is_narrow and capability >= _AMPERE and mask is None and head == of_value <= _WIDEST
    is_aligned = head % 8 == of_value % 8 == 0 and max(head, of_value) <= _WIDEST
    is_constant = mask is None or not mask.requires_grad
    cudnn = is_narrow and capability[0] in _CUDNN_FIRST and is_constant and is_aligned
    multiple = 8 if is_narrow else 4 if capability >= _AMPERE else 1
    efficient = not is_grouped and head % multiple == of_value % multiple == 0
    return flash or cudnn or efficient


def _efficient(
    query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None, dtype: torch.dtype
) -> Any:
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    bias = None if mask is None else _additive(mask, dtype).to(dtype).expand(*query.shape[:-1], key.shape[-2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, bias, True, is_causal=is_causal, scale=scale)[0]


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _written_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype,
) -> Any:
    """Unfused attention, in fp32 for 16-bit inputs, as torch computes it on a GPU without a kernel for the call."""
    with torch.autocast("cpu", enabled=False):
        times, factor = query.shape[-3] // key.shape[-3], (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        query, key, value = (_widened(tensor.to(dtype)) for tensor in (query, key, value))
        if times > 1:
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        scores = (query * factor) @ (key * factor).transpose(-2, -1)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = torch.softmax(scores if mask is None else scores + _additive(mask, scores.dtype), -1)
        return (_dropout(weights, dropout_p) @ value).to(dtype)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0 or inplace:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]
