"""The arguments of an entry point: read and checked on each process, and compared across processes by fingerprint.

Equal on all processes: the model's class, modes, parameters and buffers; the dataset's class and length; the strategy's
methods, from any source; and every other argument by kind and value (`distributed/fingerprints.py`). Free to differ:
`verbose`; the paths in `save_strategy_to_file` and `calibration`, of which rank 0's are used; the sizes in
`sample_batch`; the arguments of partials in `prepare_input`, `distributed_sampler_cls` and `dataloader_args`; and the
values of weights, which are broadcast from rank 0.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from atorch.auto.adapters import adapted
from atorch.auto.checks import check_job
from atorch.auto.strategy import EXACTNESS, METHODS, RECIPES, Exactness, Strategy
from atorch.distributed import world as worlds
from atorch.distributed.collectives import call_on_all_ranks
from atorch.distributed.fingerprints import Fact, Facts, described, described_dataset, described_model, structure
from atorch.errors import ArgumentError, near_miss, shown
from atorch.files.access import FileKind, check_target

if TYPE_CHECKING:
    from atorch.auto.planner.dry_runs.calibration import CalibrationPath

_ABOUT_STRATEGIES = ("excluded", "included", "load_strategy", "finetune_strategy", "save_strategy_to_file")
FOR_A_CLUSTER = ("sample_batch", "global_batch", "fixed", "extend", "objective", "reserve", "verify")  # of `plan`
INSTEAD: Mapping[str, str] = {
    r"lr|learning_rate|weight_decay|betas|eps|momentum": "give it to the optimizer, as optim_args={'lr': 1e-3}",
    r"optim|optimizer|optim(izer)?_(cls|class|fn|type)": (
        "give optim_func, such as torch.optim.AdamW, and its optim_args"
    ),
    r"optim(izer)?_(kwargs|params|config)|optimizer_args": "give optim_args, as {'lr': 1e-3}",
    r"(train_?)?(data_?)?loader|train_data(set)?|data|trainset": "give dataset, and dataloader_args={'batch_size': 32}",
    r"batch_size|num_workers|shuffle|collate_fn|drop_last|pin_memory|(data)?loader_(args|kwargs)|dataloader_kwargs": (
        "give dataloader_args, as {'batch_size': 32}, in which batch_size is that of all processes together"
    ),
    r"loss|loss_fn|criterion|loss_function": "give loss_func, a function (input, output) -> loss",
    r"(lr_?)?scheduler(_cls|_class|_fn)?": "give lr_scheduler_cls, such as torch.optim.lr_scheduler.StepLR",
    r"(lr_?)?scheduler_(args|kwargs|params)|lr_scheduler_kwargs": "give lr_scheduler_args, as {'step_size': 10}",
    r"methods": "give load_strategy",
    r"save_path|save_strategy": "give save_strategy_to_file",
    r"unpack": "give model_input_format",
    r"(distributed_)?sampler(_cls|_class)?|distributed_sampler_(args|kwargs)": (
        "give distributed_sampler_cls, a class or a functools.partial of one and its arguments; or any sampler as "
        "dataloader_args={'sampler': sampler}"
    ),
    r"strategy_(file|path)": "give load_strategy to read one, or save_strategy_to_file to write it",
    r"input_func(tion)?|batch_func(tion)?": "give prepare_input, a function (data, device) -> input",
    r"amp|autocast|dtype|fp16|bf16|float16|bfloat16|mixed_precision": (
        "give it as a method, load_strategy=[('amp_native', 'bf16')], or to a search as precision='autocast'"
    ),
    r"(grad(ient)?_)?accumulat(e|ion)(_grad_batches|_steps)?|micro_batch_size": (
        "give it as a method, load_strategy=[('micro_batch', {'count': 4})], or accumulate in the loop"
    ),
    r"cluster|global_batch": "give it to atorch.plan(model, sample_batch, cluster='8xH100-80GB')",
    r"(random_)?seed": "give sampler_seed for the order of samples, and call torch.manual_seed(0) for the rest",
    r"dry_?run": "give ignore_dryrun_on_load_strategy=False",
    r"search_time|max_time|(time|search)_budget": "give time_limit, in seconds",
    r"(eval|test|val(id(ation)?)?)_(data_?)?(set|loader)": "what is not trained on is yours to load",
    r"(num_|max_)?(train_)?(epochs|steps)": "the loop over result.dataloader is yours",
    r"device|(local_)?rank|world_size|num_processes|gpus": "torchrun tells each process its rank and device",
    r"(max_)?grad(ient)?_(norm|clip(ping)?)(_val)?|clip(_grad)?(_norm)?": (
        "call atorch.clip_grad_norm(result.model, 1.0) before result.optim.step()"
    ),
}
"""Patterns of unknown argument names → the remedy."""

OPTIONAL = ("optim_args", "dataloader_args", "lr_scheduler_args", "excluded", "included")
"""Arguments whose None equals an empty value."""
CALLED_BY_RANK = ("prepare_input", "distributed_sampler_cls", "dataloader_args")
"""Arguments in which the arguments of a partial may differ between processes."""
OWN = ("model", "dataset", "load_strategy", "sample_batch", "save_strategy_to_file", "calibration", "verbose")
"""Arguments that have a fingerprint of their own kind, or none."""


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The keywords of `auto_accelerate` and `plan` beyond their signature."""

    ignore_dryrun_on_load_strategy: bool = True
    verbose: bool = False
    time_limit: float | None = None  # seconds for the search
    precision: Exactness | None = None  # the least exact numbers: one of EXACTNESS; None: see `ranking.Wanted`
    calibration: CalibrationPath = True  # file of the measurements on this machine, for this search and later ones
    find_unused_parameters: bool = False
    sampler_seed: int = 0
    loss_weight: Any = "auto"  # the items that the loss is a mean over: see LossWeight
    sample_batch: Any = None  # a batch for `prepare_input`, for methods that observe the model if there is no dataset
    verify: bool = True  # compare a strategy's first pass with plain training's
    param_init_fn: Any = None  # fills a module whose parameters are on the meta device, instead of reset_parameters
    empty_init: bool = False  # leave such parameters without values, for a checkpoint that is loaded later
    timeout: float = worlds.TIMEOUT.total_seconds()  # seconds that processes wait for one another in their groups

    @classmethod
    def of(cls, keywords: Mapping[str, Any], others: Sequence[str] = ()) -> CallOptions:
        """The options from keywords; raises ArgumentError for an unknown or invalid one.

        others: further arguments of the entry point, to suggest for a misspelt name.
        """
        names = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in names:
                raise ArgumentError(f"auto_accelerate has no argument {name!r}; {meant(name, (*names, *others))}")
        options = cls(**keywords)
        limit = options.time_limit
        if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
            raise ArgumentError(f"time_limit is {limit!r}; it is a number of seconds above 0, or None")
        if not _is_timeout(options.timeout):
            raise ArgumentError(f"timeout is {options.timeout!r}; it is a finite number of seconds above 0")
        if options.param_init_fn is not None and not callable(options.param_init_fn):
            raise ArgumentError(
                f"param_init_fn is {shown(options.param_init_fn)}; it is a function that writes the parameters of a "
                "module that it is called with"
            )
        for name in ("ignore_dryrun_on_load_strategy", "verbose", "find_unused_parameters", "verify", "empty_init"):
            need_bool(name, getattr(options, name))
        seed = options.sampler_seed
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            raise ArgumentError(f"sampler_seed is {seed!r}; it is a whole number from 0 on")
        if options.precision is not None and options.precision not in EXACTNESS:
            raise ArgumentError(
                f"precision is {options.precision!r}; it is the least exact that you allow: one of "
                f"{', '.join(map(repr, EXACTNESS))}, or None for 'autocast' and less exact only where nothing else fits"
            )
        source = options.calibration
        if not isinstance(source, (bool, str, os.PathLike)) or (not isinstance(source, bool) and Path(source).is_dir()):
            raise ArgumentError(
                f"calibration is {source!r}; it is True for this machine's file in your cache directory, False for "
                "none, or the path of a file"
            )
        weight = options.loss_weight
        if not (callable(weight) or (isinstance(weight, str) and weight)):
            raise ArgumentError(
                f"loss_weight is {weight!r}; it is 'auto', 'rows', 'sum', 'labels', 'shifted_labels', the name of a "
                "mask or of labels in the batch, or a function of the batch that counts what its loss is a mean over"
            )
        return options


