"""micro_batch: forward and backward of one part of the batch at a time, with gradients accumulated and reduced once.

Memory: activations of one micro-batch instead of the batch; gradients as without it. Under fsdp, gradients stay full
until the last micro-batch. Communication: one reduction a step, as without it; fsdp gathers its parameters for each
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.parallel_mode import size_of
from atorch.auto.opt_lib.pipeline_parallel import uneven
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile, peak_memory
from atorch.cost.state import reduce_once
from atorch.errors import StrategyError

if TYPE_CHECKING:
    from atorch.auto.context import Built, Context

LARGEST = 256
"""Rows of the largest micro-batch that the search tries."""
AMPLE, FEW_PARTS = 4.0, 4
"""Ratio of device memory to that of the whole batch from which more than FEW_PARTS parts only cost time."""


@method("micro_batch", phase=Phase.STEP)
class MicroBatch(Method):
    """Accumulate gradients inside one step, at the same global batch."""

    saves_memory: ClassVar[bool] = True
    defers_backward: ClassVar[bool] = True

    size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows of a micro-batch on each process; "auto" is the largest that fits, on a CPU the whole batch."""
    count: Annotated[int, Field(ge=1)] | None = None
    """The number of micro-batches, instead of their size."""
    loss_weight: str = "auto"
    """The rule that combines the losses of micro-batches: "rows", "labels", "shifted_labels", "sum", the name of an
    entry of the batch (a mask or labels), or "auto" to detect one of the first four."""
    reduce: Literal["once", "each"] = "once"
    """Sharded gradients: kept full and reduced "once" a step, or reduced with "each" micro-batch, so that only shards
    are kept."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.count is not None and self.size != "auto":
            raise ValueError("size and count are both given; give one of them")
        return self

    def unfit(self, cost: Cost) -> str | None:
        """Require several equal parts of a process's batch; interleaved pipelines take them in rounds."""
        if self.reduce == "each" and (not cost.gathered_itemsize or cost.grads_persist):
            return f"{self} has no sharded gradients to reduce"
        if reason := super().unfit(cost):
            return reason
        samples = f"the {cost.batch_size:g} samples of a process"
        parts = cost.batch_size / self.size if isinstance(self.size, int) else self.count
        if parts is None:
            return None
        if not 1 < parts <= cost.batch_size:
            return f"{self} makes no parts of {samples}"
        if parts % 1 or cost.batch_size % parts:
            return f"{self} does not divide {samples}"
        if cost.stages == 1 and (self.reduce == "each" or parts > FEW_PARTS) and is_ample(cost):
            return f"{self} saves memory where {AMPLE:g} times the whole batch would fit"
        return uneven(cost.stages, cost.schedule, parts)

    def against_pipeline(self, schedule: str) -> str | None:
        if self.reduce == "each":
            return (
                'micro_batch was given reduce="each", and a pipeline reduces gradients with the last micro-batch; '
                'leave reduce at "once"'
            )
        return super().against_pipeline(schedule)

    def in_parts(self, count: int) -> Self:
        return self if self.count is None else self.model_copy(update={"count": count})

    def cost(self, cost: Cost) -> Cost:
        """Activations of the largest micro-batch; launches, weight casts and fsdp's gathers for each micro-batch."""
        rows: float  # of the largest micro-batch
        if self.count is not None:
            rows = math.ceil(cost.batch_size / self.count)
        elif self.size != "auto":
            rows = min(cost.batch_size, self.size)
        else:
            return cost
        count = float(math.ceil(cost.batch_size / rows))
        cost = cost.replace(num_micro_batches=count, batch_size=count * rows)
        in_buckets = cost.grads_persist and cost.grad_shards == 1 and not cost.gathered_itemsize
        if count > 1 and cost.stages == 1 and in_buckets and not cost.main_grad_itemsize:
            # Gradients accumulate outside of the buckets that ddp reduces, so both exist.
            cost = cost.replace(bucket_itemsize=cost.bucket_itemsize + cost.grad_itemsize)
        return cost if self.reduce == "each" else reduce_once(cost)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """Powers of two, of which `unfit` leaves those that divide the batch; none for models with batch norm."""
        if not any("BatchNorm" in name for name in profile.module_classes):
            for power in range(LARGEST.bit_length()):
                yield cls(size=2**power)
                yield cls(size=2**power, reduce="each")

    def check(self, ctx: Context) -> None:
        from atorch.distributed.collectives import is_distributed

        if ctx.loss_func is None:
            raise StrategyError("micro_batch runs forward and backward inside loss_func; give auto_accelerate one")
        if _in_pipeline(ctx):
            return
        for other in ctx.strategy:
            if other.engine == "deepspeed":
                raise StrategyError(
                    f"micro_batch needs loss.backward(), and {other.name} with the deepspeed backend has a backward of "
                    f"its own; leave the backend of {other.name} out"
                )
        if self.reduce == "each" and ctx.strategy.get(Fsdp) is None:
            raise StrategyError(
                'micro_batch was given reduce="each", but only gradients that fsdp or zero2 shards gain by that; '
                'leave reduce at "once", or add fsdp'
            )
        is_searched = self.size == "auto" and self.count is None
        moved = any(other.places_states for other in ctx.strategy)
        if is_searched and moved and is_distributed() and ctx.device.type == "cuda":
            raise StrategyError(
                'micro_batch was given size="auto" with chunks on several processes: one that runs out of memory '
                "alone would leave the others in a collective; give a size or a count"
            )

    def apply(self, ctx: Context) -> Context:
        """Let the model defer its output to a loss function that runs micro-batches."""
        from atorch.runtime.gradients.micro_batched import MicroBatched
        from atorch.runtime.loss.reduction import tolerance_of

        self.check(ctx)
        if _in_pipeline(ctx):
            return replace(ctx)  # the pipeline's schedule reads size, count and loss_weight from this method

        def finish(built: Built) -> Built:
            if built.args["use_optim_backward"] or built.loss_func is None:
                raise StrategyError("micro_batch needs loss.backward(); a backend with its own backward cannot take it")
            loss_func = MicroBatched(
                built.model,
                built.loss_func,
                self.size,
                self.count,
                self.loss_weight if self.loss_weight != "auto" else ctx.loss_weight,
                tolerance_of(ctx.compute_dtype),
                self.reduce,
                lambda rule: ctx.rescaler(rule, built.dataloader),
            )
            return replace(built, loss_func=loss_func, rescales_loss=True)

        return ctx.with_finish(finish)


def _in_pipeline(ctx: Context) -> bool:
    return ctx.strategy.splits_over("pipeline") and size_of(ctx, "pipeline") > 1


def is_ample(cost: Cost) -> bool:
    """True if the whole batch needs far less than the device's memory; False if that is unknown."""
    return cost.device_bytes < math.inf and AMPLE * peak_memory(cost).total < cost.device_bytes
