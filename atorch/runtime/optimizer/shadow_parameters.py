"""An optimizer whose inner optimizer steps on stand-ins for some parameters: wider tensors, or tensors elsewhere.

Users, schedulers and clipping see the model's parameters. The groups are the inner optimizer's own, so that a changed
learning rate reaches it. They have the stand-ins only while the inner optimizer runs. `state` is by the model's
parameters, too. Stand-ins may be nested: fp32 masters may have an inner optimizer with stand-ins on the host.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from atorch.errors import ArgumentError
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.data_parallel.buckets import origin
from atorch.runtime.optimizer.user_optimizer import entries_of
from atorch.runtime.optimizer.wrapped_optimizer import WrappedOptimizer, local


class ShadowOptimizer(WrappedOptimizer):
    """Base of such optimizers; subclasses implement `_make_stand_in` and `step`.

    make_inner: makes the inner optimizer, from entries like `groups`.
    groups: parameters, named parameters or groups of either.
    """

    name_of_stand_in: str | None = None  # under which `state` has it, among the states of its parameter
    steps_pieces = False  # then `state` is by piece

    def __init__(self, make_inner: MakeOptimizer, groups: Iterable[Any]) -> None:
        self.stand_ins: dict[torch.Tensor, torch.Tensor] = {}  # parameter → stand-in
        inner = make_inner(_converted(list(groups), self._stand_in_of))
        self._hidden = [list(group["params"]) for group in inner.param_groups]
        originals = self._originals()
        self._shown = [[originals.get(p, p) for p in params] for params in self._hidden]
        show(inner, self._shown)
        self._note_values()
        super().__init__(inner)

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The inner optimizer's states, by the model's parameters."""
        return _StatesOfShown(self.inner.state, self)  # type: ignore[return-value]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.inner.state = state

    def _make_stand_in(self, parameter: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with new stand-ins, to the inner optimizer; a group that it already has is left alone."""
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
        show(self.inner, self._hidden)
        try:
            yield
        finally:
            show(self.inner, self._shown)

    def _stand_in_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self.stand_ins:
            stand_in = self._make_stand_in(parameter)
            if stand_in is None:
                return parameter
            self.stand_ins[parameter] = stand_in
        return self.stand_ins[parameter]

    def _originals(self) -> dict[torch.Tensor, torch.Tensor]:
        return {stand_in: parameter for parameter, stand_in in self.stand_ins.items()}

    def _note_values(self) -> None:
        parameters = [local(parameter) for parameter in self.stand_ins]
        self._versions, self._norms = [parameter._version for parameter in parameters], _norms(parameters)

    def _changed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that were written since `_note_values`, with their stand-ins.

        A write to `parameter.data` does not raise the parameter's version, and is detected by its norm. A write that
        keeps the norm, such as other signs or another order, is not detected.
        """
        parameters = [local(parameter) for parameter in self.stand_ins]
        written = [parameter._version != then for parameter, then in zip(parameters, self._versions, strict=True)]
        for (places, now), (_, then) in zip(_norms(parameters), self._norms, strict=True):
            if not torch.equal(now, then):
                for place, differs in zip(places, (now != then).tolist(), strict=True):
                    written[place] = written[place] or differs
        return [pair for pair, is_written in zip(self.stand_ins.items(), written, strict=True) if is_written]


class _StatesOfShown(MutableMapping[torch.Tensor, Any]):
    """An optimizer's states of stand-ins by the parameters that they stand for."""

    def __init__(self, states: MutableMapping[torch.Tensor, Any], optimizer: ShadowOptimizer) -> None:
        self._states, self._optimizer = states, optimizer

    def __contains__(self, key: Any) -> bool:
        return self._stand_in(key) in self._states

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        # Mapping.get would let a defaultdict make states.
        return self[key] if key in self else default  # noqa: SIM401

    def __getitem__(self, key: torch.Tensor) -> Any:
        stand_in, name = self._stand_in(key), self._optimizer.name_of_stand_in
        states = self._states[stand_in]
        return states if name is None or stand_in is key else ChainMap(states, {name: stand_in})

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        self._states[self._stand_in(key)] = value.maps[0] if isinstance(value, ChainMap) else value

    def __delitem__(self, key: torch.Tensor) -> None:
        del self._states[self._stand_in(key)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        shown = {} if self._optimizer.steps_pieces else self._optimizer._originals()
        return iter([shown.get(key, key) for key in self._states])

    def __len__(self) -> int:
        return len(self._states)

    def _stand_in(self, key: torch.Tensor) -> torch.Tensor:
        stand_in = self._optimizer.stand_ins.get(key, key)
        if self._optimizer.steps_pieces and stand_in is not key:
            raise ArgumentError(
                f"the optimizer's state of a parameter of shape {tuple(key.shape)} is kept for a copy or parts of it "
                "(chunk). Read it from optim.state_dict(), change it by optim.load_state_dict()"
            )
        return stand_in


@torch.no_grad()
def _norms(tensors: list[torch.Tensor]) -> list[tuple[list[int], torch.Tensor]]:
    """Indices of tensors by device, with norms in fp64, which show a change of a single element."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    return [
        (indices, torch.stack(torch._foreach_norm([tensors[place].detach() for place in indices], dtype=torch.float64)))
        for indices in places.values()
    ]


def unrounded(values: MutableMapping[torch.Tensor, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | None:
    """The value of a parameter, or of a slice of one, before rounding, removed from `values`; None if unknown."""
    whole, where = origin(parameter)
    value = values.pop(whole, None)
    return value if value is None or where is None else value.view(-1)[where].clone()


def _converted(groups: list[Any], stand_in_of: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:

    def convert(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {**entry, "params": [convert(param) for param in entries_of(entry["params"])]}
        if isinstance(entry, tuple):
            name, parameter = entry
            return name, stand_in_of(parameter)
        return stand_in_of(entry)

    return [convert(entry) for entry in groups]


def show(optimizer: Optimizer, params: list[list[torch.Tensor]]) -> None:
    """Let the groups of `optimizer` list these parameters."""
    for group, listed in zip(optimizer.param_groups, params, strict=True):
        group["params"] = listed
