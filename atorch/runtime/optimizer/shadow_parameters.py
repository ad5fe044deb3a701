"""An optimizer whose inner one steps shadows of some parameters: wider tensors, tensors elsewhere, or pieces.

Users, schedulers and clipping see the model's parameters. The groups are the inner optimizer's own, so that a changed
learning rate reaches it. They have the shadows only while the inner optimizer runs. `state` is by the model's
parameters, too. Shadows may be nested: fp32 masters may have an inner optimizer with shadows on the host.

A saved state is numbered by the model's parameters, too. If processes have pieces of parameters, it has this process's,
1-D for some parameters, and its `share`: the range of elements of each flattened parameter.
"""

from __future__ import annotations

import itertools
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from atorch.errors import ArgumentError, CheckpointError
from atorch.model.user_functions import MakeOptimizer
from atorch.runtime.data_parallel.buckets import origin
from atorch.runtime.optimizer.held_tensors import HeldTensor, placement, whole_states, write_states
from atorch.runtime.optimizer.user_optimizer import entries_of
from atorch.runtime.optimizer.wrapped_optimizer import SHARE, WrappedOptimizer, local

if TYPE_CHECKING:
    from atorch.runtime.chunk.layout import ChunkSlot
    from atorch.runtime.chunk.memory import ChunkMemory


