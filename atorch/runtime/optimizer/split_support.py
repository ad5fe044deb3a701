"""Kinds of splits under which an optimizer computes the same as on whole parameters.

A sharding method gives each process's optimizer some parameters ("apart"), some rows or columns of each ("rows",
"columns"), or some elements of each ("flat"). DTensors ("sharded") look like full tensors. torch's optimizers are
listed here. Another optimizer states what its step of an element depends on, by an attribute `step_depends_on`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, Rprop, SparseAdam

from atorch.logs import logger
from atorch.model.elementwise_optimizers import ELEMENTWISE, is_elementwise
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.optimizer.parameter_groups import as_groups, tensor_of
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer

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
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
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
        own = {name for name in vars(kind) if not name.startswith("__")} - {"step"}
        # torch wraps `step` for its profiler, in the class of the first instance.
        if own or base is None or inspect.unwrap(kind.step) is not inspect.unwrap(getattr(base, "step", kind)):
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
    optimizer = made_small(make_optimizer, groups)
    while isinstance(optimizer, WrappedOptimizer):
        optimizer = optimizer.inner
    return optimizer is not None and is_elementwise(optimizer)


def needs_closure(optimizer: Any) -> bool:
    """True if the optimizer's step requires a closure."""
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty
