"""What each constructor argument of FullyShardedDataParallel (FSDP1) means under FSDP2, row by row.

*Applied*: it has an effect here. *Always so*: it asks for what FSDP2 does anyway, and is accepted as long as it does.
*Refused*: it cannot be, for the reason given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from torch import nn

from atorch.errors import StrategyError

Meaning = Literal["applied", "always so", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """One argument. `knobs(value)` gives the knobs of fsdp's that it sets, or raises ValueError with a reason."""

    argument: str
    meaning: Meaning
    under_fsdp2: str
    knobs: Callable[[Any], dict[str, Any]]


_ADDS_UP = "atorch_ignored_cls"  # what several arguments name together


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
            raise StrategyError(f"{method}.{name} was given {config[name]!r}; {error}") from None
        for knob, value in meant.items():
            if knob == _ADDS_UP and knobs.get(knob):
                value = [*_listed(knobs[knob]), *value]
            elif knob in knobs and knobs[knob] != value:
                raise StrategyError(
                    f"{method}.{name} was given {config[name]!r}, which means {knob} = {value!r}, "
                    f"but {knob} is {knobs[knob]!r}; give one of the two"
                )
            knobs[knob] = value
    return knobs


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, (str, type)) else list(value)


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
    if name is None:
        return {}
    if name == "NO_SHARD":
        raise ValueError("NO_SHARD shards nothing; use the method ddp")
    return {"sharding_strategy": name}


def _offload(value: Any) -> dict[str, Any]:
    return {"cpu_offload": bool(getattr(value, "offload_params", value))}


def _policy(value: Any) -> dict[str, Any]:
    """torch's own policies, as what they wrap; a function of the user's cannot be kept in a strategy."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if value is None:
        return {}
    if isinstance(value, ModuleWrapPolicy):
        return {"atorch_wrap_cls": _sorted(value._module_classes)}
    if isinstance(value, functools.partial):
        given = value.keywords
        if value.func is transformer_auto_wrap_policy and "transformer_layer_cls" in given:
            return {"atorch_wrap_cls": _sorted(given["transformer_layer_cls"])}
        if value.func is size_based_auto_wrap_policy and "min_num_params" in given:
            return {"atorch_size_based_min_num_params": int(given["min_num_params"])}
    if value is size_based_auto_wrap_policy:
        return {"atorch_size_based_min_num_params": 100_000_000}
    raise ValueError(
        "a function cannot be kept in a strategy; give atorch_wrap_cls or atorch_size_based_min_num_params, "
        "or one of torch's policies: ModuleWrapPolicy, transformer_auto_wrap_policy, size_based_auto_wrap_policy"
    )


def _sorted(classes: Iterable[type[nn.Module]]) -> list[type[nn.Module]]:
    # A set has another order in each process, and all processes must have the same strategy.
    return sorted(classes, key=lambda cls: cls.__qualname__)


def _named(what: str) -> Callable[[Any], dict[str, Any]]:
    def check(value: Any) -> dict[str, Any]:
        items = [] if value is None else _listed(value)
        if not all(isinstance(item, (str, type)) for item in items):
            raise ValueError(f"{what} objects cannot be kept in a strategy; give their names or classes")
        return {"atorch_ignored_cls": items} if items else {}

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
            "(replicas) in parallel_mode. NO_SHARD is refused: that is ddp.",
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
            "torch's policies by class and by size become atorch_wrap_cls and atorch_size_based_min_num_params. A "
            "function of your own is refused: a strategy file cannot hold it.",
            _policy,
        ),
        Row(
            "backward_prefetch",
            "always so",
            "FSDP2 gathers the next group before the current one's gradients are computed, as BACKWARD_PRE does. "
            "BACKWARD_POST and None are refused.",
            lambda value: _only("BACKWARD_PRE", because="FSDP2 always prefetches as BACKWARD_PRE; leave it out")(
                value.name if isinstance(value, Enum) else value
            ),
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
            "As atorch_ignored_cls, by class or name: kept whole on every process. Their gradients are averaged, "
            "which FSDP1 left to the user. Module objects are refused: a strategy file cannot hold them.",
            _named("module"),
        ),
        Row(
            "param_init_fn",
            "refused",
            "Modules on the meta device are filled, once sharded, by their reset_parameters. A function cannot be "
            "kept in a strategy; atorch.runtime.fsdp.shard takes it.",
            _only(None, because=f"{_OBJECT}; give the modules reset_parameters, or use atorch.runtime.fsdp.shard"),
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
            "is refused.",
            _only(True, because="FSDP2 always bounds how many groups are gathered at once; leave it out"),
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
            "As ignored_modules; names of parameters are taken too.",
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
