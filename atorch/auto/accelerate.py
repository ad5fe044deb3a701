"""`auto_accelerate`: plan where no strategy is given, check, apply, build.

The same call on one process or on many: every rank makes it with the same arguments, and all ranks return together
or raise together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Dataset

from atorch.auto.context import AccelerateResult, Context, LossFunc, ParamGroups
from atorch.auto.job import InputFormat, make_context
from atorch.auto.opt_lib.completion import batch_place, complete, fills_meta, idle_axes
from atorch.auto.provenance import fingerprint, provenance
from atorch.auto.strategy import Strategy
from atorch.cluster import ClusterSpec
from atorch.distributed import world as worlds
from atorch.distributed.collectives import agree, synchronise, together
from atorch.errors import ArgumentError, NoFeasiblePlanError, StrategyError, near_miss
from atorch.logs import logger, speaking

if TYPE_CHECKING:
    from atorch.auto.planner.plan import Plan

MAX_KEPT = 50  # rejected compositions in a strategy's report


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keywords of `auto_accelerate` and `plan` beyond their signature."""

    ignore_dryrun_on_load_strategy: bool = True
    verbose: bool = False
    time_limit: float | None = None  # seconds for the search
    find_unused_parameters: bool = False
    sampler_seed: int = 0

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
        return options


def auto_accelerate(
    model: nn.Module,
    optim_func: Callable[..., Any] | None = None,
    dataset: Dataset[Any] | None = None,
    loss_func: LossFunc | None = None,
    prepare_input: Callable[[Any, Any], Any] | None = None,
    model_input_format: InputFormat | None = None,
    optim_args: Mapping[str, Any] | None = None,
    optim_param_func: Callable[[nn.Module], ParamGroups] | None = None,
    dataloader_args: Mapping[str, Any] | None = None,
    distributed_sampler_cls: Callable[..., Any] | None = None,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    load_strategy: Any = None,
    lr_scheduler_cls: Callable[..., Any] | None = None,
    lr_scheduler_args: Mapping[str, Any] | None = None,
    finetune_strategy: bool = False,
    save_strategy_to_file: str | os.PathLike[str] | None = None,
    **kargs: Any,
) -> tuple[bool, AccelerateResult | None, Strategy | None]:
    """Make `model` train as fast as the hardware allows.

    Without `load_strategy` the strategy is searched for: this needs `optim_func`, `dataset` and `loss_func`. With one,
    it is applied as it is (`finetune_strategy=True` searches the knobs that it leaves unset).

    Args:
        model: an ordinary, non-distributed module. The strategy that is chosen changes it in place, no other does.
        optim_func: `torch.optim.AdamW` or any function of `(parameters, **optim_args)` that returns an optimizer.
        dataset: the training data.
        loss_func: `(input, output) -> loss`, a scalar tensor, or a list or tuple whose first item is one.
        prepare_input: `(data, device) -> input`; None moves the tensors in `data` to the device.
        model_input_format: how `input` is given to the model: None as it is, "unpack_sequence" as `*input`,
            "unpack_dict" as `**input`.
        optim_args: keyword arguments of the optimizer.
        optim_param_func: `(model) -> parameter groups`.
        dataloader_args: keyword arguments of the DataLoader. `batch_size` is the global batch size.
        distributed_sampler_cls: a class with DistributedSampler's interface.
        excluded, included: names of methods that the search must not, or must, use.
        load_strategy: a list of method names and `(name, config)` pairs, a Strategy, JSON, or a strategy file's path.
        lr_scheduler_cls, lr_scheduler_args: a scheduler that is built on the resulting optimizer.
        save_strategy_to_file: where to write the resulting strategy, as JSON.
        **kargs: see `Options`: ignore_dryrun_on_load_strategy, verbose, time_limit (seconds), find_unused_parameters,
            sampler_seed.

    Returns:
        `(status, result, best_strategy)`. `result` unpacks as (model, optim, dataloader, loss_func, prepare_input,
        args) and has `lr_scheduler` and `step` beside them. `status` is False, and the others None, only where a
        search finds nothing that fits.

    Raises:
        ArgumentError, StrategyError, CapabilityError: on every rank, for whatever does not hold.
    """
    options = Options.of(kargs)
    searches = load_strategy is None or finetune_strategy
    with speaking(options.verbose and worlds.init().rank == 0):
        ctx = _context(
            options, searches, model, optim_func, dataset, loss_func, prepare_input, model_input_format, optim_args,
            optim_param_func, dataloader_args, distributed_sampler_cls, lr_scheduler_cls, lr_scheduler_args,
        )  # fmt: skip
        target = save_strategy_to_file
        together(lambda: _check_target(target) if target is not None and ctx.world.rank == 0 else None)
        given = None if load_strategy is None else _loaded(load_strategy, ctx)
        together(lambda: _check_real(ctx.root, None if searches else given))
        if not searches and (excluded or included or options.time_limit is not None):
            logger.warning(
                "excluded, included and time_limit are the search's; the load_strategy is applied as it is "
                "(finetune_strategy=True searches the knobs that it leaves unset)"
            )
        try:
            strategy = _chosen(ctx, given, options, finetune_strategy, excluded, included)
        except NoFeasiblePlanError as error:
            logger.warning("%s", error)
            return False, None, None
        logger.info("the strategy is %s", strategy)
        result = accelerate(ctx, strategy)
        if target is not None:
            together(lambda: strategy.save(target) if ctx.world.rank == 0 else None)
        return True, result, strategy


