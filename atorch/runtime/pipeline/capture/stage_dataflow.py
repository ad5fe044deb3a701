"""Dataflow between a model's units: records one forward pass operation by operation.

A unit is called and returns. The code between calls (masks, positions, residuals, slicing) is the model's own, and
every stage of a pipeline runs it. Each tensor is marked with its sources there: results of calls, and parameters used
outside of any unit. The marks show the values that each call needs, and those that must cross any cut of the sequence
of calls, independent of their path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from atorch.errors import AtorchError, StrategyError, near_miss
from atorch.logs import logger
from atorch.model.copy import duplicate_with
from atorch.model.meta_device import has_meta
from atorch.model.pytree import map_leaves, map_tensors, tensor_bytes, tensors_in, written_tensors
from atorch.model.state import preserved_state
from atorch.runtime.precision.amp import casting_anew


def route_of(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    batch: Any,
    call_model: Callable[[nn.Module, Any], Any],
    loss_func: Callable[[Any, Any], Any] | None = None,
) -> Route:
    """The route of `call_model(model, batch)`. A model whose control flow depends on values runs for real.

    loss_func: (batch, output) → loss; captures the parameters that it reads, if it runs on so few rows.

    Raises:
        StrategyError: the model cannot be captured, or its units return values that a pipeline cannot send.
    """
    if has_meta([model]):
        return _without_values(model, units, batch, call_model, loss_func)
    device = next(model.parameters()).device
    batch = map_tensors(lambda leaf: leaf.to(device), batch)
    try:
        # `preserved_state`: writes to real buffers take effect even in fake mode.
        with preserved_state(model), FakeTensorMode(allow_non_fake_inputs=True), _Fakes():  # type: ignore[no-untyped-call]
            return _observed(model, units, map_tensors(faked, batch), call_model, loss_func, is_last=False)
    except AtorchError:
        raise
    except Exception as error:  # a forward may fail on fakes in any way; a real run shows real errors
        logger.info("the model is watched in a real run, it does not run on fake tensors: %s", error)
    with preserved_state(model):
        return _observed(model, units, batch, call_model, loss_func, is_last=True)


def _without_values(
    model: nn.Module, units: Mapping[str, nn.Module], batch: Any, call_model: Any, loss_func: Any
) -> Route:
    """The route of a model on the meta device, captured on fake host tensors, as code may require a real device."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _Fakes():  # type: ignore[no-untyped-call]
            functions = call_model, loss_func
            copied, (call_model, loss_func) = duplicate_with(model, functions, convert=faked)
            inside = {name: copied.get_submodule(name) for name in units}
            return _observed(copied, inside, map_tensors(faked, batch), call_model, loss_func, is_last=True)
    except AtorchError:
        raise
    except Exception as error:  # a forward may fail on fakes in any way
        raise StrategyError(
            f"{type(model).__name__} is on the meta device and does not run on fake tensors ({type(error).__name__}: "
            f"{error}), so it cannot be cut into stages; give it on a real device"
        ) from error


def _observed(
    model: nn.Module, units: Mapping[str, nn.Module], batch: Any, call_model: Any, loss_func: Any, *, is_last: bool
) -> Route:
    route, output = observe(model, units, lambda: call_model(model, batch))
    if loss_func is None:
        return route
    reads = Reads(model)
    try:
        with torch.no_grad(), reads:
            loss_func(batch, output)
    except Exception as error:  # a loss may fail in any way on fakes, or on few rows; full batches show its errors
        if not is_last:
            raise RuntimeError(f"of the loss function: {error}") from error
        logger.info("what the loss function reads of the model is known up to where it fails: %s", error)
    return replace(route, read_by_loss=frozenset(reads.found) - route.output_needs)


class Reads(TorchDispatchMode):
    """Records the parameters of `model` that operations read."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = (self._names.get(id(leaf)) for leaf in tree_leaves((args, kwargs)))
        self.found.update(name for name in names if name is not None)
        return func(*args, **kwargs)


def faked(leaf: Tensor) -> Tensor:
    """An empty tensor like `leaf`, which is fake under a fake mode."""
    leaf = leaf.to_local() if hasattr(leaf, "to_local") else leaf  # the local rows of a sharded parameter
    device = "cpu" if leaf.device.type == "meta" else leaf.device
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)


class _Fakes(TorchDispatchMode):
    """Supports grouped matmuls, for which fake tensors have a rule only in bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket is torch.ops.aten._grouped_mm and (args[0].dim(), args[1].dim()) == (2, 3):
            data, weight = args[:2]
            return torch.empty(data.shape[0], weight.shape[-1], dtype=data.dtype, device=data.device)
        return func(*args, **(kwargs or {}))


class CallOutput(NamedTuple):
    """Tensor `number` among the results of call `call`."""

    call: int
    number: int


ValueOrigin = CallOutput | str
"""The source of a tensor: a value, or a parameter by its name."""


class OutputIndex(int):
    """A placeholder for the tensor with this number in the results of a call."""


