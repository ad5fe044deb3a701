"""The arguments of an entry point: read and checked on each process, and compared across processes by fingerprint.

Equal on all processes (`distributed/fingerprints.py`):

- the model's class, modes, parameters and buffers; the dataset's class and length
- the strategy's methods, from any source
- every other argument, by kind and value

Free to differ:

- `verbose`, the sizes in `sample_batch`, and the values of weights, which are broadcast from rank 0
- the paths in `save_strategy_to_file` and `calibration`, of which rank 0's are used
- arguments of partials in `prepare_input`, `distributed_sampler_cls` and `dataloader_args`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from atorch.auto.argument_names import argument_remedy, name_positional
from atorch.auto.checks import Arguments
from atorch.auto.job import Job
from atorch.auto.planner.request import PLAN_OPTIONS
from atorch.auto.strategy import PRECISIONS, PrecisionLevel, Strategy
from atorch.distributed import world as worlds
from atorch.distributed.collectives import call_on_all_ranks
from atorch.distributed.fingerprints import Fact, Facts, facts_of, facts_of_dataset, facts_of_model, structure
from atorch.errors import ArgumentError
from atorch.files import FileKind, check_target

OPTIONAL = ("optim_args", "dataloader_args", "lr_scheduler_args", "excluded", "included")
"""Arguments whose None equals an empty value."""
CALLED_BY_RANK = ("prepare_input", "distributed_sampler_cls", "dataloader_args")
"""Arguments in which the arguments of a partial may differ between processes."""
OWN = ("model", "dataset", "load_strategy", "sample_batch", "save_strategy_to_file", "calibration", "verbose")
"""Arguments that have a fingerprint of their own kind, or none."""


def _bool(value: object) -> object:
    return bool(value) if isinstance(value, int) and value in (0, 1) else value


def _names(names: Any, info: ValidationInfo) -> tuple[str, ...] | None:
    from atorch.auto.planner.request import names_in

    return None if names is None else names_in(names, str(info.field_name))


def _file(path: bool | str | os.PathLike[str]) -> bool | str | os.PathLike[str]:
    if not isinstance(path, bool) and Path(path).is_dir():
        raise ValueError("a folder")
    return path


def _rule(rule: Any) -> Any:
    if not (callable(rule) or (isinstance(rule, str) and rule)):
        raise ValueError("no rule")
    return rule


def _flag(default: bool) -> Any:
    return Field(default, description="True or False")


Flag = Annotated[bool, BeforeValidator(_bool)]
MethodNames = Annotated[tuple[str, ...] | None, PlainValidator(_names)]


class CallOptions(Arguments):
    """The arguments of `auto_accelerate` beyond the job, most of which `plan` takes, too."""

    load_strategy: Any = None
    finetune_strategy: Flag = _flag(False)
    save_strategy_to_file: str | os.PathLike[str] | None = Field(None, description="the path of a file")
    excluded: MethodNames = None
    included: MethodNames = None
    ignore_dryrun_on_load_strategy: Flag = _flag(True)
    verbose: Flag = _flag(False)
    time_limit: float | None = Field(None, gt=0, description="a number of seconds above 0, or None")
    precision: PrecisionLevel | None = Field(
        None,
        description=f"the lowest that you allow: one of {', '.join(map(repr, PRECISIONS))}, or None for "
        "'autocast' and lower only where nothing else fits",
    )
    calibration: Annotated[bool | str | os.PathLike[str], AfterValidator(_file)] = Field(
        True,
        description="True for this machine's file in your cache directory, False for none, or the path of a file",
    )
    find_unused_parameters: Flag = _flag(False)
    sampler_seed: int = Field(0, ge=0, description="a whole number from 0 on")
    loss_weight: Annotated[Any, PlainValidator(_rule)] = Field(
        "auto",
        description="'auto', 'rows', 'sum', 'labels', 'shifted_labels', the name of a mask or of labels in the batch, "
        "or a function of the batch that counts what its loss is a mean over",
    )
    sample_batch: Any = None
    verify: Flag = _flag(True)
    param_init_fn: Callable[..., Any] | None = Field(
        None, description="a function that writes the parameters of a module that it is called with"
    )
    empty_init: Flag = _flag(False)
    timeout: float = Field(
        worlds.TIMEOUT.total_seconds(),
        gt=0,
        le=timedelta.max.days,
        description="a finite number of seconds above 0",
    )


OF_STRATEGIES = ("load_strategy", "finetune_strategy", "save_strategy_to_file")
"""Options that `plan` does not take."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of an entry point, read and checked, equal on all processes."""

    job: Job
    options: CallOptions
    strategy: Strategy | None = None  # the user's own, for the job's model

    @property
    def searches(self) -> bool:
        return self.strategy is None or self.options.finetune_strategy

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Request:
        options = CallOptions.of({name: arguments[name] for name in arguments if name in CallOptions.model_fields})
        job = Job.of({name: arguments[name] for name in arguments if name in Job.model_fields})
        source, target = options.load_strategy, options.save_strategy_to_file
        strategy = None if source is None else Strategy.of(source).settled(job.model)
        request = cls(job=job, options=options, strategy=strategy)
        if request.searches or not options.ignore_dryrun_on_load_strategy:
            _need_for_steps(job)
        if target is not None and worlds.init().rank == 0:
            _check_target(target)
            if strategy is not None:
                strategy.to_json()  # raises now if the strategy cannot be saved later
        return request


