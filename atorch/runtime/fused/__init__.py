"""Norms and cross entropies as one operation each: RMSNorm here, LayerNorm and cross entropy by other packages on CUDA.

    y = x / sqrt(mean(x²) + eps) · weight        (RMSNorm: Zhang and Sennrich 2019, equation 4)

For the eager sequence in most models, autograd saves x, the normalized x and, in low precision, fp32 copies of both.
One function that saves x and the reciprocal root needs half of that in fp32 and a third in bf16. CUDA has a kernel for
it (`torch.nn.functional.rms_norm`). Elsewhere it is again the eager sequence, so the backward pass is written here.

Models use many names for the norm, and differ in details. The weight may be stored as an offset from 1, and the product
with it may come before or after the cast to low precision. So a module is recognized by its structure and compared with
each of four variants on random input. It is replaced only if outputs, gradients and dtypes agree.

torch computes LayerNorm in one operation on every device, so nothing is faster on a CPU. On CUDA, NVIDIA's apex has
another kernel for it (built from its repository: the package of that name on PyPI is not NVIDIA's). Liger's cross
entropy computes the gradient in the forward pass, in the memory of the logits.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import rms_norm

from atorch.model.copy import duplicate
from atorch.model.module_swap import SwapReport, swap_candidates

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


class Variant(NamedTuple):
    """Differences of a model's RMSNorm from the equation."""

    offset: float  # added to the stored weight: 0, or 1 if the stored weight starts at zero
    cast_first: bool  # cast the normalized x to its dtype before the product with the weight


class FusedRMSNorm(nn.Module):
    """RMSNorm over the last dimension, (…, hidden) → (…, hidden), with a weight of shape (hidden,)."""

    def __init__(self, weight: nn.Parameter, eps: float, variant: Variant) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps
        self.eps = eps
        self.variant = variant

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if self.variant.offset:
            # The sum is in fp32 if the product is, since a bf16 weight near 1 has only three digits.
            weight = (weight if self.variant.cast_first else weight.float()) + self.variant.offset
        if hidden_states.is_cuda and hidden_states.dtype == weight.dtype:
            return rms_norm(hidden_states, weight.shape, weight, self.eps)
        if torch.compiler.is_compiling():
            # A compiler fuses the formula into one kernel, and decides itself what to save.
            return _weighted(hidden_states, _scale(hidden_states, self.eps), weight, self.variant.cast_first)
        return _RMSNorm.apply(hidden_states, weight, self.eps, self.variant.cast_first)  # type: ignore[no-any-return, no-untyped-call]

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, {self.variant}"


def _scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x²) + eps) in fp32, (…, hidden) → (…, 1)."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def _weighted(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, cast_first: bool) -> torch.Tensor:
    if cast_first:
        return (x.float() * scale).to(x.dtype) * weight
    return (x.float() * scale * weight.float()).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm that saves x, the weight and one number a row.

    With r = 1 / sqrt(mean(x²) + eps), x̂ = r·x and g the gradient of y:
    dweight = Σ g·x̂ over rows, dx = r·(g·weight - x̂·mean(g·weight·x̂)).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, cast_first: bool) -> torch.Tensor:
        scale = _scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return _weighted(x, scale, weight, cast_first)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second-order gradient passes through the scale, too
            scale = _scale(x, ctx.eps)
        normalized = x.float() * scale
        grad = grad.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weighted = grad * weight.float()
            grad_x = scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))
            grad_x = grad_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normalized).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None, None


def fuse_rms_norms(model: nn.Module) -> SwapReport:
    """Replace every module that is an RMSNorm by `FusedRMSNorm`, in place; names, weights and results stay.

    Candidates have one 1-D parameter `weight`, no children and an epsilon. `torch.nn.RMSNorm` and LayerNorm are not
    replaced, since torch runs them as one operation if its kernels allow. The report has candidates that stay.
    """
    verdicts: dict[Hashable, Variant | None] = {}

    def build(name: str, module: nn.Module) -> nn.Module | str:
        norm = _as_norm(module)
        assert norm is not None, "it is a candidate"
        key = _signature(module, norm[0])
        if key not in verdicts:
            verdicts[key] = recognise(module)
        if (variant := verdicts[key]) is not None:
            return FusedRMSNorm(*norm, variant)
        return f"{type(module).__name__} computes something else than RMSNorm on a random input"

    return swap_candidates(model, lambda module: _as_norm(module) is not None, build)


