"""Carries out a call of an entry point in steps: prepare → choose → reference step → apply → build → verify."""

from __future__ import annotations

import hashlib
import platform
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from atorch.auto.arguments import Request
from atorch.auto.context import AccelerateResult, Context
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import batch_place, complete, idle_axes, needs_values
from atorch.auto.opt_lib.shared.optimizer_compatibility import log_kernel
from atorch.auto.opt_lib.shared.precision import warn_of_16_bits
from atorch.auto.planner.dry_runs.fault_barrier import adopt, trimmed
from atorch.auto.reference_step import ReferenceStep, plain_pass
from atorch.auto.strategy import METHODS, Strategy
from atorch.auto.verification import as_strategy_errors, cannot_evaluate, check
from atorch.cluster.spec import ClusterSpec
from atorch.distributed import world as worlds
from atorch.distributed.collectives import all_or_none, call_on_all_ranks, from_rank_zero, require_equal, synchronise
from atorch.distributed.fingerprints import facts_of_optimizer
from atorch.distributed.mesh import AXES, BATCH_AXES, current, set_current
from atorch.errors import ArgumentError, AtorchError, NoFeasiblePlanError, StrategyError
from atorch.logs import logger, verbose_logging
from atorch.model.copy_isolation import make_writable
from atorch.model.deferred_init import InitialValues
from atorch.model.meta_device import has_meta, need_values
from atorch.runtime.chunk.parameter import ChunkedParameter
from atorch.runtime.data.batches import watch_batches

if TYPE_CHECKING:
    from atorch.auto.planner.plan import Plan


def run(call: Request) -> tuple[bool, AccelerateResult | None, Strategy | None]:
    """Do the work of `auto_accelerate`: prepare, choose, and `accelerate` with the choice; then save it."""
    began, options = time.monotonic(), call.options
    with verbose_logging(options.verbose and worlds.init().rank == 0):
        ctx, requested = _prepare(call)
        try:
            with ctx.other_modules.at_first():
                strategy, plan = _choose(ctx, requested, call, began)
                logger.info("the strategy is %s", strategy)
                if plan is None:
                    result, strategy = accelerate(ctx, strategy, options.verify)
                else:
                    ctx = replace(ctx, plain_pass=plan.plain_pass)
                    result, strategy = adopt(ctx, strategy, plan, partial(accelerate, verify=options.verify))
        except NoFeasiblePlanError as error:
            if ctx.world.rank == 0:
                from atorch.report.text import show_rejections

                show_rejections(error.rejected)
            logger.warning("%s", error)
            return False, None, None
        finally:
            ctx.other_gradients.restore()
        _warn_of_others(ctx)
        target = options.save_strategy_to_file
        if target is not None:
            all_or_none(lambda: strategy.save(target) if ctx.world.rank == 0 else None)
        return True, result, strategy


def _warn_of_others(ctx: Context) -> None:
    others = ctx.other_gradients.parameters
    if others and ctx.world.size > 1:
        logger.warning(
            "the loss depends on trainable parameters that are not the model's (the first is of shape %s), and only "
            "the model's gradients are averaged over processes. If you train them, make them a module of the model, or "
            "give their module to auto_accelerate, too",
            tuple(others[0].shape),
        )


def searched(call: Request) -> Plan:
    began, ctx = time.monotonic(), _context(call)
    try:
        with ctx.other_modules.at_first():
            return _searched(ctx, None, call, began)
    finally:
        ctx.other_gradients.restore()


def _prepare(call: Request) -> tuple[Context, Strategy | None]:
    """The context of the job, and the user's strategy, complete for these processes."""
    options = call.options
    ctx = _context(call)
    requested = None if call.strategy is None else _loaded(call.strategy, ctx)
    ctx = replace(ctx, initial=all_or_none(lambda: _initial_values(ctx.root, requested, call)))
    if not call.searches and (options.excluded or options.included or options.time_limit is not None):
        logger.warning(
            "excluded, included and time_limit are the search's; the load_strategy is applied as it is "
            "(finetune_strategy=True searches the knobs that it leaves unset)"
        )
    return ctx, requested