def plan(
    model: nn.Module,
    optim_func: Callable[..., Any],
    dataset: Dataset[Any],
    loss_func: LossFunc,
    *,
    excluded: Sequence[str] | None = None,
    included: Sequence[str] | None = None,
    **kargs: Any,
) -> Plan:
    """What the fully automatic mode of `auto_accelerate` would choose, and why. The model is left as it is.

    Takes the arguments of `auto_accelerate` that describe the job.

    Raises:
        NoFeasiblePlanError: nothing fits; the nearest miss is named.
    """
    from atorch.auto.planner import search

    names = {each.name for each in fields(Options)}
    options = Options.of({name: value for name, value in kargs.items() if name in names})
    job = {name: value for name, value in kargs.items() if name not in names}
    unknown = set(job) - set(_JOB_ARGUMENTS)
    if unknown:
        raise ArgumentError(f"plan has no argument {min(unknown)!r}; {near_miss(min(unknown), _JOB_ARGUMENTS)}")
    ctx = _context(options, True, model, optim_func, dataset, loss_func, **job)
    return search(ctx, excluded=excluded, included=included, time_limit=options.time_limit, verbose=options.verbose)


_JOB_ARGUMENTS = (
    "prepare_input", "model_input_format", "optim_args", "optim_param_func", "dataloader_args",
    "distributed_sampler_cls", "lr_scheduler_cls", "lr_scheduler_args",
)  # fmt: skip


def accelerate(ctx: Context, strategy: Strategy) -> AccelerateResult:
    """Apply a complete strategy to the context's model and build the result."""
    if ctx.make_loader is not None:
        make = ctx.make_loader  # once before anything is changed: what does not hold leaves the model as it was
        together(lambda: make(*batch_place(strategy, ctx.device.type)))
    if ctx.world.size > 1:
        synchronise([*ctx.root.parameters(), *ctx.root.buffers()])
    applied = strategy.apply(ctx)
    return together(applied.build)  # with the user's optimizer and scheduler, which may raise


def _context(options: Options, planned: bool, *job: Any, **more: Any) -> Context:
    world = worlds.init()
    cluster = ClusterSpec.detect(world, measure=planned)
    made = together(
        lambda: make_context(
            *job,
            **more,
            world=world,
            cluster=cluster,
            find_unused_parameters=options.find_unused_parameters,
            sampler_seed=options.sampler_seed,
        )
    )
    if planned or not options.ignore_dryrun_on_load_strategy:
        together(lambda: _need_for_steps(made))
    return made


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
        strategy = complete(strategy, ctx.world.size)
        for axis, size in idle_axes(strategy):
            logger.warning(
                "parallel_mode has %s %d, but no method of the strategy splits over it: these processes repeat the "
                "same work, unless your model uses parallel_group(%r) itself", axis, size, axis,
            )  # fmt: skip
        known = strategy.metadata.get("model", {}).get("fingerprint")
        if known is not None and known != fingerprint(ctx.root):
            logger.warning("the strategy was chosen for another model; its figures need not hold for this one")
        metadata = {**strategy.metadata, **provenance(ctx.root, ctx.cluster, ctx.world.size)}
        if rejected:
            metadata["rejected"] = rejected
        return replace(strategy, metadata=metadata)

    strategy = together(read)
    agree([repr(each) for each in strategy], "the strategy", StrategyError)
    return strategy


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
