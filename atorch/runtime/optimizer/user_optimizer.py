"""Checks of a user's optimizer: its groups have only the model's parameters, and it computes the same on split ones.

No method reduces or shards other parameters than the model's.

A sharding method gives each process's optimizer some parameters ("apart"), some rows or columns of each ("rows",
"columns"), or some elements of each ("flat"). DTensors ("sharded") look like full tensors. torch's optimizers are
listed here. Another optimizer states what its step of an element depends on, by an attribute `step_depends_on`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, Rprop, SparseAdam

from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.model.user_functions import ELEMENTWISE, MakeOptimizer, is_elementwise
from atorch.runtime.optimizer.wrapped_optimizer import innermost

ShardKind = Literal["apart", "rows", "columns", "flat", "sharded"]

_ALL = frozenset[ShardKind](("apart", "rows", "columns", "flat", "sharded"))
_BY_DEPENDENCE: Mapping[str, frozenset[ShardKind]] = {
    "element": _ALL,
    "parameter": frozenset(("apart", "sharded")),
    "model": frozenset(("sharded",)),
}
_OF_TORCH: Mapping[type[Optimizer], frozenset[ShardKind]] = {
    **dict.fromkeys(ELEMENTWISE, _ALL),
    Rprop: _ALL - {"sharded"},
    Adafactor: frozenset(("apart",)),
    Muon: frozenset(("apart", "sharded")),
    LBFGS: frozenset(("sharded",)),
    SparseAdam: frozenset(("apart", "rows", "columns")),
}
_DEPENDS: Mapping[ShardKind, str] = {
    "apart": "its step of one parameter depends on the other parameters",
    "rows": "its step of some rows of a parameter depends on the other rows",
    "columns": "its step of some columns of a parameter depends on the other columns",
    "flat": "its step of some elements of a parameter depends on the parameter's other elements, or on its shape",
    "sharded": "its step of a parameter that is spread over processes is another than that of a whole one",
}


def refusal(optimizer: Any, split: ShardKind) -> str | None:
    """The reason why an optimizer does not support `split`; None if it computes the same on such parts."""
    optimizer = innermost(optimizer)
    stated = getattr(optimizer, "step_depends_on", None)
    if stated is not None and stated not in _BY_DEPENDENCE:
        return f"its step_depends_on is {stated!r}; it is one of {', '.join(map(repr, _BY_DEPENDENCE))}"
    supported = _BY_DEPENDENCE[stated] if stated is not None else _OF_TORCH.get(_origin(type(optimizer)))
    if supported is not None and split in supported:
        return None
    if split != "sharded" and needs_closure(optimizer):
        return "it evaluates the loss again while it steps, and takes all parameters together"
    if supported is not None:
        return _DEPENDS[split]
    kind = type(optimizer).__name__
    return (
        f"it is not an optimizer of torch's, and does not say what its step of an element depends on. Set "
        f'{kind}.step_depends_on = "element" (each element alone), "parameter" (such as its norm: LAMB) or "model" '
        "(all parameters together; docs/optimizers.md)"
    )


def _origin(kind: type[Any]) -> type[Any]:
    """The class whose step `kind` takes over: its base, as long as only the constructor differs."""
    while kind not in _OF_TORCH and kind is not object:
        base = kind.__base__
        overrides = {name for name in vars(kind) if not name.startswith("__")} - {"step"}
        # torch wraps `step` for its profiler, in the class of the first instance.
        if overrides or base is None or inspect.unwrap(kind.step) is not inspect.unwrap(getattr(base, "step", kind)):
            break
        kind = base
    return kind


def small(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups with the settings of `groups` and small parameters like theirs, one for each number of dimensions."""
    small_groups = []
    for part in as_groups(groups):
        kinds: dict[Any, Any] = {}
        for entry in part["params"]:
            tensor = tensor_of(entry)
            if tensor.requires_grad and tensor.is_floating_point():
                kinds.setdefault(tensor.dim(), entry)
        copies: list[Any] = []
        for entry in kinds.values():
            tensor = tensor_of(entry)
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            shape = [min(size, 4) for size in tensor.shape]
            value = nn.Parameter(torch.zeros(shape, dtype=torch.float64, device=device))
            copies.append((entry[0], value) if isinstance(entry, tuple) else value)
        small_groups.append({**part, "params": copies})
    return [part for part in small_groups if part["params"]]


