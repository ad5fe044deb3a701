"""NovoGrad with apex's signature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from atorch.smp.optimizers.fused import (
    Betas,
    Fused,
    Kernels,
    TensorBucket,
    Tensors,
    add_to_means,
    corrections,
    settings,
)


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

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero,
        }  # fmt: skip
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self.reg_inside_moment = bool(reg_inside_moment)

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

    def _norms(self, group: dict[str, Any], bucket: TensorBucket, gradients: list[Tensor]) -> Tensor:
        """The previous v of each parameter; initialized on its first step."""
        new = [place for place, parameter in enumerate(bucket.whose) if "exp_avg_sq" not in self.state[parameter]]
        if new:
            fresh, first = ([values[place] for place in new] for values in (bucket.whose, gradients))
            norms = self.spread.norms(first, fresh, _power(group)).float()
            for parameter, norm in zip(fresh, torch.zeros_like(norms) if group["init_zero"] else norms, strict=True):
                self.state[parameter]["exp_avg_sq"] = norm.clone()
        return torch.stack([self.state[parameter]["exp_avg_sq"] for parameter in bucket.whose])

    def _keep(self, bucket: TensorBucket, norms: Tensor) -> None:
        torch._foreach_copy_([self.state[parameter]["exp_avg_sq"] for parameter in bucket.whose], list(norms.unbind()))

    def _updates(
        self, group: dict[str, Any], bucket: TensorBucket, parameters: Tensors, means: Tensors, gradients: Tensors
    ) -> Tensors:
        beta2, decay = group["betas"][1], group["weight_decay"]
        correction1, correction2 = corrections(group)
        before = self._norms(group, bucket, gradients)
        now = self.spread.norms(gradients, bucket.whose, _power(group)).float()
        if group["norm_type"] == 2:
            norms = (beta2 * before**2 + (1 - beta2) * now**2).sqrt()
        else:
            norms = beta2 * before + (1 - beta2) * now
        self._keep(bucket, norms)
        divisors = list((norms / math.sqrt(correction2) + group["eps"]).unbind())
        if self.reg_inside_moment:
            gradients = list(torch._foreach_div(gradients, divisors))
            torch._foreach_add_(gradients, parameters, alpha=decay)
        add_to_means(means, gradients, group)
        updates = torch._foreach_div(means, correction1)
        if not self.reg_inside_moment:
            torch._foreach_div_(updates, divisors)
            torch._foreach_add_(updates, parameters, alpha=decay)
        return list(updates)

    def _kernel_step(self, kernels: Kernels, group: dict[str, Any], bucket: TensorBucket) -> None:
        norms = self._norms(group, bucket, bucket.gradients)
        kernels.apply(
            kernels.novograd,
            torch.zeros(1, dtype=torch.int, device=norms.device),
            [bucket.gradients, bucket.parameters, bucket.state(self, "exp_avg")],
            norms,  # updated in place
            *settings(group),
            int(not self.reg_inside_moment),
            group["norm_type"],
        )
        self._keep(bucket, norms)


def _power(group: dict[str, Any]) -> float:
    return math.inf if group["norm_type"] == 0 else 2.0
