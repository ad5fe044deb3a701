"""The meaning under FSDP2 of each constructor argument of FullyShardedDataParallel (FSDP1), row by row.

*Applied*: it has an effect here. *Always so*: it asks for what FSDP2 does anyway, or for the same
numbers. *Refused*: it cannot be, for the reason given.

A policy, modules and parameters are asked on the model (`wrapped_names`, `names_within`), and names stay of them, which
a strategy file can hold.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from torch import Tensor, nn

from atorch.blocks import exact_name
from atorch.errors import StrategyError, shown
from atorch.logs import logger

Meaning = Literal["applied", "always so", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """One argument. `knobs(value)` gives the knobs of fsdp's that it sets, or raises ValueError with a reason."""

    argument: str
    meaning: Meaning
    under_fsdp2: str
    knobs: Callable[[Any], dict[str, Any]]


_ADDS_UP, _OBJECTS = "atorch_ignored_cls", "ignored_modules"  # what several arguments name together


def knobs_of(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """`config` with FSDP1's arguments replaced by the knobs that they mean; other entries stay.

    Raises:
        StrategyError: an argument, or a value of one, that FSDP2 cannot follow; or two that set one knob differently.
    """
    knobs = {name: value for name, value in config.items() if name not in ROWS}
    for name, row in ROWS.items():
        if name not in config:
            continue
        try:
            meant = row.knobs(config[name])
        except ValueError as error:
            raise StrategyError(f"{method}.{name} was given {shown(config[name])}; {error}") from None
        for knob, value in meant.items():
            if knob in (_ADDS_UP, _OBJECTS) and knobs.get(knob):
                value = (*_listed(knobs[knob]), *value)
            elif knob in knobs and knobs[knob] != value:
                raise StrategyError(
                    f"{method}.{name} was given {shown(config[name])}, which means {knob} = {value!r}, "
                    f"but {knob} is {knobs[knob]!r}; give one of the two"
                )
            knobs[knob] = value
    return knobs


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, (str, type, nn.Module, Tensor)) else list(value)


def _passed_on(knob: str) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {knob: value}


def _only(*accepted: Any, because: str) -> Callable[[Any], dict[str, Any]]:
    def check(value: Any) -> dict[str, Any]:
        if not any(value is each or value == each for each in accepted):
            raise ValueError(because)
        return {}

    return check


def _anything(value: Any) -> dict[str, Any]:
    return {}


def _strategy(value: Any) -> dict[str, Any]:
    name = value.name if isinstance(value, Enum) else value
    return {} if name is None else {"sharding_strategy": name}


def _offload(value: Any) -> dict[str, Any]:
    return {} if value is None else {"cpu_offload": getattr(value, "offload_params", value)}


def _policy(value: Any) -> dict[str, Any]:
    """torch's policies by class and size, as what they wrap; another function is asked once there is a model."""
    from torch.distributed.fsdp.wrap import (
        ModuleWrapPolicy,
        _Policy,
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )

    if value is None:
        return {}
    if isinstance(value, ModuleWrapPolicy):
        return {"atorch_wrap_cls": _sorted(value._module_classes)}
    if isinstance(value, functools.partial):
        given = value.keywords
        if value.func is transformer_auto_wrap_policy and "transformer_layer_cls" in given:
            return {"atorch_wrap_cls": _sorted(given["transformer_layer_cls"])}
        if value.func is size_based_auto_wrap_policy and set(given) == {"min_num_params"}:
            return {"atorch_size_based_min_num_params": int(given["min_num_params"])}
    if value is size_based_auto_wrap_policy:
        return {"atorch_size_based_min_num_params": 100_000_000}
    if isinstance(value, _Policy) or (callable(value) and not isinstance(value, type)):
        return {"auto_wrap_policy": value}
    raise ValueError(
        "it is a function (module, recurse, nonwrapped_numel) -> bool, or one of torch's policies; for classes and "
        "names give atorch_wrap_cls"
    )


Recursive = Callable[..., bool]


