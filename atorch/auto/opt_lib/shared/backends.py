"""Methods on other packages' engines (`compat`): zero1 and zero2 by FairScale or DeepSpeed, pipelines by DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from atorch.auto.opt_lib.parallel_mode import ParallelMode, size_of
from atorch.auto.opt_lib.shared.defaults import SLOT
from atorch.auto.strategy.method import Method
from atorch.compat import need_backend
from atorch.cost.parallelism import AXES
from atorch.errors import StrategyError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.optim import Optimizer

    from atorch.auto.context import Built, Context
    from atorch.auto.opt_lib.pipeline_parallel import PipelineParallel
    from atorch.auto.opt_lib.pipeline_parallel.stages import Batches
    from atorch.runtime.pipeline.pipeline import Pipeline


def named(name: str, config: Any, flags: Mapping[str, str]) -> Any:
    """`config`, with flags that name a backend, such as `use_ds_zero`, replaced by the knob `backend`."""
    if not isinstance(config, Mapping):
        return config
    chosen = {flag: flags[flag] for flag in flags if config.get(flag)}
    rest = {knob: value for knob, value in config.items() if knob not in flags}
    for flag, backend in chosen.items():
        if rest.setdefault("backend", backend) != backend:
            raise StrategyError(f"{name} was given {flag}, which means {backend}, with {rest['backend']}; give one")
    return rest


def in_pipeline(strategy: Iterable[Method]) -> bool:
    """True if DeepSpeed runs the strategy's pipeline; the same engine then shards the optimizer states."""
    return any("pipeline" in method.splits and method.engine == "deepspeed" for method in strategy)


def fairscale_states(ctx: Context, group: dist.ProcessGroup) -> Context:
    """Shard the optimizer's states by OSS."""
    from atorch.compat.engines import shard_states

    inner = ctx.make_optimizer
    if inner is None:
        return ctx
    return replace(ctx, make_optimizer=lambda groups: shard_states(groups, inner, group))


def fairscale_gradients(ctx: Context, name: str, group: dist.ProcessGroup) -> Context:
    """Shard states by OSS and gradients by ShardedDataParallel, which needs the OSS to wrap the model."""
    from atorch.compat.engines import shard_gradients, shard_states

    inner = needed_optimizer(ctx, name)
    ctx.give_memory()
    for part in ctx.parts:
        part.to(ctx.device)
    made: list[Optimizer] = []  # hands the optimizer from `make` to `finish`

    def make(groups: Any) -> Optimizer:
        made.append(shard_states(groups, inner, group))
        return made[-1]

    def finish(built: Built) -> Built:
        return replace(built, model=shard_gradients(built.model, made.pop(), group))

    return replace(ctx, make_optimizer=make).with_finish(finish)


def check(ctx: Context, name: str, backend: str) -> None:
    """Raise StrategyError if the optimizer, the mesh or other methods do not suit the backend."""
    if backend != "deepspeed" or in_pipeline(ctx.strategy):
        return
    sizes = {axis: size_of(ctx, axis) for axis in AXES}
    if math.prod(sizes.values()) != sizes["data"] * sizes["zero"]:
        axes = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise StrategyError(
            f"{name} with the deepspeed backend shares over all {ctx.world.size} processes, but parallel_mode has "
            f"{axes}; use the default backend with tensor or pipeline"
        )
    if _has_16_bits(ctx) or any(getattr(method, "skip_if_nonfinite", False) for method in ctx.strategy):
        raise StrategyError(
            f"{name} with the deepspeed backend keeps the fp32 weights itself, and steps itself, so it goes with fp32 "
            "or amp_native bf16; leave out half, fp16 and skip_if_nonfinite, or use the default backend"
        )
    needed_optimizer(ctx, name)


def _has_16_bits(ctx: Context) -> bool:
    """True if parameters are of 16 bits, or the loss is scaled for fp16."""
    import torch

    if any(method.precision_level == "half" or getattr(method, "dtype", None) == "fp16" for method in ctx.strategy):
        return True
    return any(p.dtype in (torch.float16, torch.bfloat16) for part in ctx.parts for p in part.parameters())


def deepspeed(ctx: Context, name: str, stage: Literal[1, 2]) -> Context:
    """Put model and optimizer under a DeepSpeed engine once both are built, and set the loop's flags in `args`."""
    from atorch.compat.engines import with_deepspeed
    from atorch.distributed import world

    inner = needed_optimizer(ctx, name)
    world.ensure_group(ctx.device.type)
    made: list[Optimizer] = []  # hands the optimizer from `make` to `finish`

    def make(groups: Any) -> Optimizer:
        made.append(inner(groups))
        return made[-1]

    def finish(built: Built) -> Built:
        optimizer = made.pop()
        if built.optim is not optimizer:
            raise StrategyError(
                f"{name} with the deepspeed backend was given an optimizer that {type(built.optim).__name__} has "
                "wrapped; DeepSpeed must have the optimizer itself. Leave out fp16 and skip_if_nonfinite"
            )
        model, optim = with_deepspeed(built.model, optimizer, stage)
        return replace(built, model=model, optim=optim)

    args = {**ctx.args, "use_optim_backward": True, "requires_set_gradient_accumulation_boundary": True}
    return replace(ctx, make_optimizer=make, args=args).with_finish(finish)


def needed_optimizer(ctx: Context, name: str) -> Any:
    if ctx.make_optimizer is None:
        raise StrategyError(f"{name} with this backend shares out gradients by optimizer; give optim_func, or use fsdp")
    return ctx.make_optimizer


def check_pipeline(ctx: Context, method: PipelineParallel) -> None:
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
    if _has_16_bits(ctx):
        raise StrategyError(
            f"{method} goes with fp32 or amp_native bf16; leave out half and fp16, or use the default backend"
        )
    if ctx.make_optimizer is None or ctx.make_loader is None:
        raise StrategyError(f"{method} trains whole batches, optimizer included; give optim_func and a dataset")


def deepspeed_pipeline(
    built: Built,
    ctx: Context,
    method: PipelineParallel,
    pipeline: Pipeline,
    batches: Batches,
    tolerance: float,
    rows: int,
) -> Built:
    """Bind model, loss function and optimizer to DeepSpeed's engine."""
    from atorch.compat.deepspeed_pipeline import SteppedByDeepSpeed, WholeBatches
    from atorch.distributed import world

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
        rows=rows,
        zero_stage=int(any(other.slot == SLOT for other in strategy)),
        config=method.ds_config,
        loss_weight=batches.loss_weight,
        tolerance=tolerance,
        over_ranks=lambda rule: ctx.rescaler(rule, built.dataloader),
    )
    return replace(
        built,
        model=pipeline,
        loss_func=loss_func,
        optim=SteppedByDeepSpeed(built.optim),
        step=loss_func.step,
        rescales_loss=True,
    )