def recognise(module: nn.Module) -> Variant | None:
    """The variant of RMSNorm that `module` computes, found by running a copy on random input; None if there is none.

    The module itself is neither run nor changed; its parameters may be fake or on the meta device.
    """
    norm = _as_norm(module)
    if norm is None:
        return None
    weight, eps = norm
    with unset_fake_temporarily():  # real tensors, so that numbers can be compared
        cases = list(_cases(weight.shape))
        try:
            probes = [duplicate(module, {id(weight): case_weight}) for case_weight, _ in cases]
            expected = [_run(probe, *case) for probe, case in zip(probes, cases, strict=True)]
        except (RuntimeError, TypeError, ValueError, AttributeError):
            # It needs other arguments or another shape: not a norm of one tensor.
            return None
        for variant in (Variant(offset, cast_first) for offset in (0.0, 1.0) for cast_first in (True, False)):
            results = (_run(FusedRMSNorm(case[0], eps, variant), *case) for case in cases)
            if all(map(_agree, cases, expected, results)):
                return variant
    return None


def _as_norm(module: nn.Module) -> tuple[nn.Parameter, float] | None:
    """Weight and epsilon, if the module has the structure of an RMSNorm, else None."""
    if isinstance(module, (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, FusedRMSNorm)):
        return None
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    weight = parameters.pop("weight", None)
    if weight is None or weight.dim() != 1 or parameters or module._modules or module._buffers:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # such as a gate, which may be left out
        return None
    values = (vars(module).get(name) for name in _EPS_NAMES)
    eps = next((value for value in values if isinstance(value, (int, float))), None)
    return None if eps is None else (weight, float(eps))


def _signature(module: nn.Module, weight: nn.Parameter) -> Hashable:
    """A key; modules with the same key compute the same function of input and weight."""
    plain = (bool, int, float, str, type(None))
    knobs = tuple((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, plain) and k != "training")
    return type(module), weight.shape, knobs


def _cases(shape: torch.Size) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Random weights, and inputs of shape (2, 3, hidden), each in fp32 and bf16."""
    generator = torch.Generator().manual_seed(0)
    weight = 1 + 0.5 * torch.randn(shape, generator=generator)
    x = 3 * torch.randn(2, 3, *shape, generator=generator)
    for weight_dtype in (torch.float32, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            yield nn.Parameter(weight.to(weight_dtype)), x.to(dtype).requires_grad_()


def _run(module: nn.Module, weight: nn.Parameter, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of input and weight for a fixed output gradient."""
    y = module(x)
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"{type(module).__name__} returned {type(y).__name__}")
    ramp = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, weight), ramp)


def _agree(case: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], got: tuple[torch.Tensor, ...]) -> bool:
    """True if shapes and dtypes are equal, and values up to fp32 rounding, or bf16 rounding if the case has bf16."""
    tolerance = 1e-5 if all(tensor.dtype == torch.float32 for tensor in case) else 2e-2
    return all(
        a.shape == b.shape and a.dtype == b.dtype and (a.double() - b.double()).norm() <= tolerance * a.double().norm()
        for a, b in zip(expected, got, strict=True)
    )


def fuse_layer_norms(model: nn.Module, device: torch.device) -> SwapReport:
    """Replace `nn.LayerNorm` by apex's `FusedLayerNorm`, if the model will run on CUDA and apex is installed.

    `device` is the device on which the model will run. On other devices, and without apex, the report states why
    torch's own is kept.
    """
    fused = optional("apex.normalization", "FusedLayerNorm")

    def build(name: str, module: Any) -> nn.Module | str:
        if device.type != "cuda":
            return "torch's LayerNorm is one operation here already; nothing is faster"
        if fused is None:
            return "torch's LayerNorm is one operation already, and apex, which has another kernel, is not installed"
        if module.elementwise_affine and module.bias is None:
            return "apex has no LayerNorm with a weight and no bias"
        replacement: nn.Module = fused(module.normalized_shape, module.eps, module.elementwise_affine)
        if module.elementwise_affine:
            replacement.weight, replacement.bias = module.weight, module.bias
        return replacement

    return swap_candidates(model, lambda module: type(module) is nn.LayerNorm, build)


def fuse_cross_entropy(model: nn.Module, device: torch.device) -> SwapReport:
    """Replace `nn.CrossEntropyLoss` modules by Liger's kernel, on CUDA.

    The kernel overwrites the logits with the gradient. So code that reads them after the loss, such as an accuracy,
    gets wrong values. This cannot be detected, so the replacement is only done on request. A loss that is computed by
    a function, as in transformers, is not a module and stays.
    """
    liger = optional("liger_kernel.transformers.cross_entropy", "LigerCrossEntropyLoss")

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


def optional(module: str, name: str) -> Any:
    """An attribute of a package; None if it is not installed, or has no such attribute."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