def wrapped_names(policy: Any, root: nn.Module, ignored: Collection[nn.Module | Tensor] = ()) -> tuple[str, ...]:
    """Names of what `policy` wraps below `root`, asked as FSDP1 asks it, by exact names; `ignored` is not asked about.

    Raises:
        StrategyError: it cannot be asked so, asks for arguments of their own for a module, or the answer is no bool.
    """
    from torch.distributed.fsdp.wrap import _Policy

    left_out = {each for each in ignored if isinstance(each, nn.Module)}
    apart = {id(p) for each in ignored for p in (each.parameters() if isinstance(each, nn.Module) else (each,))}
    if isinstance(policy, _Policy):
        chosen = policy._run_policy(root, left_out, {})
        own = next((arguments for arguments in chosen.values() if arguments), None)
        if own:
            raise StrategyError(
                f"fsdp.auto_wrap_policy gives a module arguments of its own, {shown(own)}; all modules have those of "
                "the method: return True or False"
            )
        wrapped = set(chosen)
    else:
        wrapped = set()
        _need_askable(policy)
        _ask(policy, root, left_out, apart, wrapped)
    return tuple(
        exact_name(name)
        for name, module in root.named_modules()
        if name and module in wrapped and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    )


def _need_askable(policy: Recursive) -> None:
    signature = inspect.signature(policy, follow_wrapped=False)  # a decorator may add arguments
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise StrategyError(
            f"fsdp.auto_wrap_policy takes {signature}, and is asked as policy(module=…, recurse=…, "
            f"nonwrapped_numel=…): {error}. Give it these names, or give a function of a module alone as "
            "torch.distributed.fsdp.wrap.CustomPolicy(function)"
        ) from None


def _ask(
    policy: Recursive, module: nn.Module, left_out: set[nn.Module], apart: set[int], wrapped: set[nn.Module]
) -> int:
    """Elements below `module` that are wrapped, once `policy` was asked: whether to look inside, then about itself."""
    numel = sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in apart)

    def answer(recurse: bool, nonwrapped_numel: int) -> bool:
        given = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        if not isinstance(given, (bool, int)):
            raise StrategyError(f"fsdp.auto_wrap_policy answered {shown(given)} for {type(module).__name__}; a bool is")
        return bool(given)

    if not answer(True, numel):
        return 0
    inside = sum(_ask(policy, child, left_out, apart, wrapped) for child in module.children() if child not in left_out)
    if not answer(False, numel - inside):
        return inside
    wrapped.add(module)
    return numel


def names_within(root: nn.Module, objects: Iterable[nn.Module | Tensor]) -> tuple[str, ...]:
    """The exact names of modules and parameters of `root`.

    Raises:
        StrategyError: one is not of the model.
    """
    modules = {id(module): exact_name(name) for name, module in root.named_modules() if name}
    parameters = {id(parameter): name for name, parameter in root.named_parameters()}
    names = []
    for each in objects:
        name = (parameters if isinstance(each, Tensor) else modules).get(id(each))
        if name is None:
            raise StrategyError(
                f"fsdp was told to ignore a {type(each).__name__} that is not inside of {type(root).__name__}; give "
                "modules or parameters of the model itself, or their names"
            )
        names.append(name)
    return tuple(names)


def _prefetch(value: Any) -> dict[str, Any]:
    name = value.name if isinstance(value, Enum) else value
    if name not in ("BACKWARD_PRE", "BACKWARD_POST", None):
        raise ValueError("it is BACKWARD_PRE, BACKWARD_POST or None")
    if name != "BACKWARD_PRE":
        logger.info(
            "fsdp: backward_prefetch=%s computes the same numbers under FSDP2, which gathers the next block before the "
            "current one's gradients are computed, and so holds one block more", name,
        )  # fmt: skip
    return {}


def _fill(value: Any) -> dict[str, Any]:
    if value is not None and (not callable(value) or isinstance(value, type)):
        raise ValueError("it is a function that fills a module")
    return {} if value is None else {"param_init_fn": value}


def _sorted(classes: Iterable[type[nn.Module]]) -> list[type[nn.Module]]:
    # A set has another order in each process, and all processes must have the same strategy.
    return sorted(classes, key=lambda cls: cls.__qualname__)


