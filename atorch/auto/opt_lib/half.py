"""half: the whole model in 16 bits, with fp32 master weights in the optimizer, so that small updates are not lost.

Memory, bytes per parameter: 2 weight, 2 gradient, 4 master, and the optimizer's states in fp32; activations halve.
Communication: gradients and weights are sent in 16 bits, half of fp32's bytes; fp16 adds one flag a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import Self

from atorch.auto.opt_lib.shared.optimizer_compatibility import need_no_closure
from atorch.auto.opt_lib.shared.precision import NAMES, Precision, is_fp32, keeps_masters, torch_dtype
from atorch.auto.strategy.method import Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile

if TYPE_CHECKING:
    from atorch.auto.context import Built, Context


@method("half", phase=Phase.PRECISION, slot="precision")
class Half(Precision):
    """Cast model and inputs to fp16 or bf16."""

    precision_level = "half"

    @property
    def numbers(self) -> str:
        return (
            f"parameters, activations and gradients are in {self.dtype}; the optimizer steps fp32 copies, which are "
            "rounded into the parameters"
        )

    def cost(self, cost: Cost) -> Cost:
        """Everything in 16 bits but the optimizer, which steps fp32 masters and casts them back.

        Norms and losses that a model computes in fp32 stay in fp32, if there is a trace in 16 bits.
        """
        agreed = self.agree(cost) if self.dtype == "fp16" else cost
        byte_factor = 1.0 if cost.in_half else 0.5  # of a profile that was traced only in fp32
        return agreed.replace(
            segments=cost.in_half or cost.segments,
            in_half=(),
            in_autocast=(),
            dtype=NAMES[self.dtype],
            param_itemsize=cost.param_itemsize / 2,
            grad_itemsize=cost.main_grad_itemsize or cost.grad_itemsize / 2,
            buffer_bytes=cost.buffer_bytes / 2,
            master_itemsize=cost.master_itemsize + 4.0,
            activation_scale=cost.activation_scale * byte_factor,
            traffic_scale=cost.traffic_scale * byte_factor,
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """bf16, if the device has it: masters keep training close to fp32. A search never chooses fp16."""
        in_bf16 = cls(dtype="bf16")
        if is_fp32(profile) and in_bf16.unmet(cluster) is None:
            yield in_bf16

    def check_optimizer(self, ctx: Context) -> None:
        """Refuse a closure: masters get their gradients from the parameters."""
        need_no_closure(ctx, self.name)

    def apply(self, ctx: Context) -> Context:
        """Cast every part and the inputs, and let the optimizer step fp32 masters; with fp16, scale the loss."""
        from atorch.distributed.collectives import synchronise
        from atorch.runtime.precision.amp import ScaledOptimizer, autocast_loss, scale_loss
        from atorch.runtime.precision.master_weights import cast_arguments, cast_inputs, to_half, with_master_weights

        dtype, device = torch_dtype(self.dtype), ctx.device
        scale = self.make_scale()
        # Before rounding, since masters start from these values.
        synchronise([tensor for part in ctx.parts for tensor in (*part.parameters(), *part.buffers())])
        values = to_half(ctx.parts, dtype)
        for part in ctx.parts:
            cast_arguments(part, dtype)
        make_optimizer = ctx.make_optimizer
        if make_optimizer is not None and not keeps_masters(ctx.strategy):
            make_optimizer = with_master_weights(make_optimizer, scale, values)
        loss_func = ctx.loss_func and autocast_loss(ctx.loss_func, device.type, dtype)  # cross entropies in fp32
        if self.dtype == "fp16" and loss_func is not None and make_optimizer is not None:
            loss_func = scale_loss(loss_func, scale)
        ctx = replace(
            ctx,
            compute_dtype=dtype,
            fp32_values=values,
            loss_scale=scale,
            make_optimizer=make_optimizer,
            loss_func=loss_func,
            prepare_input=cast_inputs(ctx.prepare_input, dtype),
        )

        def finish(built: Built) -> Built:
            values.clear()  # frees values of parameters that other processes step
            if self.dtype == "bf16" or built.optim is None:
                return built
            optim = ScaledOptimizer(built.optim, scale, unscale=False, device=device)  # masters unscale theirs
            return replace(built, optim=optim, loss_scale=scale)

        return ctx.with_finish(finish)