@dataclass(eq=False)
class ModuleCall:
    """One recorded call of a unit."""

    unit: str
    needs: set[ValueOrigin] = field(default_factory=set)
    returns: Any = None  # the results, with an OutputIndex in place of each tensor
    num_tensors: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Route:
    """The calls of one forward pass in their order, and the sources of its output."""

    calls: Sequence[ModuleCall]
    output_needs: frozenset[ValueOrigin]
    trained: frozenset[int]  # calls whose results have a gradient
    written: frozenset[CallOutput]  # values that later code changes in place
    read_by_loss: frozenset[str] = frozenset()  # parameters that the loss function takes from the model itself

    def wires(self, start: int) -> tuple[CallOutput, ...]:
        """The values from calls before `start` that this call, a later one or the output needs."""
        needs = self.output_needs.union(*(call.needs for call in self.calls[start:]))
        return tuple(sorted(value for value in needs if isinstance(value, CallOutput) and value.call < start))

    def parameters(self, start: int, stop: int) -> set[str]:
        """Names of the parameters outside of units that the calls from `start` to before `stop` need.

        The stage of the last call also needs those of the output and the loss.
        """
        needs = set().union(*(call.needs for call in self.calls[start:stop]))
        if stop == len(self.calls):
            needs |= self.output_needs | self.read_by_loss
        return {source for source in needs if isinstance(source, str)}

    def beginning(self, name: str) -> int:
        """The first call of the module `name`, a unit or a module that contains units.

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
    """The route and the output of `run()`, which calls `model`; `units` are its units by name.

    Raises:
        StrategyError: a unit passes on a tensor without returning it, or returns values that cannot be rebuilt.
    """
    watch = _Watch(model, units)
    with ExitStack() as hooks:
        for name, unit in units.items():
            hooks.enter_context(unit.register_forward_pre_hook(partial(watch.enter, name), with_kwargs=True))
            hooks.enter_context(unit.register_forward_hook(partial(watch.leave, name), with_kwargs=True))
        # Autocast's cached casts of weights are not sent between stages, as each stage casts its own: bypass the cache.
        with torch.no_grad(), casting_anew(), watch:
            output = run()
    output_needs = frozenset(watch.sources(tensors_in(output), "the model's output"))
    trained = _trained(watch.calls, model, units)
    return Route(tuple(watch.calls), output_needs, trained, frozenset(watch.written)), output


def _trained(calls: Sequence[ModuleCall], model: nn.Module, units: Mapping[str, nn.Module]) -> frozenset[int]:
    """The calls whose results depend on trained parameters."""
    trains: set[ValueOrigin] = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    learning = {name for name, unit in units.items() if any(param.requires_grad for param in unit.parameters())}
    trained = set()
    for number, call in enumerate(calls):
        if call.unit in learning or not trains.isdisjoint(call.needs):
            trained.add(number)
            trains.update(CallOutput(number, index) for index in range(call.num_tensors))
    return frozenset(trained)


class _Inside(NamedTuple):
    """The mark of a tensor made during this call, and not returned by it."""

    call: int


class _Watch(TorchDispatchMode):
    """Marks tensors with their sources while a model runs."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[ModuleCall] = []
        self.written: set[CallOutput] = set()
        self._running: ModuleCall | None = None
        self._given: dict[int, list[int]] = {}  # the lists among the running call's arguments, see `_lists`
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
        after, returned = _lists((args, kwargs)), _lists(output)
        if any(after.get(key, before) != before and key not in returned for key, before in self._given.items()):
            raise StrategyError(
                f"{name} adds to a list that it is given, or takes from it, and a pipeline passes on only what its "
                "modules return. Return the list, or name split_points elsewhere"
            )
        number, indices = len(self.calls) - 1, dict[int, OutputIndex]()

        def slot(leaf: Any, place: str) -> Any:
            if isinstance(leaf, Tensor):
                index = indices.setdefault(id(leaf), OutputIndex(call.num_tensors))  # it may be there in two places
                for tensor in (leaf, *_parts(leaf)):
                    self._marks[tensor] = {CallOutput(number, index)}
                call.num_bytes += tensor_bytes(leaf) if index == call.num_tensors else 0
                call.num_tensors += 1
                return index
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
            marks = (mark for tensor in written_tensors(func, args, kwargs) for mark in self._marks.get(tensor, ()))
            self.written.update(mark for mark in marks if isinstance(mark, CallOutput))
        inputs = tensors_in((args, kwargs))
        results = tensors_in(output)
        call = self._running
        if call is None:
            sources: set[Any] = self.sources(inputs, "the model's own code")
        else:
            call.needs.update(self.sources(inputs, call.unit))
            sources = {_Inside(len(self.calls) - 1)}
        for tensor in results:
            self._marks[tensor] = sources | (self._marks.get(tensor, set()) if call is None else set())
        return output

    def sources(self, tensors: Iterable[Tensor], user: str) -> set[ValueOrigin]:
        """Sources of tensors that `user` takes; raises StrategyError if a unit made one and did not return it."""
        sources: set[ValueOrigin] = set()
        parameters = self._own.get(user, set())
        for tensor in tensors:
            name = self._names.get(id(tensor))
            if name is not None and id(tensor) not in parameters:
                sources.add(name)
            for mark in self._marks.get(tensor, ()):
                if not isinstance(mark, _Inside):
                    sources.add(mark)
                elif self.calls[mark.call].unit != user:
                    raise StrategyError(
                        f"{self.calls[mark.call].unit} makes a tensor that {user} uses, and does not return it; a "
                        "pipeline passes on only what its modules return. Return it, or name split_points elsewhere"
                    )
        return sources


def _lists(data: Any) -> dict[int, list[int]]:
    """The ids of the items of each list in `data`, by the list's id."""
    inner = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    lists = {id(data): list(map(id, inner))} if isinstance(data, list) else {}
    for item in inner:
        lists |= _lists(item)
    return lists


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The inner tensors of a wrapper subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
