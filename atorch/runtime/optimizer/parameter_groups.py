"""Checks that parameter groups have only the model's parameters, as no method reduces or shards others."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from atorch.errors import ArgumentError


def is_group(entry: object) -> bool:
    return isinstance(entry, Mapping) and "params" in entry


def in_group(group: Any) -> list[Any]:
    return [tensor_of(entry) for entry in entries_of(group["params"] if is_group(group) else [group])]


def materialized(groups: Iterable[Any]) -> list[Any]:
    """Parameters, named parameters, or groups of either, in lists, to iterate more than once."""
    return [{**part, "params": entries_of(part["params"])} if isinstance(part, dict) else part for part in groups]


def as_groups(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """As `materialized`, with bare entries in one group."""
    given = materialized(groups)
    return given if given and isinstance(given[0], dict) else [{"params": given}]


def entries_of(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def tensor_of(entry: Any) -> Any:
    """The parameter of an entry, which may be `(name, parameter)`."""
    return entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry


def need_own(parameter: torch.Tensor, own: set[int], given: str, model: str) -> None:
    """Raise for a parameter that the model does not have, since it would not be reduced.

    Args:
        own: ids of the model's parameters.
        given: the source of the parameter for the message, as in "optim_param_func gave".
        model: the user's expression for the model.

    Raises:
        ArgumentError: the model does not have it.
    """
    if id(parameter) not in own:
        raise ArgumentError(
            f"{given} a parameter of shape {tuple(parameter.shape)} that the model does not have (any more: a strategy "
            f"may replace parameters); take them from {model}, and make what else is to be trained a submodule of it"
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
    own, take = set(map(id, model.parameters())), getattr(model, "take_parameters", None)
    for parameter in new:
        need_own(parameter, own, "optim.add_param_group was given", "result.model")
        if take is None:
            raise ArgumentError(
                f"optim.add_param_group was given a parameter of shape {tuple(parameter.shape)} that the model did not "
                "have when it was accelerated, and that nothing reduces over processes: it was made later, or is the "
                "gathered one that a sharded model shows between forward and backward. Make it before, frozen, and "
                "unfreeze it; or use ddp"
            )
    if take is not None:
        take(new)
