"""LAMB and NovoGrad with apex's signatures: by apex's kernels if installed, else by torch's own operations.

The kernels run on CUDA, on fp32 and fp16 parameters that are whole on their process. Everything else runs here, by the
same formulas: in fp32 if parameters have 16 bits, with moments of the parameter's dtype, as in apex.

Both optimizers need norms of whole parameters, and LAMB one of the whole model. If a process has only a part of the
model, `optimizer.spread` describes the parts on other processes; DTensors describe themselves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from atorch.errors import ArgumentError, shown
from atorch.smp.inner_optimizer import Fused, KernelCall, TensorBucket, Tensors, wide, write

__all__ = ["FusedLamb", "FusedNovoGrad"]

Betas = tuple[float, float]


class FusedLamb(Fused):
    """LAMB: Adam's update, scaled to the norm of each parameter.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv 1904.00962, algorithm
    2, with the choices of apex's `FusedLAMB`. For the gradient g of parameter p in step t of its group:

        g ← g / max(1, ‖all gradients of the model‖ / max_grad_norm)
        g ← g + weight_decay · p                                      without adam_w_mode
        m ← β1·m + (1 - β1 or, without grad_averaging, 1)·g           v ← β2·v + (1 - β2)·g²
        u = m / (1 - β1ᵗ) / (√(v / (1 - β2ᵗ)) + eps)                   by 1 each without bias_correction
        u ← u + weight_decay · p                                      with adam_w_mode
        p ← p - lr · (‖p‖ / ‖u‖, or 1 where one is 0) · u

    Parameters without weight decay step by lr · u, unless use_nvlamb is set. The model's norm covers all groups and all
    processes, and its bound is the constructor's.

    Args:
        max_grad_norm: above 0; `math.inf` for no clipping.
        set_grad_none: let `zero_grad()` set gradients to None.
        amsgrad: must be False.

    apex's kernel overwrites the gradients with the update; read them before the step.

    Raises:
        ArgumentError: an argument is invalid.
    """

    adam_w_mode: bool
    use_nvlamb: bool
    _modes = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    _kernel = "multi_tensor_lamb"
    _norm: Tensor  # of all gradients, in the running step

    @property
    def step_depends_on(self) -> str:
        """The extent of parameters that a step of one needs."""
        return "parameter" if math.isinf(self.defaults["max_grad_norm"]) else "model"

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: bool = False, adam_w_mode: bool = True,
        grad_averaging: bool = True, set_grad_none: bool = True, max_grad_norm: float = 1.0, use_nvlamb: bool = False,
    ) -> None:  # fmt: skip
        if not max_grad_norm > 0:
            raise ArgumentError(
                f"FusedLamb was given {shown(max_grad_norm)} as max_grad_norm; it is a number above 0, and math.inf "
                "clips nothing"
            )
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        modes = {"adam_w_mode": bool(adam_w_mode), "use_nvlamb": bool(use_nvlamb)}
        super().__init__(params, defaults, amsgrad, set_grad_none=set_grad_none, **modes)

    def _begin(self) -> None:
        self._norm = self.spread.norm_of_grads(self._parameters())

    def _updates(self, group: dict[str, Any], bucket: TensorBucket) -> Tensors:
        beta2, decay = group["betas"][1], group["weight_decay"]
        correction1, correction2 = _corrections(group)
        moments = self._moments(bucket.whose, "exp_avg_sq")
        squares = wide(moments)
        most = self.defaults["max_grad_norm"]
        excess = torch.where(self._norm > most, self._norm / most, 1.0).to(squares[0].device)
        clipped = list(torch._foreach_div(bucket.gradients, excess))
        if decay and not self.adam_w_mode:
            torch._foreach_add_(clipped, bucket.parameters, alpha=decay)
        _add_to_means(bucket.means, clipped, group)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, clipped, clipped, 1 - beta2)
        write(moments, squares)
        roots = torch._foreach_div(squares, correction2)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(bucket.means, correction1)
        torch._foreach_div_(updates, roots)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, bucket.parameters, alpha=decay)
        if decay or self.use_nvlamb:
            size, change = (self.spread.norms(tensors, bucket.whose) for tensors in (bucket.parameters, updates))
            trust = torch.where((size != 0) & (change != 0), size / change, 1.0)
            torch._foreach_mul_(updates, list(trust.unbind()))
        return list(updates)

    def _kernel_step(self, kernel: KernelCall, group: dict[str, Any], bucket: TensorBucket) -> None:
        lists = [bucket.gradients, bucket.parameters, bucket.means, self._moments(bucket.whose, "exp_avg_sq")]
        norm, most = self._norm.to(bucket.parameters[0].device), self.defaults["max_grad_norm"]
        kernel(lists, *_settings(group), int(self.adam_w_mode), norm, most, self.use_nvlamb)


class FusedNovoGrad(Fused):
    """NovoGrad: momentum of gradients divided by a running norm, one number for each parameter.

    Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks", arXiv
    1905.11286, algorithm 1, with the choices of apex's `FusedNovoGrad`. For the gradient g of parameter p in step t of
    its group, where n is the norm of g:

        v ← √(β2·v² + (1 - β2)·n²), or, of the largest value (norm_type 0), β2·v + (1 - β2)·n
        d = v / √(1 - β2ᵗ) + eps                                      by 1 each without bias_correction
        m ← β1·m + (1 - β1 or, without grad_averaging, 1)·g
        p ← p - lr · (m / (1 - β1ᵗ) / d + weight_decay · p)

    With reg_inside_moment m takes g / d + weight_decay · p in place of g, and the last line is p - lr · m / (1 - β1ᵗ).

    Initially v is 0 with init_zero, else the norm of the parameter's first gradient. The state of a parameter holds v
    as `exp_avg_sq`, an fp32 scalar. State dicts of apex, which keep v by group, load, too.

    Args:
        norm_type: 2, or 0 for the largest absolute value.
        set_grad_none: let `zero_grad()` set gradients to None.
        amsgrad: must be False.

    Raises:
        ArgumentError: an argument is invalid.
    """

    step_depends_on = "parameter"
    reg_inside_moment: bool
    _modes = ("set_grad_none", "reg_inside_moment")
    _kernel = "multi_tensor_novograd"

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, reg_inside_moment: bool = False,
        grad_averaging: bool = True, norm_type: int = 2, init_zero: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        modes = {"reg_inside_moment": bool(reg_inside_moment)}
        super().__init__(params, defaults, amsgrad, set_grad_none=set_grad_none, **modes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; norms stay in fp32 for parameters of any dtype."""
        groups = [dict(group) for group in state_dict["param_groups"]]
        states = {key: dict(state) for key, state in state_dict["state"].items()}
        of_groups = [group.pop("exp_avg_sq", None) for group in groups]
        super().load_state_dict({**state_dict, "state": states, "param_groups": groups})
        for current, group, by_kind in zip(self.param_groups, groups, of_groups, strict=True):
            kinds = [iter(norms) for norms in by_kind] if by_kind is not None else []
            for parameter, number in zip(current["params"], group["params"], strict=True):
                if number not in states:
                    continue
                is_half = parameter.dtype == torch.float16  # apex lists a group's fp16 norms first, then the fp32 ones
                norm = next(kinds[not is_half]) if kinds else states[number]["exp_avg_sq"]
                self.state[parameter]["exp_avg_sq"] = norm.to(parameter.device, torch.float32, copy=True)

    def _updates(self, group: dict[str, Any], bucket: TensorBucket) -> Tensors:
        beta2, decay = group["betas"][1], group["weight_decay"]
        correction1, correction2 = _corrections(group)
        now = self._norms_now(group, bucket)
        before = self._norms_before(group, bucket)
        if group["norm_type"] == 2:
            norms = (beta2 * before**2 + (1 - beta2) * now**2).sqrt()
        else:
            norms = beta2 * before + (1 - beta2) * now
        self._keep(bucket, norms)
        divisors = list((norms / math.sqrt(correction2) + group["eps"]).unbind())
        gradients = bucket.gradients
        if self.reg_inside_moment:
            gradients = list(torch._foreach_div(gradients, divisors))
            torch._foreach_add_(gradients, bucket.parameters, alpha=decay)
        _add_to_means(bucket.means, gradients, group)
        updates = torch._foreach_div(bucket.means, correction1)
        if not self.reg_inside_moment:
            torch._foreach_div_(updates, divisors)
            torch._foreach_add_(updates, bucket.parameters, alpha=decay)
        return list(updates)

    def _norms_now(self, group: dict[str, Any], bucket: TensorBucket) -> Tensor:
        power = math.inf if group["norm_type"] == 0 else 2.0
        return self.spread.norms(bucket.gradients, bucket.whose, power).float()

    def _norms_before(self, group: dict[str, Any], bucket: TensorBucket) -> Tensor:
        """The previous v of each parameter; initialized on its first step."""
        states = [self.state[parameter] for parameter in bucket.whose]
        if not all("exp_avg_sq" in state for state in states):
            for state, norm in zip(states, self._norms_now(group, bucket), strict=True):
                state.setdefault("exp_avg_sq", torch.zeros_like(norm) if group["init_zero"] else norm.clone())
        return torch.stack([state["exp_avg_sq"] for state in states])

    def _keep(self, bucket: TensorBucket, norms: Tensor) -> None:
        torch._foreach_copy_([self.state[parameter]["exp_avg_sq"] for parameter in bucket.whose], list(norms.unbind()))

    def _kernel_step(self, kernel: KernelCall, group: dict[str, Any], bucket: TensorBucket) -> None:
        norms = self._norms_before(group, bucket)
        lists = [bucket.gradients, bucket.parameters, bucket.means]
        kernel(lists, norms, *_settings(group), int(not self.reg_inside_moment), group["norm_type"])  # updates `norms`
        self._keep(bucket, norms)


def _corrections(group: dict[str, Any]) -> Betas:
    if not group["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = group["betas"]
    return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    """The settings of a group that apex's kernels take, in the kernels' order."""
    adam = (group["lr"], *group["betas"], group["eps"], group["step"], int(group["bias_correction"]))
    return *adam, group["weight_decay"], int(group["grad_averaging"])


def _add_to_means(means: Tensors, gradients: Tensors, group: dict[str, Any]) -> None:
    beta1 = group["betas"][0]
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, gradients, alpha=1.0 - beta1 if group["grad_averaging"] else 1.0)