def call_of_auto_accelerate(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> Request:
    """Read a call of `auto_accelerate` from its arguments, with `others` that it does not have.

    All processes call this together.

    Raises:
        AtorchError: on every process, if an argument is invalid on one, or differs between them.
    """

    def read() -> Request:
        for name in others:
            raise ArgumentError(f"auto_accelerate has no argument {name!r}; {argument_remedy(name, arguments)}")
        return Request.of(arguments)

    return _agreed("auto_accelerate", {**arguments, **others}, read)


def call_of_plan(model: Any, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Request:
    """Read a call of `plan` for the job's own devices. All processes call this together.

    Raises:
        AtorchError: on every process, if an argument is invalid on one, or differs between them.
    """
    names = ("optim_func", "dataset", "loss_func")
    known = [name for name in (*Job.model_fields, *CallOptions.model_fields) if name not in OF_STRATEGIES]

    def read() -> Request:
        wanted = {"model": model, **keywords, **name_positional(positional, names, keywords)}
        for name in wanted:
            if name in PLAN_OPTIONS and name not in known:
                raise ArgumentError(
                    f"{name} is for a plan for a cluster; give one, as in plan(model, sample_batch, "
                    f"cluster='8xH100-80GB', {name}=…)"
                )
            if name not in known:
                raise ArgumentError(f"plan has no argument {name!r}; {argument_remedy(name, known)}")
        return Request.of(wanted)

    return _agreed("plan", {"model": model, **keywords, **dict(zip(names, positional, strict=False))}, read)


def _agreed(caller: str, arguments: Mapping[str, Any], read: Callable[[], Request]) -> Request:
    """The request that `read` makes of a call, equal on all processes."""
    try:
        timeout = CallOptions.of({"timeout": arguments["timeout"]}).timeout if "timeout" in arguments else None
    except ArgumentError:  # raised again in `read`, when all processes can exchange errors
        timeout = None
    worlds.init(timeout=worlds.TIMEOUT if timeout is None else timedelta(seconds=timeout))
    return call_on_all_ranks(caller, lambda: _argument_facts(arguments), read, _call_facts)


def _argument_facts(arguments: Mapping[str, Any]) -> Mapping[str, Facts]:
    """Fingerprints of the unread arguments that must be equal."""
    facts: dict[str, Fact] = {}
    for name, value in arguments.items():
        if name not in OWN:
            value = () if value is None and name in OPTIONAL else value
            facts.update(facts_of(name, value, bound=name not in CALLED_BY_RANK))
    saves = arguments.get("save_strategy_to_file")
    facts["save_strategy_to_file"] = Fact("not given" if saves is None else "given")
    facts.update(structure("sample_batch", arguments.get("sample_batch")))
    return {"arguments": facts, "dataset": facts_of_dataset(arguments.get("dataset"))}


def _call_facts(call: Request) -> Mapping[str, Facts]:
    strategy = Fact("None" if call.strategy is None else f"[{call.strategy}]")
    return {"load_strategy": {"load_strategy": strategy}, **facts_of_model(call.job.model)}


def _check_target(path: str | os.PathLike[str]) -> None:
    """Check before a search that the strategy can be saved at this path."""
    try:
        check_target(path, FileKind("strategy file", ArgumentError))
    except ArgumentError as error:
        raise ArgumentError(f"save_strategy_to_file names a place where no file can be written: {error}") from None


def _need_for_steps(job: Job) -> None:
    missing = [name for name in ("optim_func", "dataset", "loss_func") if getattr(job, name) is None]
    if missing:
        raise ArgumentError(
            f"the fully automatic mode and dry runs take real steps, so they need {' and '.join(missing)}; "
            "give it, or give only a load_strategy"
        )