def _named(what: str) -> Callable[[Any], dict[str, Any]]:
    def check(value: Any) -> dict[str, Any]:
        items = [] if value is None else _listed(value)
        named = [item for item in items if isinstance(item, (str, type))]
        objects = tuple(item for item in items if isinstance(item, (nn.Module, nn.Parameter)))
        if len(named) + len(objects) < len(items):
            raise ValueError(f"it takes {what} objects, or their names or classes")
        return ({_ADDS_UP: named} if named else {}) | ({_OBJECTS: objects} if objects else {})

    return check


_OBJECT = "an object of this process cannot be kept in a strategy"

ROWS: Mapping[str, Row] = {
    row.argument: row
    for row in (
        Row(
            "sharding_strategy",
            "applied",
            "FULL_SHARD and HYBRID_SHARD free gathered parameters after forward, SHARD_GRAD_OP and "
            "_HYBRID_SHARD_ZERO2 keep them for backward; the HYBRID ones need the axes zero (shards) and data "
            "(replicas) in parallel_mode. NO_SHARD keeps everything whole and averages gradients, as ddp does.",
            _strategy,
        ),
        Row(
            "cpu_offload",
            "applied",
            "A bool or CPUOffload: shards, gradients and optimizer states live in host memory, and the optimizer "
            "steps there.",
            _offload,
        ),
        Row(
            "auto_wrap_policy",
            "applied",
            "torch's policies by class and by size become atorch_wrap_cls and atorch_size_based_min_num_params. "
            "Another policy or function is asked on the model, as FSDP1 asks it, and atorch_wrap_cls holds the names "
            "of what it wraps.",
            _policy,
        ),
        Row(
            "backward_prefetch",
            "always so",
            "FSDP2 gathers the next group before the current one's gradients are computed, as BACKWARD_PRE does. "
            "BACKWARD_POST and None compute the same numbers; one more gathered block is held, and the log says so.",
            _prefetch,
        ),
        Row(
            "mixed_precision",
            "applied",
            "param_dtype, reduce_dtype, output_dtype and cast_forward_inputs as FSDP2 has them; buffer_dtype casts "
            "the buffers once; cast_root_forward_inputs holds for the root. Without it, a precision method's dtype "
            "with reduction in fp32.",
            _passed_on("mixed_precision"),
        ),
        Row(
            "ignored_modules",
            "applied",
            "As atorch_ignored_cls, by class, name or as modules of the model, of which the names are kept: whole on "
            "every process. Their gradients are averaged, which FSDP1 left to the user.",
            _named("module"),
        ),
        Row(
            "param_init_fn",
            "applied",
            "It fills modules on the meta device, in place of their reset_parameters: whole ones, one after the other, "
            "of which each process keeps its part. A strategy file cannot hold it: saving such a strategy is refused.",
            _fill,
        ),
        Row(
            "device_id",
            "always so",
            "Each process shards onto its own device.",
            _anything,
        ),
        Row(
            "sync_module_states",
            "applied",
            "True broadcasts rank 0's parameters and buffers before they are sharded. Off, processes that were seeded "
            "apart still train one model: auto_accelerate compares, and gives all rank 0's where they differ.",
            _passed_on("sync_module_states"),
        ),
        Row(
            "forward_prefetch",
            "applied",
            "Each group's all-gather is issued before the forward pass of the group before it.",
            _passed_on("forward_prefetch"),
        ),
        Row(
            "limit_all_gathers",
            "always so",
            "FSDP2 frees gathered parameters in stream order, so memory is bounded without stopping the host. False "
            "asked for no bound, and gets the same numbers.",
            _only(True, False, because="it is a bool"),
        ),
        Row(
            "use_orig_params",
            "always so",
            "Parameters are always the model's own, one DTensor each; they are never flattened together.",
            _only(True, False, because="it is a bool"),
        ),
        Row(
            "ignored_states",
            "applied",
            "As ignored_modules; parameters and their names are taken too.",
            _named("parameter or module"),
        ),
        Row(
            "device_mesh",
            "refused",
            "The mesh is made by parallel_mode: zero shards and data replicates, or data alone shards.",
            _only(None, because=f"{_OBJECT}; say the axes in parallel_mode"),
        ),
        Row(
            "process_group",
            "refused",
            "As device_mesh.",
            _only(None, because=f"{_OBJECT}; say the axes in parallel_mode"),
        ),
    )
}