def made_small(make_optimizer: MakeOptimizer, groups: Iterable[Any]) -> Optimizer | None:
    """The optimizer on small parameters; None if it cannot be made for them."""
    try:
        return make_optimizer(small(groups))
    except Exception as error:  # a user's optimizer may raise anything
        logger.info("the optimizer cannot be made for small parameters: %s", error)
        return None


def makes_elementwise(make_optimizer: MakeOptimizer, groups: Iterable[Any]) -> bool:
    """True if `make_optimizer` makes an element-wise optimizer for such groups, or a wrapper of one."""
    optimizer = innermost(made_small(make_optimizer, groups))
    return optimizer is not None and is_elementwise(optimizer)


def needs_closure(optimizer: Any) -> bool:
    """True if the optimizer's step requires a closure."""
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def is_group(entry: object) -> bool:
    return isinstance(entry, Mapping) and "params" in entry


def in_group(group: Any) -> list[Any]:
    return [tensor_of(entry) for entry in entries_of(group["params"] if is_group(group) else [group])]


def materialized(groups: Iterable[Any]) -> list[Any]:
    """Parameters, named parameters, or groups of either, in lists, to iterate more than once."""
    return [{**part, "params": entries_of(part["params"])} if isinstance(part, dict) else part for part in groups]


def as_groups(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """As `materialized`, with bare entries in one group."""
    listed = materialized(groups)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def entries_of(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def tensor_of(entry: Any) -> Any:
    """The parameter of an entry, which may be `(name, parameter)`."""
    return entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry


def need_own(parameter: torch.Tensor, ids: set[int], source: str, model: str) -> None:
    """Raise for a parameter that the model does not have, since it would not be reduced.

    Args:
        ids: ids of the model's parameters.
        source: the source of the parameter for the message, as in "optim_param_func gave".
        model: the user's expression for the model.

    Raises:
        ArgumentError: the model does not have it.
    """
    if id(parameter) not in ids:
        raise ArgumentError(
            f"{source} a parameter of shape {tuple(parameter.shape)} that the model does not have (any more: a "
            f"strategy may replace parameters); take them from {model}, and make what else is to be trained a "
            "submodule of it"
        )


def keep_to(model: nn.Module, optimizer: Optimizer) -> None:
    """Let `optimizer.add_param_group` raise ArgumentError for parameters whose gradients `model` does not reduce."""
    if not hasattr(optimizer, "add_param_group"):
        return
    itself, its_model = weakref.ref(optimizer), weakref.ref(model)
    known_ids = set(map(id, model.parameters()))

    def add_param_group(param_group: dict[str, Any]) -> None:
        adding, trained = itself(), its_model()
        assert adding is not None, "it is called"
        if is_group(param_group) and isinstance(param_group["params"], Iterator):
            param_group = {**param_group, "params": list(param_group["params"])}
        entries = in_group(param_group) if is_group(param_group) else ()
        new = [entry for entry in entries if isinstance(entry, torch.Tensor) and id(entry) not in known_ids]
        if trained is not None and new:
            _take(trained, new)
        type(adding).add_param_group(adding, param_group)

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def _take(model: nn.Module, new: Sequence[torch.Tensor]) -> None:
    ids, take = set(map(id, model.parameters())), getattr(model, "take_parameters", None)
    for parameter in new:
        need_own(parameter, ids, "optim.add_param_group was given", "result.model")
        if take is None:
            raise ArgumentError(
                f"optim.add_param_group was given a parameter of shape {tuple(parameter.shape)} that the model did not "
                "have when it was accelerated, so nothing reduces its gradient over processes. It was made later, or "
                "is the gathered one that a sharded model shows between forward and backward. Make it before, frozen, "
                "and unfreeze it; or use ddp"
            )
    if take is not None:
        take(new)