def need_bool(name: str, given: object) -> None:
    """Raise ArgumentError unless the value is True or False; 'no' would count as true."""
    if not isinstance(given, int) or given not in (0, 1):
        raise ArgumentError(f"{name} is {shown(given)}; it is True or False")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of an entry point, read and checked, equal on all processes."""

    job: Mapping[str, Any]  # arguments of `make_context`
    options: CallOptions
    strategy: Strategy | None = None  # the user's own
    finetune: bool = False
    excluded: Any = None
    included: Any = None
    target: str | os.PathLike[str] | None = None

    @property
    def searches(self) -> bool:
        return self.strategy is None or self.finetune


def call_of_auto_accelerate(given: Mapping[str, Any], keywords: Mapping[str, Any]) -> Request:
    """Read a call of `auto_accelerate` from its arguments and extra keywords. All processes call this together.

    Raises:
        AtorchError: on every process, if an argument is invalid on one, or differs between them.
    """
    job = {name: value for name, value in given.items() if name not in _ABOUT_STRATEGIES}

    def read() -> Request:
        options = CallOptions.of(keywords, list(given))
        job.update(adapted(job))
        check_job(**job)
        need_bool("finetune_strategy", given["finetune_strategy"])
        source, target = given["load_strategy"], given["save_strategy_to_file"]
        call = Request(
            job=job,
            options=options,
            strategy=None if source is None else Strategy.of(source).settled(job["model"]),
            finetune=given["finetune_strategy"],
            excluded=_names(given["excluded"], "excluded"),
            included=_names(given["included"], "included"),
            target=target,
        )
        if call.searches or not options.ignore_dryrun_on_load_strategy:
            _need_for_steps(job)
        if target is not None and worlds.init().rank == 0:
            _check_target(target)
            if call.strategy is not None:
                call.strategy.to_json()  # raises now if the strategy cannot be saved later
        return call

    worlds.init(timeout=_timeout_of(keywords))
    return call_on_all_ranks("auto_accelerate", lambda: _argument_facts({**given, **keywords}), read, _call_facts)


def call_of_plan(model: Any, given: Sequence[Any], keywords: Mapping[str, Any]) -> Request:
    """Read a call of `plan` for the job's own devices. All processes call this together.

    Raises:
        AtorchError: on every process, if an argument is invalid on one, or differs between them.
    """
    names = ("optim_func", "dataset", "loss_func")

    def read() -> Request:
        wanted, options = _split({**keywords, **positioned(given, names, keywords)})
        excluded, included = (_names(wanted.pop(name, None), name) for name in ("excluded", "included"))
        job = adapted({"model": model, **wanted})
        call = Request(job=job, options=CallOptions.of(options), excluded=excluded, included=included)
        check_job(**job)
        _need_for_steps(job)
        return call

    worlds.init(timeout=_timeout_of(keywords))
    arguments = {"model": model, **keywords, **dict(zip(names, given, strict=False))}
    return call_on_all_ranks("plan", lambda: _argument_facts(arguments), read, _call_facts)


def _names(names: Any, argument: str) -> tuple[str, ...] | None:
    from atorch.auto.planner.search_space.method_names import names_in

    return None if names is None else names_in(names, argument)


def _timeout_of(keywords: Mapping[str, Any]) -> timedelta:
    """The timeout for the first exchange; an invalid one is refused later, when all processes can exchange errors."""
    timeout = keywords.get("timeout")
    return timedelta(seconds=timeout) if _is_timeout(timeout) else worlds.TIMEOUT


def _is_timeout(timeout: Any) -> TypeGuard[float]:
    return isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 < timeout <= timedelta.max.days


def positioned(given: Sequence[Any], names: Sequence[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments of `plan` under their names; raises ArgumentError for one too many or given twice."""
    if len(given) > len(names):
        raise ArgumentError(
            f"plan was given {1 + len(given)} arguments by position; these are model, {', '.join(names)}"
        )
    placed = dict(zip(names, given, strict=False))
    for name in placed:
        if name in keywords:
            raise ArgumentError(f"plan was given {name} twice, by position and by name; leave one out")
    return placed