def _searched(ctx: Context, fixed: Strategy | None, call: Request, began: float) -> Plan:
    from atorch.auto.planner.dry_runs.time_budget import Calibration, TimeBudget
    from atorch.auto.planner.planner import search

    options = call.options
    excluded = options.excluded
    if ctx.initial is not None:
        excluded = (*(excluded or ()), *(name for name in METHODS if METHODS[name].needs_values))
    return search(
        ctx,
        excluded=excluded,
        included=options.included,
        fixed=fixed,
        precision=options.precision,
        clock=TimeBudget(options.time_limit, began=began),
        verbose=options.verbose,
        calibration=Calibration.of(options.calibration, ctx.cluster, versions()),
        verify=options.verify,
    )


def accelerate(ctx: Context, strategy: Strategy, verify: bool) -> tuple[AccelerateResult, Strategy]:
    """Carry out a complete strategy: reference step → apply → build → verify. The strategy gets metadata.

    Raises:
        StrategyError: with `verify`, if its first pass differs from plain training's.
    """
    waits_for_values = ctx.initial is None and has_meta([ctx.root])
    cuts = strategy.splits_over("pipeline")
    ctx = _checked(ctx, strategy)
    if (verify or cuts) and strategy.methods:
        ctx = replace(ctx, plain_pass=_reference_step(ctx, batch_place(strategy, ctx.device.type)[1], verify))
    else:
        ctx = replace(ctx, plain_pass=None)
    warn_of_16_bits(ctx, strategy)
    is_run = ctx.plain_pass is not None and ctx.plain_pass.why_not is None  # plain training ran the model
    before = current()
    try:
        with as_strategy_errors(strategy) if is_run else nullcontext():
            applied = strategy.apply(ctx)
    except AtorchError:  # on all processes
        if (mesh := current()) is not None and mesh not in (before, ctx.mesh):
            mesh.close()
            set_current(before)
        raise
    result = _build(applied, waits_for_values, cuts)
    if verify:
        _verify(applied, result)
    mesh = applied.need_mesh()
    together_on = [axis for axis in AXES if axis not in BATCH_AXES and mesh.size(axis) > 1]
    watch_batches(result.model, {axis: mesh.group(axis) for axis in together_on})
    return result, replace(strategy, metadata={**strategy.metadata, **applied.metadata})


def _checked(ctx: Context, strategy: Strategy) -> Context:
    """The context, ready for the strategy: checked, with a sample, and with values of its own that ranks share."""
    if ctx.make_loader is not None:
        make, place = ctx.make_loader, batch_place(strategy, ctx.device.type)
        all_or_none(lambda: make(*place))  # made once in advance, so that an error leaves the model unchanged
    all_or_none(lambda: strategy.check(ctx))
    strategy.check_optimizer(ctx)
    ctx = with_sample(ctx, strategy)
    tensors = [*ctx.root.parameters(), *ctx.root.buffers()]
    make_writable(tensors)
    if ctx.world.size > 1:
        synchronise(tensors)
    return ctx


def _reference_step(ctx: Context, shares: int, verify: bool) -> ReferenceStep:
    """The reference step, from the search if it made one. Warns if there is none although a step is possible.

    A search that had no time for one gives a reason instead, and the pass is not run afterwards.
    """
    can_step = None not in (ctx.make_optimizer, ctx.make_loader, ctx.loss_func)
    reference = ctx.plain_pass
    if reference is None and can_step:
        from atorch.auto.planner.dry_runs.trial import BatchCache

        reference = plain_pass(ctx, shares, lambda: BatchCache(ctx, num_batches=1).batches(0, 1)[0])
    elif reference is None:
        reference = ReferenceStep(why_not="it takes optim_func, dataset and loss_func")
    if verify and reference.why_not is not None and can_step:
        logger.warning("the strategy cannot be compared with plain training's first pass: %s", reference.why_not)
    return reference


