"""One call of a front door, step by step: read the arguments, load or search a strategy, apply it, build, save."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from atorch.auto.context import AccelerateResult, Context
from atorch.auto.job import make_context
from atorch.auto.opt_lib.completion import batch_place, complete, fills_meta, idle_axes
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.provenance import fingerprint, provenance, versions
from atorch.auto.strategy import Strategy
from atorch.cluster import ClusterSpec
from atorch.distributed import world as worlds
from atorch.distributed.collectives import agree, from_rank_zero, synchronise, together
from atorch.errors import ArgumentError, NoFeasiblePlanError, StrategyError, near_miss
from atorch.logs import logger, speaking

if TYPE_CHECKING:
    from atorch.auto.planner.calibration import Calibration, Source
    from atorch.auto.planner.plan import Plan

MAX_KEPT = 50  # rejected compositions in a strategy's report
FOR_A_CLUSTER = ("sample_batch", "global_batch", "fixed", "objective", "reserve", "verify")  # arguments of `plan`


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `auto_accelerate` and `plan` beyond their signature."""

    ignore_dryrun_on_load_strategy: bool = True
    verbose: bool = False
    time_limit: float | None = None  # seconds for the search
    calibration: Source = True  # where the search keeps and finds what was measured on this machine
    find_unused_parameters: bool = False
    sampler_seed: int = 0
    sample_batch: Any = None  # what `prepare_input` takes, for methods that watch the model where there is no dataset

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Options:
        """The options from keywords; raises ArgumentError for one that does not exist or does not hold."""
        known = [each.name for each in fields(cls)]
        for name in keywords:
            if name not in known:
                raise ArgumentError(f"auto_accelerate has no argument {name!r}; {near_miss(name, known)}")
        options = cls(**keywords)
        limit = options.time_limit
        if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
            raise ArgumentError(f"time_limit is {limit!r}; it is a number of seconds above 0, or None")
        source = options.calibration
        if not isinstance(source, (bool, str, os.PathLike)) or (not isinstance(source, bool) and Path(source).is_dir()):
            raise ArgumentError(
                f"calibration is {source!r}; it is True for this machine's file in your cache directory, False for "
                "none, or the path of a file"
            )
        return options


def run(
    job: Mapping[str, Any],
    options: Options,
    *,
    load_strategy: Any,
    finetune: bool,
    excluded: Sequence[str] | None,
    included: Sequence[str] | None,
    target: str | os.PathLike[str] | None,
) -> tuple[bool, AccelerateResult | None, Strategy | None]:
    """What `auto_accelerate` does with the arguments of `make_context` in `job` and its own."""
    searches = load_strategy is None or finetune
    with speaking(options.verbose and worlds.init().rank == 0):
        ctx = _context(job, options, searches)
        together(lambda: _check_target(target) if target is not None and ctx.world.rank == 0 else None)
        given = None if load_strategy is None else _loaded(load_strategy, ctx)
        together(lambda: _check_real(ctx.root, None if searches else given))
        if not searches and (excluded or included or options.time_limit is not None):
            logger.warning(
                "excluded, included and time_limit are the search's; the load_strategy is applied as it is "
                "(finetune_strategy=True searches the knobs that it leaves unset)"
            )
        try:
            strategy = _chosen(ctx, given, options, finetune, excluded, included)
        except NoFeasiblePlanError as error:
            if ctx.world.rank == 0:
                from atorch.report.text import show_rejections

                show_rejections(error.rejected)
            logger.warning("%s", error)
            return False, None, None
        logger.info("the strategy is %s", strategy)
        result, strategy = accelerate(ctx, strategy)
        if target is not None:
            together(lambda: strategy.save(target) if ctx.world.rank == 0 else None)
        return True, result, strategy


def searched(
    job: Mapping[str, Any], options: Options, excluded: Sequence[str] | None, included: Sequence[str] | None
) -> Plan:
    """What `plan` does."""
    from atorch.auto.planner import search

    ctx = _context(job, options, searches=True)
    return search(
        ctx,
        excluded=excluded,
        included=included,
        time_limit=options.time_limit,
        verbose=options.verbose,
        calibration=_calibration(options, ctx),
    )