def meant(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown argument: the remedy."""
    for wrong, instead in INSTEAD.items():
        if re.fullmatch(wrong, name.lower()):
            return instead
    if name in METHODS or name in RECIPES:
        return f"it is a method: give load_strategy=[{name!r}], or to a search included=[{name!r}]"
    return near_miss(name, known)


def _split(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords of `plan` into those of the job and the options; raises ArgumentError for others."""
    option_names = {field.name for field in fields(CallOptions)}
    job = {name: value for name, value in keywords.items() if name not in option_names}
    job_names = {*inspect.signature(check_job).parameters, "excluded", "included"}
    for name in job:
        if name in FOR_A_CLUSTER:
            raise ArgumentError(
                f"{name} is for a plan for a cluster; give one, as in plan(model, sample_batch, "
                f"cluster='8xH100-80GB', {name}=…)"
            )
        if name not in job_names:
            raise ArgumentError(f"plan has no argument {name!r}; {meant(name, job_names | option_names)}")
    return job, {name: value for name, value in keywords.items() if name in option_names}


def _argument_facts(arguments: Mapping[str, Any]) -> Mapping[str, Facts]:
    """Fingerprints of the unread arguments that must be equal."""
    facts: dict[str, Fact] = {}
    for name, value in arguments.items():
        if name not in OWN:
            value = () if value is None and name in OPTIONAL else value
            facts.update(described(name, value, bound=name not in CALLED_BY_RANK))
    saves = arguments.get("save_strategy_to_file")
    facts["save_strategy_to_file"] = Fact("not given" if saves is None else "given")
    facts.update(structure("sample_batch", arguments.get("sample_batch")))
    return {"arguments": facts, "dataset": described_dataset(arguments.get("dataset"))}


def _call_facts(call: Request) -> Mapping[str, Facts]:
    """Fingerprints of the strategy and the model that must be equal."""
    strategy = Fact("None" if call.strategy is None else f"[{call.strategy}]")
    return {"load_strategy": {"load_strategy": strategy}, **described_model(call.job["model"])}


def _check_target(path: str | os.PathLike[str]) -> None:
    """Check before a search that the strategy can be saved at this path."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"save_strategy_to_file is {path!r}; it is the path of a file")
    try:
        check_target(path, FileKind("strategy file", ArgumentError))
    except ArgumentError as error:
        raise ArgumentError(f"save_strategy_to_file names a place where no file can be written: {error}") from None


def _need_for_steps(job: Mapping[str, Any]) -> None:
    missing = [name for name in ("optim_func", "dataset", "loss_func") if job.get(name) is None]
    if missing:
        raise ArgumentError(
            f"the fully automatic mode and dry runs take real steps, so they need {' and '.join(missing)}; "
            "give it, or give a load_strategy alone"
        )
