"""An optimizer whose inner one steps on stand-ins: for some parameters other tensors, wider ones or ones elsewhere.

Users, schedulers and clipping see the model's parameters. The groups are the inner optimizer's own, which hold the
stand-ins only while that one works, so that a changed learning rate reaches it. Stand-ins may be nested: the inner
optimizer of masters in fp32 on the host is one whose stand-ins are on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from atorch.errors import ArgumentError
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.data_parallel.flat_shards import origin
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer, local


class ShadowOptimizer(WrappedOptimizer):
    """Base of such optimizers: subclasses make a parameter's stand-in, and step.

    make_inner: makes the inner optimizer from parameters, named parameters or groups of either, as `groups` are.
    """

    def __init__(self, make_inner: MakeOptimizer, groups: Iterable[Any]) -> None:
        self.stand_ins: dict[torch.Tensor, torch.Tensor] = {}  # parameter → stand-in
        inner = make_inner(_converted(list(groups), self._stand_in_of))
        self._hidden = [list(group["params"]) for group in inner.param_groups]
        originals = self._originals()
        self._shown = [[originals.get(p, p) for p in params] for params in self._hidden]
        _show(inner, self._shown)
        self._note_values()
        super().__init__(inner)
        self.copied = self.stand_ins

    def _make_stand_in(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The inner optimizer's stand-in for `parameter`; None for the parameter itself."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the inner optimizer one more group, with stand-ins of its own; a group that it has stays as it is."""
        if any(param_group is known for known in self.inner.param_groups):
            return
        (converted,) = _converted([param_group], self._stand_in_of)
        originals = self._originals()
        with self._stand_ins_shown():
            self.inner.add_param_group(converted)
            self._hidden.append(list(self.inner.param_groups[-1]["params"]))
            self._shown.append([originals.get(p, p) for p in self._hidden[-1]])
        self._note_values()

    def state_dict(self) -> dict[str, Any]:
        with self._stand_ins_shown():
            return self.inner.state_dict()

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            f"{type(self.inner).__name__}.{method.__name__} would work on copies of the parameters (half, offload), "
            "which the model does not see before a step; train in fp32 or under amp_native, without offload"
        )

    @contextmanager
    def _stand_ins_shown(self) -> Iterator[None]:
        _show(self.inner, self._hidden)
        try:
            yield
        finally:
            _show(self.inner, self._shown)

    def _stand_in_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self.stand_ins:
            made = self._make_stand_in(parameter)
            if made is None:
                return parameter
            self.stand_ins[parameter] = made
        return self.stand_ins[parameter]

    def _originals(self) -> dict[torch.Tensor, torch.Tensor]:
        return {stand_in: parameter for parameter, stand_in in self.stand_ins.items()}

    def _note_values(self) -> None:
        """From now on, what is written to parameters is told by `_changed`."""
        parameters = [local(parameter) for parameter in self.stand_ins]
        self._versions, self._norms = [each._version for each in parameters], _norms(parameters)

    def _changed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that were written since values were noted, each with its stand-in.

        What is written to `parameter.data` counts as no version of the parameter, and is seen by its norm. What
        leaves the norm as it is, such as other signs or another order, is not seen.
        """
        parameters = [local(parameter) for parameter in self.stand_ins]
        written = [each._version != then for each, then in zip(parameters, self._versions, strict=True)]
        for (places, now), (_, then) in zip(_norms(parameters), self._norms, strict=True):
            if not torch.equal(now, then):
                for place, differs in zip(places, (now != then).tolist(), strict=True):
                    written[place] = written[place] or differs
        return [pair for pair, is_written in zip(self.stand_ins.items(), written, strict=True) if is_written]


@torch.no_grad()
def _norms(tensors: list[torch.Tensor]) -> list[tuple[list[int], torch.Tensor]]:
    """Places of tensors by device, and their norms, in which one element of a large one tells."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return [
        (held, torch.stack(torch._foreach_norm([tensors[place].detach() for place in held], dtype=torch.float64)))
        for held in places.values()
    ]


def unrounded(values: MutableMapping[torch.Tensor, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | None:
    """The value of a parameter, or of a slice, before rounding, taken out of `values`; None where not known."""
    whole, where = origin(parameter)
    value = values.pop(whole, None)
    return value if value is None or where is None else value.view(-1)[where].clone()


def _converted(groups: list[Any], stand_in_of: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Parameters, named parameters or groups of either, with stand-ins in their places."""

    def convert(entry: Any) -> Any:
        if isinstance(entry, dict):
            params = entry["params"]
            listed = [params] if isinstance(params, torch.Tensor) else list(params)
            return {**entry, "params": [convert(each) for each in listed]}
        if isinstance(entry, tuple):
            name, parameter = entry
            return name, stand_in_of(parameter)
        return stand_in_of(entry)

    return [convert(entry) for entry in groups]


def _show(optimizer: Optimizer, params: list[list[torch.Tensor]]) -> None:
    for group, listed in zip(optimizer.param_groups, params, strict=True):
        group["params"] = listed