class ShadowOptimizer(WrappedOptimizer):
    """Base of such optimizers; subclasses implement `_make_shadow` and `step`.

    make_inner: makes the inner optimizer, from entries like `groups`.
    groups: parameters, named parameters or groups of either.
    """

    name_of_shadow: str | None = None  # under which `state` has it, among the states of its parameter
    steps_pieces = False  # then `state` is by piece
    _noted = frozenset[torch.Tensor]()  # `state` has entries for them, empty ones for those of other processes
    _group: dist.ProcessGroup | None = None  # the processes that have pieces of the parameters

    def __init__(self, make_inner: MakeOptimizer, groups: Iterable[Any]) -> None:
        self.shadows: dict[torch.Tensor, torch.Tensor] = {}  # parameter → shadow
        inner = make_inner(_converted(list(groups), self._shadow_of))
        originals = self._originals()
        self._shown = [[originals.get(p, p) for p in group["params"]] for group in inner.param_groups]
        show(inner, self._shown)
        self._note_values()
        super().__init__(inner)

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The inner optimizer's states, by the model's parameters."""
        return _StatesOfShown(self.inner.state, self)  # type: ignore[return-value]

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.inner.state = defaultdict(dict)
        self.state.update(state)

    def _make_shadow(self, parameter: torch.Tensor) -> torch.Tensor | None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with new shadows, to the inner optimizer; a group that it already has is left alone."""
        if any(param_group is group for group in self.inner.param_groups):
            return
        (converted,) = _converted([param_group], self._shadow_of)
        originals = self._originals()
        with self._with_shadows():
            show(self.inner, [[self.shadows.get(p, p) for p in shown] for shown in self._shown])
            self.inner.add_param_group(converted)
            self._shown.append([originals.get(p, p) for p in self.inner.param_groups[-1]["params"]])
        self._note_values()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, by parameter; where processes have pieces of parameters, this one's."""
        with self._with_shadows():
            saved = self.inner.state_dict()
        places, numbers, groups = itertools.count(), itertools.count(), []
        listed = {place for group in saved["param_groups"] for place in group["params"]}
        state = {key: entry for key, entry in saved["state"].items() if key not in listed}
        for group, shown in zip(saved["param_groups"], self._shown, strict=True):
            groups.append({**group, "params": list(itertools.islice(numbers, len(shown)))})
            for number, parameter in zip(groups[-1]["params"], shown, strict=True):
                made = [saved["state"].get(next(places)) for _ in self._stepped_for(parameter)]
                if (entry := self._joined(parameter, made)) is not None:
                    state[number] = entry
        ranges = self._ranges()
        return {**saved, **({} if ranges is None else {SHARE: ranges}), "state": state, "param_groups": groups}

    def full_state_dict(self, to_rank: int | None = 0) -> dict[str, Any] | None:
        """The full state on rank `to_rank` of the processes with pieces (None: on all), in host memory; else None.

        These processes call it together.
        """
        saved, group = self.local_state_dict(), self._group
        if group is None:
            return saved
        named = whole_states(self, self._held(), group, to_rank)
        if to_rank not in (None, group.rank()):
            return None
        state = {number: named[str(number)] for number in sorted(map(int, named))}
        return {**{key: value for key, value in saved.items() if key != SHARE}, "state": state}

    def _held(self) -> list[HeldTensor]:
        """The whole parameters under their numbers, to gather states and to divide them."""
        shown = itertools.chain.from_iterable(self._shown)
        return [HeldTensor((str(n),), p, *placement(p, None, 0), self._place(p)) for n, p in enumerate(shown)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state, also of a plain optimizer, or one of this process's pieces.

        Raises:
            CheckpointError: it has other parameter groups, or pieces that this process does not have.
        """
        sizes = [[len(group["params"]) for group in state_dict["param_groups"]], [len(shown) for shown in self._shown]]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"the optimizer state is of groups of {sizes[0]} parameters, and the optimizer has groups of "
                f"{sizes[1]}; make the groups as they were when it was saved"
            )
        if SHARE in state_dict and [*map(tuple, state_dict[SHARE])] != self._ranges():
            raise CheckpointError(
                "the optimizer state is a process's share, and not of what this one has: it is of another process, of "
                "another number of processes, or of other chunks. Load the whole state (full_state_dict)"
            )
        if SHARE in state_dict or self._ranges() is None:
            self._load(state_dict)
            return
        named = {str(n): entry for n, (_, entry) in enumerate(self._entries(state_dict)) if entry is not None}
        numbers = itertools.count()
        groups = [{**g, "params": [str(next(numbers)) for _ in g["params"]]} for g in state_dict["param_groups"]]
        write_states(self, self._held(), {**state_dict, "state": named, "param_groups": groups})

    def _load(self, saved: dict[str, Any]) -> None:
        """Load a state that is of what this process steps."""
        places, groups = itertools.count(), []
        listed = {number for group in saved["param_groups"] for number in group["params"]}
        state = {key: entry for key, entry in saved["state"].items() if key not in listed}
        for group, shown in zip(saved["param_groups"], self._shown, strict=True):
            groups.append({**group, "params": []})
            for number, parameter in zip(group["params"], shown, strict=True):
                own_places = list(itertools.islice(places, len(self._stepped_for(parameter))))
                groups[-1]["params"] += own_places
                if number in saved["state"]:
                    state.update(zip(own_places, self._divided(parameter, saved["state"][number]), strict=True))
        rest = {key: value for key, value in saved.items() if key != SHARE}
        with self._with_shadows():
            self.inner.load_state_dict({**rest, "state": state, "param_groups": groups})
        self._share()

    def _entries(self, saved: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, Any]]:
        """The parameters with their entries in a saved state, or None."""
        numbers = (number for group in saved["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, itertools.chain.from_iterable(self._shown), strict=True):
            yield parameter, saved["state"].get(number)

    def _stepped_for(self, parameter: torch.Tensor) -> Sequence[torch.Tensor]:
        """The tensors that the inner optimizer steps for a parameter; of pieces those of this process."""
        return (self.shadows.get(parameter, parameter),)

    def _joined(self, parameter: torch.Tensor, made: Sequence[Any]) -> Any:
        """The state to save for a parameter, from those of what is stepped for it; None for none."""
        return made[0] if made else None

    def _divided(self, parameter: torch.Tensor, entry: Any) -> Sequence[Any]:
        """The states of what is stepped for a parameter, from its saved one."""
        return (entry,)

    def _place(self, parameter: torch.Tensor) -> tuple[ChunkMemory, ChunkSlot] | None:
        return None

    def _ranges(self) -> list[tuple[int, int]] | None:
        """The elements of each flattened parameter that this process has the states of; None for all."""
        return None

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError(
            f"{type(self.inner).__name__}.{method.__name__} would work on copies of the parameters (half, offload), "
            "which the model does not see before a step; train in fp32 or under amp_native, without offload"
        )

    @contextmanager
    def _with_shadows(self) -> Iterator[None]:
        show(self.inner, [[piece for p in shown for piece in self._stepped_for(p)] for shown in self._shown])
        try:
            yield
        finally:
            show(self.inner, self._shown)

    def _shadow_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self.shadows:
            shadow = self._make_shadow(parameter)
            if shadow is None:
                return parameter
            self.shadows[parameter] = shadow
        return self.shadows[parameter]

    def _originals(self) -> dict[torch.Tensor, torch.Tensor]:
        return {shadow: parameter for parameter, shadow in self.shadows.items()}

    def _note_values(self) -> None:
        parameters = [local(parameter) for parameter in self.shadows]
        self._versions, self._norms = [parameter._version for parameter in parameters], _norms(parameters)

    def _changed(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters that were written since `_note_values`, with their shadows.

        A write to `parameter.data` does not raise the parameter's version, and is detected by its norm. A write that
        keeps the norm, such as other signs or another order, is not detected.
        """
        parameters = [local(parameter) for parameter in self.shadows]
        written = [parameter._version != then for parameter, then in zip(parameters, self._versions, strict=True)]
        for (places, now), (_, then) in zip(_norms(parameters), self._norms, strict=True):
            if not torch.equal(now, then):
                for place, differs in zip(places, (now != then).tolist(), strict=True):
                    written[place] = written[place] or differs
        return [pair for pair, is_written in zip(self.shadows.items(), written, strict=True) if is_written]


class _StatesOfShown(MutableMapping[torch.Tensor, Any]):
    """An optimizer's states of shadows by the parameters that they stand for."""

    def __init__(self, states: MutableMapping[torch.Tensor, Any], optimizer: ShadowOptimizer) -> None:
        self._states, self._optimizer = states, optimizer

    def __contains__(self, key: Any) -> bool:
        return self._shadow(key) in self._states or key in self._optimizer._noted

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        # Mapping.get would let a defaultdict make states.
        return self[key] if key in self else default  # noqa: SIM401

    def __getitem__(self, key: torch.Tensor) -> Any:
        shadow, name = self._shadow(key), self._optimizer.name_of_shadow
        if key in self._optimizer._noted and shadow not in self._states:
            return {}
        states = self._states[shadow]
        return states if name is None or shadow is key else ChainMap(states, {name: shadow})

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        if not self._optimizer.steps_pieces and not self._optimizer._stepped_for(key):
            return  # another process has its states
        self._states[self._shadow(key)] = value.maps[0] if isinstance(value, ChainMap) else value

    def __delitem__(self, key: torch.Tensor) -> None:
        if key not in self:
            raise KeyError(key)
        self._states.pop(self._shadow(key), None)
        self._optimizer._noted -= {key}

    def __iter__(self) -> Iterator[torch.Tensor]:
        shown = {} if self._optimizer.steps_pieces else self._optimizer._originals()
        return iter(dict.fromkeys([*(shown.get(key, key) for key in self._states), *self._optimizer._noted]))

    def __len__(self) -> int:
        return len(list(self.__iter__()))

    def _shadow(self, key: torch.Tensor) -> torch.Tensor:
        shadow = self._optimizer.shadows.get(key, key)
        if self._optimizer.steps_pieces and shadow is not key:
            raise ArgumentError(
                f"the optimizer's state of a parameter of shape {tuple(key.shape)} is kept for a copy or parts of it "
                "(chunk). Read it from optim.state_dict(), change it by optim.load_state_dict()"
            )
        return shadow


@torch.no_grad()
def _norms(tensors: list[torch.Tensor]) -> list[tuple[list[int], torch.Tensor]]:
    """Indices of tensors by device, with norms in fp64, which show a change of a single element."""
    values = [torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach() for tensor in tensors]
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(values):
        places.setdefault(tensor.device, []).append(place)
    return [
        (indices, torch.stack(torch._foreach_norm([values[place] for place in indices], dtype=torch.float64)))
        for indices in places.values()
    ]


def fp32_value_of(values: MutableMapping[torch.Tensor, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | None:
    """The value of a parameter, or of a slice of one, before rounding, removed from `values`; None if unknown."""
    whole, where = origin(parameter)
    value = values.pop(whole, None)
    return value if value is None or where is None else value.view(-1)[where].clone()


def _converted(groups: list[Any], shadow_of: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:

    def convert(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {**entry, "params": [convert(param) for param in entries_of(entry["params"])]}
        if isinstance(entry, tuple):
            name, parameter = entry
            return name, shadow_of(parameter)
        return shadow_of(entry)

    return [convert(entry) for entry in groups]


def show(optimizer: Optimizer, params: list[list[torch.Tensor]]) -> None:
    """Let the groups of `optimizer` list these parameters."""
    for group, listed in zip(optimizer.param_groups, params, strict=True):
        group["params"] = listed
