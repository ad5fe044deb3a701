"""amp_native: automatic mixed precision. Matmuls in 16 bits, weights and reductions in fp32.

Memory: activations that matmuls save for backward halve; weights, gradients and optimizer states stay fp32.
fp16 scales the loss, and skips steps with gradients that are not finite, on all processes together.
Communication: gradients in fp32, as without it; one flag a step for fp16, and for bf16 with `skip_if_nonfinite`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import Self

from atorch.auto.opt_lib.shared.optimizer_compatibility import need_no_closure
from atorch.auto.opt_lib.shared.precision import NAMES, Precision, is_fp32, keeps_masters, torch_dtype
from atorch.auto.strategy.method import Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile

if TYPE_CHECKING:
    from atorch.auto.context import Built, Context


@method("amp_native", phase=Phase.PRECISION, slot="precision")
class AmpNative(Precision):
    """Run forward and loss under autocast."""

    acts_in_calls: ClassVar[bool] = True

    skip_if_nonfinite: bool = False
    """bf16: skip steps whose gradients are not finite, as fp16 always does."""

    precision_level = "autocast"

    @property
    def numbers(self) -> str:
        return (
            f"matmuls and the other operations that autocast lists are computed in {self.dtype}; parameters, gradients "
            "and optimizer stay in fp32"
        )

    def cost(self, cost: Cost) -> Cost:
        """Matmuls in 16 bits: their saved activations halve, and every weight is cast once a micro-batch.

        A profile that was traced only in fp32 gets typical factors of transformers: 2/3 of the bytes, 5/4 of the calls.
        """
        agreed = self.agree(cost) if self.dtype == "fp16" or self.skip_if_nonfinite else cost
        byte_factor, call_factor = (1.0, 1.0) if cost.in_autocast else (2 / 3, 5 / 4)
        return agreed.replace(
            segments=cost.in_autocast or cost.segments,
            in_half=(),
            in_autocast=(),
            dtype=NAMES[self.dtype],
            activation_scale=cost.activation_scale * byte_factor,
            traffic_scale=cost.traffic_scale * byte_factor,
            ops_scale=cost.ops_scale * call_factor,
            cast_itemsize=cost.cast_itemsize + 2.0,
            cast_traffic_bytes=cost.cast_traffic_bytes + 1.5 * cost.param_itemsize,
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """bf16 where the device has it, else fp16 on GPUs; a CPU's fp16 loses range for no gain in speed."""
        if not is_fp32(profile):
            return
        in_bf16, in_fp16 = cls(dtype="bf16"), cls(dtype="fp16")
        if in_bf16.unmet(cluster) is None:
            yield in_bf16
        elif cluster.device.type == "cuda":
            yield in_fp16

    def check_optimizer(self, ctx: Context) -> None:
        """Refuse a closure if gradients are checked or unscaled before the step."""
        if self.dtype == "fp16" or self.skip_if_nonfinite:
            need_no_closure(ctx, f"{self.name} with fp16 or skip_if_nonfinite")

    def apply(self, ctx: Context) -> Context:
        """Autocast every part and the loss; with fp16, scale the loss and wrap the optimizer."""
        from atorch.runtime.precision.amp import ScaledOptimizer, autocast_forward, autocast_loss, scale_loss

        dtype, device = torch_dtype(self.dtype), ctx.device
        for part in ctx.parts:
            autocast_forward(part, device.type, dtype)
        loss_func = ctx.loss_func and autocast_loss(ctx.loss_func, device.type, dtype)
        ctx = replace(ctx, compute_dtype=dtype, loss_func=loss_func)
        is_fp16 = self.dtype == "fp16"
        if ctx.make_optimizer is None or not (is_fp16 or self.skip_if_nonfinite):
            return ctx  # without an optimizer of ours nothing would unscale
        scale = self.make_scale()
        if is_fp16 and loss_func is not None:
            ctx = replace(ctx, loss_func=scale_loss(loss_func, scale), loss_scale=scale)
        unscale = is_fp16 and not keeps_masters(ctx.strategy)

        def finish(built: Built) -> Built:
            assert built.optim is not None
            optim = ScaledOptimizer(built.optim, scale, unscale=unscale, device=device)
            return replace(built, optim=optim, loss_scale=scale)

        return ctx.with_finish(finish)
