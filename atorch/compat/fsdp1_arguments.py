"""The meaning under FSDP2 of each constructor argument of FullyShardedDataParallel (FSDP1), row by row.

*Applied*: it has an effect here. *Always so*: FSDP2 does it anyway, or computes the same numbers.
*Refused*: it is impossible, for the stated reason. `docs/methods/fsdp.md` explains each.

Policies, modules and parameters are resolved on the model (`wrapped_names`, `names_within`) to names, which a strategy
file can hold.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from atorch.errors import StrategyError, shown
from atorch.logs import logger

if TYPE_CHECKING:
    from torch import Tensor, nn

Knobs = Callable[[Any], dict[str, Any]]  # raises ValueError, with a reason, for what FSDP2 does not support


class Row(NamedTuple):
    """One argument: its meaning, and the knobs of fsdp that its value sets."""

    meaning: Literal["applied", "always so", "refused"]
    knobs: Knobs


_ADDS_UP, _OBJECTS = "atorch_ignored_cls", "ignored_modules"  # knobs that several arguments extend


def knobs_of(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """`config` with FSDP1's arguments replaced by the knobs that they mean; other entries stay.

    Raises:
        StrategyError: FSDP2 does not support an argument or its value, or two arguments set one knob differently.
    """
    knobs = {name: value for name, value in config.items() if name not in ROWS}
    for name, row in ROWS.items():
        if name not in config:
            continue
        try:
            translated = row.knobs(config[name])
        except ValueError as error:
            raise StrategyError(f"{method}.{name} was given {shown(config[name])}; {error}") from None
        for knob, value in translated.items():
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
    from torch import Tensor, nn

    return [value] if isinstance(value, (str, type, nn.Module, Tensor)) else list(value)


def _only(*accepted: Any, because: str) -> Knobs:
    def check(value: Any) -> dict[str, Any]:
        if not any(value is choice or value == choice for choice in accepted):
            raise ValueError(because)
        return {}

    return check


def _named(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value


def _unless_none(knob: str, convert: Callable[[Any], Any]) -> Knobs:
    return lambda value: {} if value is None else {knob: convert(value)}


def _policy(value: Any) -> dict[str, Any]:
    """Knobs for torch's policies by class and size; any other function is kept, and evaluated on the model."""
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
        keywords = value.keywords
        if value.func is transformer_auto_wrap_policy and "transformer_layer_cls" in keywords:
            return {"atorch_wrap_cls": _sorted(keywords["transformer_layer_cls"])}
        if value.func is size_based_auto_wrap_policy and set(keywords) == {"min_num_params"}:
            return {"atorch_size_based_min_num_params": int(keywords["min_num_params"])}
    if value is size_based_auto_wrap_policy:
        return {"atorch_size_based_min_num_params": 100_000_000}
    if isinstance(value, _Policy) or (callable(value) and not isinstance(value, type)):
        return {"auto_wrap_policy": value}
    raise ValueError(
        "it is a function (module, recurse, nonwrapped_numel) -> bool, or one of torch's policies; for classes and "
        "names give atorch_wrap_cls"
    )


def wrapped_names(policy: Any, root: nn.Module, ignored: Collection[nn.Module | Tensor] = ()) -> tuple[str, ...]:
    """Names of the modules that `policy` wraps below `root`, evaluated by torch as for FSDP1, without `ignored`.

    Raises:
        StrategyError: the policy has another signature, sets arguments for single modules, or returns no bool.
    """
    from torch import nn
    from torch.distributed.fsdp.wrap import _Policy, _recursive_wrap

    from atorch.model.structure import exact_name

    left_out = {item for item in ignored if isinstance(item, nn.Module)}
    wrapped: dict[nn.Module, Any] = {}  # each with arguments of its own, if it has any
    if isinstance(policy, _Policy):
        wrapped = policy._run_policy(root, left_out, {})
    else:
        parameters = {p for item in ignored for p in (item.parameters() if isinstance(item, nn.Module) else (item,))}

        def record(module: nn.Module, **_: Any) -> nn.Module:
            wrapped[module] = None
            return module  # unchanged: only the choice is recorded

        _recursive_wrap(root, _checked(policy), record, left_out, parameters)  # type: ignore[arg-type]
    if arguments := next(filter(None, wrapped.values()), None):
        raise StrategyError(
            f"fsdp.auto_wrap_policy gives a module arguments of its own, {shown(arguments)}; all modules have those of "
            "the method: return True or False"
        )
    return tuple(
        exact_name(name)
        for name, module in root.named_modules()
        if name and module in wrapped and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    )