def _build(applied: Context, waits_for_values: bool, cuts: bool) -> AccelerateResult:
    result = all_or_none(applied.build)  # the user's optimizer and scheduler may raise
    if waits_for_values and not any(isinstance(p, ChunkedParameter) for p in result.model.parameters()):
        need_values(result.model)
    log_kernel(result.optim)
    if not cuts:  # optimizers of pipeline stages have different parameters
        call_on_all_ranks(
            "optim_func", dict, lambda: result.optim, lambda made: {"optimizer": facts_of_optimizer(made)}
        )
    return result


def _verify(applied: Context, result: AccelerateResult) -> None:
    """Compare the first pass with the reference step; warn if the model can only train, not be evaluated."""
    expected = applied.plain_pass
    if expected is None:
        return
    check(applied, result, expected)
    # A method that splits the model may fail on one process and leave the others waiting; only dry runs are guarded.
    if all(set(method.splits) <= set(BATCH_AXES) for method in applied.strategy):
        cannot = cannot_evaluate(applied, result, expected)
        if cannot is not None:
            logger.warning("under %s %s", applied.strategy, cannot)
    elif expected.prompt is not None:
        logger.warning("%s splits the model; model.generate() is not tried under it and may fail", applied.strategy)


def with_sample(ctx: Context, strategy: Strategy) -> Context:
    """The context, with rank 0's first batch as sample if a method of the strategy needs one and none was given.

    Raises:
        ArgumentError: there is no dataset to take it from.
    """
    needing = [method.name for method in strategy if method.needs_sample]
    if not needing or ctx.sample_batch is not None:
        return ctx
    from atorch.auto.planner.dry_runs.trial import BatchCache

    def first() -> Any:
        if ctx.make_loader is None:
            raise ArgumentError(
                f"{needing[0]} runs the model on a sample before it splits it; give a dataset, or a sample_batch"
            )
        return BatchCache(ctx).batches(0, batch_place(strategy, ctx.device.type)[1])[0]

    return replace(ctx, sample_batch=from_rank_zero(all_or_none(first)))


def _context(call: Request) -> Context:
    options = call.options
    world = worlds.init(timeout=timedelta(seconds=options.timeout))
    cluster = ClusterSpec.detect(world, measure=call.searches)
    made = all_or_none(lambda: call.job.context(world, cluster, options.find_unused_parameters, options.sampler_seed))
    return replace(made, sample_batch=options.sample_batch, loss_weight=options.loss_weight)


def _initial_values(model: nn.Module, requested: Strategy | None, call: Request) -> InitialValues | None:
    """Initial values of the model's parameters on the meta device; None if there are no such parameters or values."""
    options = call.options
    knobs = (getattr(method, "param_init_fn", None) for method in requested or ())
    functions: list[Any] = [function for function in (options.param_init_fn, *knobs) if function is not None]
    if not has_meta([model]):
        if options.empty_init:
            raise ArgumentError("empty_init=True is for a model on the meta device; this one has values, leave it out")
        if functions:
            logger.warning("param_init_fn is not called: it is for a model on the meta device, and this one has values")
        return None
    name = type(model).__name__
    if options.empty_init and (call.searches or requested is None):
        raise ArgumentError(
            f"{name} has parameters on the meta device, and empty_init=True leaves them without values, but a search "
            "takes real steps; leave empty_init out and load the checkpoint afterwards, or give a load_strategy"
        )
    asking = needs_values(requested or ()) or needs_values(call.options.included or ())
    if asking is not None:
        raise ArgumentError(
            f"{name} has parameters on the meta device, and {asking} needs their values before it splits or "
            f"converts them; leave {asking} out, or give the model on a real device"
        )
    if len(functions) > 1 or (functions and options.empty_init):
        raise ArgumentError("param_init_fn is given twice, or with empty_init=True; give one of them")
    return None if options.empty_init else InitialValues(model, *functions)


