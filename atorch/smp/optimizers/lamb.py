"""LAMB with apex's signature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from atorch.errors import ArgumentError, shown
from atorch.smp.optimizers.fused import (
    Betas,
    Fused,
    Kernels,
    TensorBucket,
    Tensors,
    add_to_means,
    corrections,
    settings,
    wide,
    write,
)


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
    _norm: Tensor  # of all gradients, in the running step

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if not max_grad_norm > 0:
            raise ArgumentError(
                f"FusedLamb was given {shown(max_grad_norm)} as max_grad_norm; it is a number above 0, and math.inf "
                "clips nothing"
            )
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm,
        }  # fmt: skip
        super().__init__(params, defaults, amsgrad, set_grad_none)
        self.adam_w_mode, self.use_nvlamb = bool(adam_w_mode), bool(use_nvlamb)

    def _begin(self) -> None:
        self._norm = self.spread.norm_of_grads(tensor for group in self.param_groups for tensor in group["params"])

    def _updates(
        self, group: dict[str, Any], bucket: TensorBucket, parameters: Tensors, means: Tensors, gradients: Tensors
    ) -> Tensors:
        beta2, decay = group["betas"][1], group["weight_decay"]
        correction1, correction2 = corrections(group)
        squares = wide(self._squares(bucket))
        most = self.defaults["max_grad_norm"]
        excess = torch.where(self._norm > most, self._norm / most, 1.0).to(parameters[0].device)
        clipped = list(torch._foreach_div(gradients, excess))
        if decay and not self.adam_w_mode:
            torch._foreach_add_(clipped, parameters, alpha=decay)
        add_to_means(means, clipped, group)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, clipped, clipped, 1 - beta2)
        write(self._squares(bucket), squares)
        roots = torch._foreach_div(squares, correction2)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, correction1)
        torch._foreach_div_(updates, roots)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, parameters, alpha=decay)
        if decay or self.use_nvlamb:
            size, change = (self.spread.norms(tensors, bucket.whose) for tensors in (parameters, updates))
            trust = torch.where((size != 0) & (change != 0), size / change, 1.0)
            torch._foreach_mul_(updates, list(trust.unbind()))
        return list(updates)

    def _squares(self, bucket: TensorBucket) -> list[Tensor]:
        for parameter in bucket.whose:
            self.state[parameter].setdefault("exp_avg_sq", torch.zeros_like(parameter))
        return bucket.state(self, "exp_avg_sq")

    def _kernel_step(self, kernels: Kernels, group: dict[str, Any], bucket: TensorBucket) -> None:
        device = bucket.parameters[0].device
        kernels.apply(
            kernels.lamb,
            torch.zeros(1, dtype=torch.int, device=device),
            [bucket.gradients, bucket.parameters, bucket.state(self, "exp_avg"), self._squares(bucket)],
            *settings(group),
            int(self.adam_w_mode),
            self._norm.to(device),
            self.defaults["max_grad_norm"],
            self.use_nvlamb,
        )
