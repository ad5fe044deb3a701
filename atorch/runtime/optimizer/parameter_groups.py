"""Parameter groups hold parameters of the model alone: what else an optimizer is given, no method reduces or shards."""

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
    """Entries of a group, or one that stands without one, without the names that may stand beside parameters."""
    entries = group["params"] if is_group(group) else [group]
    entries = [entries] if isinstance(entries, torch.Tensor) else entries
    return [each[1] if isinstance(each, tuple) and len(each) == 2 else each for each in entries]


def need_own(parameter: torch.Tensor, own: set[int], given: str, model: str) -> None:
    """Raise for a parameter that the model does not have: it would not be reduced.

    Args:
        own: the ids of those that it has.
        given: who gave it, as in "optim_param_func gave".
        model: how the user has the model.

    Raises:
        ArgumentError: it is another one.
    """
    if id(parameter) not in own:
        raise ArgumentError(
            f"{given} a parameter of shape {tuple(parameter.shape)} that the model does not have (any more: a strategy "
            f"may replace parameters); take them from {model}, and make what else is to be trained a submodule of it"
        )


class TakesParameters:
    """Base of models that can reduce parameters that they are given once they are accelerated."""

    def take_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reduce these, too. All processes call it together."""
        raise NotImplementedError


def keep_to(model: nn.Module, optimizer: Optimizer) -> None:
    """Let `optimizer.add_param_group` refuse, by ArgumentError, parameters of which `model` reduces no gradients."""
    if not hasattr(optimizer, "add_param_group"):
        return
    itself, its_model = weakref.ref(optimizer), weakref.ref(model)
    known = set(map(id, model.parameters()))

    def add_param_group(param_group: dict[str, Any]) -> None:
        adding, trained = itself(), its_model()
        assert adding is not None, "it is called"
        if is_group(param_group) and isinstance(param_group["params"], Iterator):
            param_group = {**param_group, "params": list(param_group["params"])}
        given = in_group(param_group) if is_group(param_group) else ()
        new = [each for each in given if isinstance(each, torch.Tensor) and id(each) not in known]
        if trained is not None and new:
            _take(trained, new)
        type(adding).add_param_group(adding, param_group)

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def _take(model: nn.Module, new: Sequence[torch.Tensor]) -> None:
    own = set(map(id, model.parameters()))
    for parameter in new:
        need_own(parameter, own, "optim.add_param_group was given", "result.model")
        if not isinstance(model, TakesParameters):
            raise ArgumentError(
                f"optim.add_param_group was given a parameter of shape {tuple(parameter.shape)} that the model did not "
                "have when it was accelerated, and that nothing reduces over processes: it was made later, or is the "
                "gathered one that a sharded model shows between forward and backward. Make it before, frozen, and "
                "unfreeze it; or use ddp"
            )
    if isinstance(model, TakesParameters):
        model.take_parameters(new)