def split(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of `plan`, those that describe the job apart from the options; raises ArgumentError for others."""
    own = {each.name for each in fields(Options)}
    job = {name: value for name, value in keywords.items() if name not in own}
    known = {*inspect.signature(make_context).parameters, "excluded", "included"} - {"world", "cluster"} - own
    for name in job:
        if name in FOR_A_CLUSTER:
            raise ArgumentError(
                f"{name} is for a plan for a cluster; give one, as in plan(model, sample_batch, "
                f"cluster='8xH100-80GB', {name}=…)"
            )
        if name not in known:
            raise ArgumentError(f"plan has no argument {name!r}; {near_miss(name, known | own)}")
    return job, {name: value for name, value in keywords.items() if name in own}


def positioned(given: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments of `plan` under their names; raises ArgumentError for one too many, or given twice."""
    if len(given) > len(names):
        raise ArgumentError(
            f"plan was given {1 + len(given)} arguments by position; these are model, {', '.join(names)}"
        )
    placed = dict(zip(names, given, strict=False))
    for name in placed:
        if name in keywords:
            raise ArgumentError(f"plan was given {name} twice, by position and by name; leave one out")
    return placed


def accelerate(ctx: Context, strategy: Strategy) -> tuple[AccelerateResult, Strategy]:
    """Apply a complete strategy to the context's model and build: the result, and the strategy with what was learnt."""
    if ctx.make_loader is not None:
        make = ctx.make_loader  # once before anything is changed: what does not hold leaves the model as it was
        together(lambda: make(*batch_place(strategy, ctx.device.type)))
    if ctx.world.size > 1:
        synchronise([*ctx.root.parameters(), *ctx.root.buffers()])
    applied = strategy.apply(with_sample(ctx, strategy))
    result = together(applied.build)  # with the user's optimizer and scheduler, which may raise
    return result, replace(strategy, metadata={**strategy.metadata, **applied.learnt})


def with_sample(ctx: Context, strategy: Strategy) -> Context:
    """The context with rank 0's first batch as sample, where a method of the strategy needs one and none was given.

    Raises:
        ArgumentError: there is no dataset to take it from.
    """
    needing = [each.name for each in strategy if each.needs_sample]
    if not needing or ctx.sample_batch is not None:
        return ctx
    from atorch.auto.planner.candidate import Feed

    def first() -> Any:
        if ctx.make_loader is None:
            raise ArgumentError(
                f"{needing[0]} watches the model at work before it splits it; give a dataset, or a sample_batch"
            )
        return Feed(ctx).batches(0, batch_place(strategy, ctx.device.type)[1])[0]

    return replace(ctx, sample_batch=from_rank_zero(together(first)))


def _context(job: Mapping[str, Any], options: Options, searches: bool) -> Context:
    world = worlds.init()
    cluster = ClusterSpec.detect(world, measure=searches)
    made = together(
        lambda: make_context(
            **job,
            world=world,
            cluster=cluster,
            find_unused_parameters=options.find_unused_parameters,
            sampler_seed=options.sampler_seed,
        )
    )
    made = replace(made, sample_batch=options.sample_batch)
    if searches or not options.ignore_dryrun_on_load_strategy:
        together(lambda: _need_for_steps(made))
    return made


def _calibration(options: Options, ctx: Context) -> Calibration | None:
    from atorch.auto.planner.calibration import Calibration

    return Calibration.of(options.calibration, ctx.cluster, versions())


def _check_target(path: str | os.PathLike[str]) -> None:
    """That a strategy could be saved there: known now, not after a search."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"save_strategy_to_file is {path!r}; it is the path of a file")
    folder = Path(path).absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or Path(path).is_dir():
        raise ArgumentError(f"save_strategy_to_file is {str(path)!r}, where no file can be written; give another path")


def _check_real(model: nn.Module, given: Strategy | None) -> None:
    """That the model has values, or the strategy gives it some."""
    if any(parameter.is_meta for parameter in model.parameters()) and (given is None or not fills_meta(given)):
        raise ArgumentError(
            f"{type(model).__name__} has parameters on the meta device, without values; atorch.plan() plans for it, "
            "and fsdp in a load_strategy fills it by reset_parameters; else give it on a real device"
        )


def _need_for_steps(ctx: Context) -> None:
    needed = {"optim_func": ctx.make_optimizer, "dataset": ctx.make_loader, "loss_func": ctx.loss_func}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise ArgumentError(
            f"the fully automatic mode and dry runs take real steps, so they need {' and '.join(missing)}; "
            "give it, or give a load_strategy alone"
        )


def _loaded(source: Any, ctx: Context) -> Strategy:
    """The user's strategy, complete for these processes, without what this hardware cannot do."""

    def read() -> Strategy:
        strategy = Strategy.of(source)
        rejected = {}
        for each in strategy:
            reason = each.unmet(ctx.cluster)
            if reason is not None:
                rejected[each.name] = reason
        for name, reason in rejected.items():
            logger.warning("%s is left out of the strategy: %s", name, reason)
            strategy = strategy.without(name)
        strategy.need_applicable()
        if rejected:
            strategy = replace(strategy, metadata={**strategy.metadata, "rejected": rejected})
        return strategy

    def completed() -> Strategy:
        strategy = complete(read_strategy, ctx.world.size)
        for axis, size in idle_axes(strategy):
            logger.warning(
                "parallel_mode has %s %d, but no method of the strategy splits over it: these processes repeat the "
                "same work, unless your model uses parallel_group(%r) itself", axis, size, axis,
            )  # fmt: skip
        known = strategy.metadata.get("model", {}).get("fingerprint")
        if known is not None and known != fingerprint(ctx.root):
            logger.warning("the strategy was chosen for another model; its figures need not hold for this one")
        return replace(strategy, metadata={**strategy.metadata, **provenance(ctx.root, ctx.cluster, ctx.world.size)})

    read_strategy = together(read)
    if ctx.world.size > 1 and any(each.splits for each in read_strategy):
        read_strategy = _with_degrees(read_strategy, ctx)
    strategy = together(completed)
    agree([repr(each) for each in strategy], "the strategy", StrategyError)
    return strategy


def _with_degrees(strategy: Strategy, ctx: Context) -> Strategy:
    """The strategy with a mesh, where it splits the model without saying into how many parts."""
    from atorch.auto.planner import degrees
    from atorch.auto.planner.candidate import Feed
    from atorch.auto.planner.planner import starting_point

    if not degrees.lacks_degrees(strategy):
        return strategy
    known = with_sample(ctx, strategy)

    def chosen() -> ParallelMode | None:
        if ctx.world.rank != 0:
            return None
        return degrees.fastest_mesh(strategy, *starting_point(known, Feed(known)), ctx.cluster)

    mode = from_rank_zero(together(chosen))
    assert mode is not None, "rank 0 chose one"
    found = degrees.on_mesh(strategy, mode, ctx.world.size)
    idle = [name for name in strategy.names() if name not in found.names()]
    without = f", without {' and '.join(idle)}, which would only cost" if idle else ""
    logger.warning("the strategy names no mesh; %s is estimated fastest%s", mode, without)
    return found


def _chosen(
    ctx: Context,
    given: Strategy | None,
    options: Options,
    finetune: bool,
    excluded: Sequence[str] | None,
    included: Sequence[str] | None,
) -> Strategy:
    """The given strategy, dry-run where the user wants that; or the plan's."""
    if given is not None and not finetune and options.ignore_dryrun_on_load_strategy:
        return given
    from atorch.auto.planner import dry_run, search

    if given is not None and not finetune:
        dry_run(ctx, given)
        return given
    found = search(
        ctx,
        excluded=excluded,
        included=included,
        fixed=given,
        time_limit=options.time_limit,
        verbose=options.verbose,
        calibration=_calibration(options, ctx),
    )
    report = found.to_json_data()
    if ctx.world.rank == 0:
        from atorch.report.text import show_plan

        show_plan(report)
    # The file keeps what was learnt; what was only estimated can be estimated again.
    learnt = [each for each in report["rejected"] if each["why"] != "not run"][:MAX_KEPT]
    metadata = {**provenance(ctx.root, ctx.cluster, ctx.world.size), "report": {**report, "rejected": learnt}}
    if given is not None and "rejected" in given.metadata:
        metadata["rejected"] = given.metadata["rejected"]
    return replace(found.strategy, metadata=metadata)
