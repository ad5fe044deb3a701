"""pipeline_parallel on DeepSpeed's engine in place of torch's schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from atorch.auto.context import Built, Context
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import SLOT
from atorch.compat import need_backend
from atorch.distributed import world
from atorch.errors import StrategyError

if TYPE_CHECKING:
    from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
    from atorch.auto.opt_lib.pipeline_parallel.stages import Batches
    from atorch.runtime.pipeline.pipeline import Pipeline


def check(ctx: Context, method: PipelineParallel) -> None:
    """Check that DeepSpeed can run the job, without side effects.

    Raises:
        CapabilityError: deepspeed is not installed.
        StrategyError: another method reduces gradients, the precision is fp16 or half, the mesh is not in DeepSpeed's
            order, or there is no optimizer or dataset.
    """
    need_backend("deepspeed")
    strategy = ctx.strategy
    mode = strategy.get(ParallelMode) or ParallelMode()
    for other in strategy:
        if other.slot == SLOT and other.engine != "deepspeed":
            raise StrategyError(
                f"{method} reduces gradients itself, and {other.name} would once more; give "
                '("zero1", {"backend": "deepspeed"}), or ds_3d_parallel for all of them'
            )
    order = [name for name, size in mode.slices if size > 1]
    if order != [name for name in ("tensor", "data", "pipeline") if mode.size(name) > 1] or mode.rank_order:
        axes = ", ".join(f"{axis} {size}" for axis, size in mode.slices)
        raise StrategyError(
            f"parallel_mode has {axes}, and DeepSpeed arranges its processes as tensor, data, pipeline, the first "
            "varying fastest; give them in this order, without a rank order"
        )
    low = {p.dtype for part in ctx.parts for p in part.parameters()} & {torch.float16, torch.bfloat16}
    if low or any(other.name == "half" or getattr(other, "dtype", None) == "fp16" for other in strategy):
        raise StrategyError(
            f"{method} goes with fp32 or amp_native bf16; leave out half and fp16, or use the default backend"
        )
    if ctx.make_optimizer is None or ctx.make_loader is None:
        raise StrategyError(f"{method} trains whole batches, optimizer included; give optim_func and a dataset")


def finished(
    built: Built, ctx: Context, method: PipelineParallel, pipeline: Pipeline, batches: Batches, tolerance: float
) -> Built:
    """Bind model, loss function and optimizer to DeepSpeed's engine."""
    from atorch.auto.opt_lib.pipeline_parallel.stages import rows_of_a_process
    from atorch.compat.deepspeed_pipeline import SteppedByDeepSpeed, WholeBatches

    assert built.loss_func is not None
    assert built.optim is not None
    mesh, strategy = ctx.need_mesh(), ctx.strategy
    world.ensure_group(ctx.device.type)
    loss_func = WholeBatches(
        pipeline,
        built.loss_func,
        batches.count,
        built.optim,
        sizes=(mesh.size("pipeline"), mesh.size("data"), mesh.size("tensor")),
        rows=rows_of_a_process(ctx),
        zero_stage=int("zero1" in strategy.names()),
        config=method.ds_config,
        loss_weight=batches.loss_weight,
        tolerance=tolerance,
        over_ranks=lambda rule: ctx.rank_weight(rule, built.dataloader),
    )
    return replace(
        built,
        model=pipeline,
        loss_func=loss_func,
        optim=SteppedByDeepSpeed(built.optim),
        step=loss_func.step,
        weighs_ranks=True,
    )
