"""The values that a model's units hand to one another: one forward pass, watched operation by operation.

A unit (`blocks.units`) is called and returns; what happens between calls (masks, positions, residuals, slicing) is the
model's own code, which every stage of a pipeline runs. Each tensor is marked with what it was computed from there:
results of calls, and parameters used outside of any unit. So it is known what each call needs, and what has to cross
wherever the sequence of calls is cut, whatever way it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.errors import StrategyError, near_miss
from atorch.model.pytree import map_leaves, tensors_in
from atorch.runtime.precision.amp import casting_anew


class CallOutput(NamedTuple):
    """The tensor with this number in what the call with this number returned."""

    call: int
    number: int


ValueOrigin = CallOutput | str
"""The source of a tensor: a value, or a parameter by its name."""


class OutputIndex(int):
    """A place for the tensor with this number in what a call returns."""


@dataclass(eq=False)
class ModuleCall:
    """One call of a unit, as it was seen."""

    unit: str
    needs: set[ValueOrigin] = field(default_factory=set)
    returns: Any = None  # what it returned, with a Slot for each tensor
    num_tensors: int = 0


@dataclass(frozen=True)
class Route:
    """The calls of one forward pass in their order, and what its output is computed from."""

    calls: Sequence[ModuleCall]
    output_needs: frozenset[ValueOrigin]
    trained: frozenset[int]  # calls whose results have a gradient
    written: frozenset[CallOutput]  # what somebody changes in place who got it
    read_by_loss: frozenset[str] = frozenset()  # parameters that the loss function takes from the model itself

    def wires(self, start: int) -> tuple[CallOutput, ...]:
        """The values from before call `start` that it, a later call or the output needs."""
        needs = self.output_needs.union(*(call.needs for call in self.calls[start:]))
        return tuple(sorted(value for value in needs if isinstance(value, CallOutput) and value.call < start))

    def parameters(self, start: int, stop: int) -> set[str]:
        """Names of the parameters outside of units that the calls from `start` to before `stop` need.

        Those of the output, and of the loss, belong to whoever runs the last call.
        """
        needs = set().union(*(call.needs for call in self.calls[start:stop]))
        if stop == len(self.calls):
            needs |= self.output_needs | self.read_by_loss
        return {source for source in needs if isinstance(source, str)}

    def beginning(self, name: str) -> int:
        """The first call of the module `name`, a unit or one that has units inside.

        Raises:
            StrategyError: it is neither, or is never called.
        """
        for number, call in enumerate(self.calls):
            if call.unit == name or call.unit.startswith(f"{name}."):
                return number
        units = list(dict.fromkeys(call.unit for call in self.calls))
        around = next((unit for unit in units if name.startswith(f"{unit}.")), None)
        if around is not None:
            raise StrategyError(f"split_points names {name!r}, which lies inside of {around}; name {around} itself")
        raise StrategyError(f"split_points names {name!r}, where no stage can begin; {near_miss(name, units)}")


def observe(model: nn.Module, units: Mapping[str, nn.Module], run: Callable[[], Any]) -> tuple[Route, Any]:
    """The route of `run()`, which calls `model`, whose `units` are given by name; and the output.

    Raises:
        StrategyError: a unit hands over a tensor otherwise than by returning it, or returns what cannot be rebuilt.
    """
    watch = _Watch(model, units)
    with ExitStack() as hooks:
        for name, unit in units.items():
            hooks.enter_context(unit.register_forward_pre_hook(partial(watch.enter, name), with_kwargs=True))
            hooks.enter_context(unit.register_forward_hook(partial(watch.leave, name), with_kwargs=True))
        # A cast that one unit leaves for the next is no tensor that stages pass on: each stage casts its own weights.
        with torch.no_grad(), casting_anew(), watch:
            output = run()
    output_needs = frozenset(watch.sources(tensors_in(output), "the model's output"))
    trained = _trained(watch.calls, model, units)
    return Route(tuple(watch.calls), output_needs, trained, frozenset(watch.written)), output


def _trained(calls: Sequence[ModuleCall], model: nn.Module, units: Mapping[str, nn.Module]) -> frozenset[int]:
    """The calls that come after something that trains."""
    trains: set[ValueOrigin] = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    learning = {name for name, unit in units.items() if any(each.requires_grad for each in unit.parameters())}
    found = set()
    for number, call in enumerate(calls):
        if call.unit in learning or not trains.isdisjoint(call.needs):
            found.add(number)
            trains.update(CallOutput(number, slot) for slot in range(call.num_tensors))
    return frozenset(found)


class _Inside(NamedTuple):
    """Made during this call, and not returned by it."""

    call: int


class _Watch(TorchDispatchMode):
    """Marks tensors with their sources while a model runs."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[ModuleCall] = []
        self.written: set[CallOutput] = set()
        self._running: ModuleCall | None = None
        self._given: dict[int, list[int]] = {}  # the lists among its arguments
        self._marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._own = {name: set(map(id, unit.parameters())) for name, unit in units.items()}

    def enter(self, name: str, unit: nn.Module, args: Any, kwargs: Any) -> None:
        call = ModuleCall(name)
        call.needs.update(self.sources(tensors_in((args, kwargs)), name))
        self.calls.append(call)
        self._running, self._given = call, _lists((args, kwargs))

    def leave(self, name: str, unit: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, self._running = self.calls[-1], None
        left, returned = _lists((args, kwargs)), _lists(output)
        if any(left.get(each, held) != held and each not in returned for each, held in self._given.items()):
            raise StrategyError(
                f"{name} adds to a list that it is given, or takes from it, and a pipeline passes on only what its "
                "modules return. Return the list, or name split_points elsewhere"
            )
        number = len(self.calls) - 1

        def slot(leaf: Any, place: str) -> Any:
            if isinstance(leaf, Tensor):
                for each in (leaf, *_parts(leaf)):
                    self._marks[each] = {CallOutput(number, call.num_tensors)}
                call.num_tensors += 1
                return OutputIndex(call.num_tensors - 1)
            if not isinstance(leaf, _PLAIN):
                raise StrategyError(
                    f"{name} returns a {type(leaf).__name__} ({place}), which cannot be passed between stages of a "
                    "pipeline; let it return tensors, numbers and strings, in tuples, lists, dicts or dataclasses"
                )
            return leaf

        call.returns = map_leaves(slot, output, "output")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func._schema.is_mutable:
            marks = (mark for tensor in _written(func, args) for mark in self._marks.get(tensor, ()))
            self.written.update(mark for mark in marks if isinstance(mark, CallOutput))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        call = self._running
        if call is None:
            found: set[Any] = self.sources(given, "the model's own code")
        else:
            call.needs.update(self.sources(given, call.unit))
            found = {_Inside(len(self.calls) - 1)}
        for tensor in made:
            self._marks[tensor] = found | (self._marks.get(tensor, set()) if call is None else set())
        return output

    def sources(self, tensors: Iterable[Tensor], user: str) -> set[ValueOrigin]:
        """Sources of tensors that `user` takes.

        Raises:
            StrategyError: one was made inside a unit that did not return it.
        """
        found: set[ValueOrigin] = set()
        own = self._own.get(user, set())
        for tensor in tensors:
            name = self._names.get(id(tensor))
            if name is not None and id(tensor) not in own:
                found.add(name)
            for mark in self._marks.get(tensor, ()):
                if not isinstance(mark, _Inside):
                    found.add(mark)
                elif self.calls[mark.call].unit != user:
                    raise StrategyError(
                        f"{self.calls[mark.call].unit} makes a tensor that {user} uses, and does not return it; a "
                        "pipeline passes on only what its modules return. Return it, or name split_points elsewhere"
                    )
        return found


def _lists(data: Any) -> dict[int, list[int]]:
    """The ids of what the lists in `data` hold, by the list's id."""
    inner = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    found = {id(data): list(map(id, inner))} if isinstance(data, list) else {}
    for each in inner:
        found |= _lists(each)
    return found


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _written(func: Any, args: Any) -> Iterator[Tensor]:
    for described, given in zip(func._schema.arguments, args, strict=False):
        if described.alias_info is not None and described.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The inner tensors that a tensor made of others computes with."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