def _checked(policy: Callable[..., Any]) -> Callable[..., bool]:
    signature = inspect.signature(policy, follow_wrapped=False)  # a decorator may add arguments
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise StrategyError(
            f"fsdp.auto_wrap_policy takes {signature}, and is asked as policy(module=…, recurse=…, "
            f"nonwrapped_numel=…): {error}. Give it these names, or give a function of a module alone as "
            "torch.distributed.fsdp.wrap.CustomPolicy(function)"
        ) from None

    def answer(module: nn.Module, **arguments: Any) -> bool:
        value = policy(module=module, **arguments)
        if not isinstance(value, (bool, int)):
            raise StrategyError(
                f"fsdp.auto_wrap_policy returned {shown(value)} for {type(module).__name__}; it returns a bool"
            )
        return bool(value)

    return answer


def names_within(root: nn.Module, objects: Iterable[nn.Module | Tensor]) -> tuple[str, ...]:
    """The exact names of modules and parameters of `root`.

    Raises:
        StrategyError: an object is not part of the model.
    """
    from torch import Tensor

    from atorch.model.structure import exact_name

    modules = {id(module): exact_name(name) for name, module in root.named_modules() if name}
    parameters = {id(parameter): name for name, parameter in root.named_parameters()}
    names = []
    for item in objects:
        name = (parameters if isinstance(item, Tensor) else modules).get(id(item))
        if name is None:
            raise StrategyError(
                f"fsdp was told to ignore a {type(item).__name__} that is not inside of {type(root).__name__}; give "
                "modules or parameters of the model itself, or their names"
            )
        names.append(name)
    return tuple(names)


def _sorted(classes: Iterable[type[nn.Module]]) -> list[type[nn.Module]]:
    # The order of a set differs between processes, but all processes must have the same strategy.
    return sorted(classes, key=lambda cls: cls.__qualname__)


def _prefetch(value: Any) -> dict[str, Any]:
    name = _named(value)
    _only("BACKWARD_PRE", "BACKWARD_POST", None, because="it is BACKWARD_PRE, BACKWARD_POST or None")(name)
    if name != "BACKWARD_PRE":
        logger.info(
            "fsdp: backward_prefetch=%s computes the same numbers under FSDP2. FSDP2 gathers the next block before it "
            "computes the current one's gradients, so it holds one block more", name,
        )  # fmt: skip
    return {}


def _filler(value: Any) -> Any:
    if not callable(value) or isinstance(value, type):
        raise ValueError("it is a function that fills a module")
    return value


def _ignored(what: str) -> Knobs:
    from torch import nn

    def check(value: Any) -> dict[str, Any]:
        items = [] if value is None else _listed(value)
        named = [item for item in items if isinstance(item, (str, type))]
        objects = tuple(item for item in items if isinstance(item, (nn.Module, nn.Parameter)))
        if len(named) + len(objects) < len(items):
            raise ValueError(f"it takes {what} objects, or their names or classes")
        return ({_ADDS_UP: named} if named else {}) | ({_OBJECTS: objects} if objects else {})

    return check


_BOOL = _only(True, False, because="it is a bool")
_MESH = _only(None, because="an object of this process cannot be kept in a strategy; say the axes in parallel_mode")

ROWS: Mapping[str, Row] = {
    "sharding_strategy": Row("applied", _unless_none("sharding_strategy", _named)),
    "cpu_offload": Row("applied", _unless_none("cpu_offload", lambda value: getattr(value, "offload_params", value))),
    "auto_wrap_policy": Row("applied", _policy),
    "backward_prefetch": Row("always so", _prefetch),
    "mixed_precision": Row("applied", lambda value: {"mixed_precision": value}),
    "ignored_modules": Row("applied", _ignored("module")),
    "param_init_fn": Row("applied", _unless_none("param_init_fn", _filler)),
    "device_id": Row("always so", lambda value: {}),
    "sync_module_states": Row("applied", lambda value: {"sync_module_states": value}),
    "forward_prefetch": Row("applied", lambda value: {"forward_prefetch": value}),
    "limit_all_gathers": Row("always so", _BOOL),
    "use_orig_params": Row("always so", _BOOL),
    "ignored_states": Row("applied", _ignored("parameter or module")),
    "device_mesh": Row("refused", _MESH),
    "process_group": Row("refused", _MESH),
}