def _loaded(source: Any, ctx: Context) -> Strategy:
    """The user's strategy, complete for these processes, without methods that this hardware cannot run."""

    def read() -> Strategy:
        strategy = Strategy.of(source)
        reasons = {method.name: method.unmet(ctx.cluster) for method in strategy}
        rejected = {name: reason for name, reason in reasons.items() if reason is not None}
        for name, reason in rejected.items():
            logger.warning("%s is left out of the strategy: %s", name, reason)
            strategy = strategy.without(name)
        if rejected:
            strategy = replace(strategy, metadata={**strategy.metadata, "rejected": rejected})
        return strategy

    def completed() -> Strategy:
        strategy = complete(read_strategy, ctx.world.size)
        for axis, size in idle_axes(strategy):
            logger.warning(
                "parallel_mode has %s %d, but no method of the strategy splits over it. These processes repeat the "
                "same work, unless your model uses parallel_group(%r) itself", axis, size, axis,
            )  # fmt: skip
        model_fingerprint = strategy.metadata.get("model", {}).get("fingerprint")
        if model_fingerprint is not None and model_fingerprint != fingerprint(ctx.root):
            logger.warning("the strategy was chosen for another model; its figures need not hold for this one")
        return replace(strategy, metadata={**strategy.metadata, **provenance(ctx.root, ctx.cluster, ctx.world.size)})

    read_strategy = all_or_none(read)
    if ctx.world.size > 1 and any(method.splits for method in read_strategy):
        read_strategy = _with_degrees(read_strategy, ctx)
    strategy = all_or_none(completed)
    require_equal([repr(method) for method in strategy], "the strategy", StrategyError)
    return strategy


def _with_degrees(strategy: Strategy, ctx: Context) -> Strategy:
    """The strategy with the mesh that is estimated fastest, if it splits the model and gives no mesh."""
    from atorch.auto.planner import estimate
    from atorch.auto.planner.dry_runs.trial import BatchCache
    from atorch.auto.planner.planner import starting_point

    if not estimate.lacks_degrees(strategy):
        return strategy
    sampled = with_sample(ctx, strategy)

    def chosen() -> ParallelMode | None:
        if ctx.world.rank != 0:
            return None
        return estimate.fastest_mesh(strategy, *starting_point(sampled, BatchCache(sampled)), ctx.cluster)

    mode = from_rank_zero(all_or_none(chosen))
    assert mode is not None, "rank 0 chose one"
    completed = estimate.on_mesh(strategy, mode, ctx.world.size)
    idle = [name for name in strategy.names() if name not in completed.names()]
    without = f", without {' and '.join(idle)}, which would only cost" if idle else ""
    logger.warning("the strategy names no mesh; %s is estimated fastest%s", mode, without)
    return completed


def _choose(ctx: Context, requested: Strategy | None, call: Request, began: float) -> tuple[Strategy, Plan | None]:
    """The requested strategy, after a dry run if the user wants one; or the search's strategy and its plan."""
    if requested is not None and not call.options.finetune_strategy:
        if not call.options.ignore_dryrun_on_load_strategy:
            from atorch.auto.planner.planner import dry_run

            dry_run(ctx, requested)
        return requested, None
    plan = _searched(ctx, requested, call, began)
    report = plan.to_json_data()
    if ctx.world.rank == 0:
        from atorch.report.text import show_plan

        show_plan(report)
    metadata = {**provenance(ctx.root, ctx.cluster, ctx.world.size), "report": trimmed(report)}
    if requested is not None and "rejected" in requested.metadata:
        metadata["rejected"] = requested.metadata["rejected"]
    return replace(plan.strategy, metadata=metadata), plan


def fingerprint(model: nn.Module) -> str:
    """A digest of the names, shapes and dtypes of the model's parameters: equal for equal architectures."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}\n".encode())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of atorch, torch and Python, by name."""
    import atorch

    return {"atorch": atorch.__version__, "torch": torch.__version__, "python": platform.python_version()}


def provenance(model: nn.Module, cluster: ClusterSpec, world_size: int) -> dict[str, Any]:
    """Versions, world size, cluster and model fingerprint, as plain JSON data."""
    return {
        "versions": versions(),
        "world_size": world_size,
        "cluster": {
            "device": cluster.device.name,
            "num_nodes": cluster.num_nodes,
            "devices_per_node": cluster.devices_per_node,
        },
        "model": {"class": type(model).__name__, "fingerprint": fingerprint(model)},
    }
