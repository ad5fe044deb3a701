"""Initial values of a model on the meta device, for the parameters that a strategy has sharded or split.

    initial = InitialValues(model, param_init_fn)  # while the model is whole
    ...                                            # it is sharded and split, and given memory
    for names, value in initial.drawn(device):     # one full parameter after the other
        ...

The writes of each module's function are first observed on the meta device, at no cost. So missing values are detected
before any change, and a full parameter exists only from the first function that touches it to the last. The values are
those that `model.apply(param_init_fn)` draws on the whole model, independent of the strategy and the number of
processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atorch.distributed.collectives import from_rank_zero
from atorch.distributed.rng import RandomState, preserved_rng
from atorch.errors import ArgumentError, AtorchError
from atorch.model.copy import UNCOPYABLE, duplicate, lazy_clone
from atorch.model.copy_isolation import storage_of
from atorch.model.meta_device import first_names, has_meta, is_meta, is_unfilled, like, own_tensors, unfilled
from atorch.model.module_swap import post_order
from atorch.model.pytree import tensors_in, written_tensors

Fill = Callable[[nn.Module], Any]
"""Writes values to a module's parameters and buffers."""

ADVICE = (
    "Give auto_accelerate a param_init_fn that fills a module's own parameters and buffers, or make buffers on a real "
    "device. Or give empty_init=True, and load a checkpoint before the first step"
)


class ValueSource(Protocol):
    """Initial values of a model's parameters and buffers."""

    def drawn(self, device: torch.device) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield each tensor's names and its full value."""


class HeldValues:
    """The values of `model`, for a copy of it on the meta device that is sharded before it gets them.

    It holds parameters and buffers with memory of their own, whole and contiguous. Copies keep all other tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[Tensor, list[str]] = {}
        for name, tensor in _named(model).items():
            self._names.setdefault(tensor, []).append(name)
        sharing = Counter(map(_memory_of, self._names))
        self._tensors = {_memory_of(tensor): tensor for tensor in self._names if sharing[_memory_of(tensor)] == 1}
        self._tensors = {
            key: tensor
            for key, tensor in self._tensors.items()
            if key and tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes > 0
        }

    def on_meta(self, tensor: Tensor) -> Tensor | None:
        """A tensor on the meta device in place of one with the memory of a held one; None for others."""
        return torch.empty_like(tensor, device="meta") if _memory_of(tensor) in self._tensors else None

    def drawn(self, device: torch.device) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for tensor in self._tensors.values():
            yield tuple(self._names[tensor]), tensor.detach()


def _memory_of(tensor: Tensor) -> int | None:
    storage = storage_of(tensor)
    return None if storage is None else storage._cdata


class _Step(NamedTuple):
    """A module, the function that fills it, and the ids of the tensors that this touches."""

    name: str
    fill: Callable[[], Any]
    touched: frozenset[int]


class InitialValues:
    """Values for the parameters and buffers of `model` that are on the meta device.

    Args:
        fill: called with each module that contains such tensors, children first; it may fail on modules without own
            ones. None: the `reset_parameters` of each module with own meta tensors.
        advice: the end of the error about tensors that nothing writes.

    Raises:
        ArgumentError: nothing writes to some of these tensors, or a module holds one as an ordinary attribute.
    """

    def __init__(self, model: nn.Module, fill: Fill | None = None, advice: str = ADVICE) -> None:
        self._fill, self._advice = fill, advice
        refuse_meta_attributes(model)
        try:
            self._model = duplicate(model, convert=lambda tensor: tensor if is_meta(tensor) else lazy_clone(tensor))
        except UNCOPYABLE as error:
            raise ArgumentError(
                f"{type(model).__name__} is on the meta device and cannot be copied ({error}), so that its values "
                "cannot be made one by one; give it on a real device"
            ) from error
        self._places = _places(self._model)  # by id of the meta tensor, which each place keeps alive
        self._steps = self._watched()

    @torch.no_grad()
    def drawn(self, device: torch.device) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield each tensor's names and its final full value on `device`, drawn with rank 0's random state.

        All processes call this together. Afterwards a process whose generators equalled rank 0's keeps the advanced
        state; others restore their own.

        Raises:
            ArgumentError: a function has left numbers unwritten.
        """
        before = RandomState.now(device)
        first: RandomState = from_rank_zero(before)
        is_same = first.is_same(before)
        first.restore(device)
        last = {key: number for number, step in enumerate(self._steps) for key in step.touched}
        try:
            for number, step in enumerate(self._steps):
                for key in step.touched:
                    self._places[key].give(device)
                with _NaNs():  # type: ignore[no-untyped-call]  # torch's
                    step.fill()
                for key in step.touched:
                    if last[key] == number:
                        yield self._places[key].taken(step.name)
        finally:
            for place in self._places.values():  # values may be drawn again after a failed candidate
                place.put(place.meta)
            if not is_same:
                before.restore(device)

    def _watched(self) -> list[_Step]:
        """Steps with the tensors that they touch; raises for tensors that nothing writes."""
        steps, written = [], set[int]()
        ids = {place.storage: key for key, place in self._places.items()}
        with preserved_rng(), torch.no_grad():
            for (name, *_), module, _ in post_order(self._model):
                fill = self._function_of(module)
                if fill is not None:
                    touched, wrote = self._watch(module, fill, ids)
                    written |= wrote
                    if touched:
                        steps.append(_Step(name, fill, frozenset(touched)))
        missing = [place.names[0] for key, place in self._places.items() if key not in written]
        if missing:
            owner = type(self._model.get_submodule(missing[0].rpartition(".")[0])).__name__
            why = f"{owner} has no reset_parameters" if self._fill is None else "param_init_fn does not write it"
            raise ArgumentError(
                f"{first_names(missing)} on the meta device would get no values: of {missing[0]}, {why}. {self._advice}"
            )
        return steps

    def _function_of(self, module: nn.Module) -> Callable[[], Any] | None:
        if self._fill is not None:
            return partial(self._fill, module) if has_meta([module]) else None
        if not any(map(is_meta, own_tensors([module]))):
            return None
        for name in ("reset_parameters", "_reset_parameters"):  # the second is nn.MultiheadAttention's
            function = getattr(module, name, None)
            if callable(function):
                return function  # type: ignore[no-any-return]
        return None

    def _watch(self, module: nn.Module, fill: Callable[[], Any], ids: Mapping[int, int]) -> tuple[set[int], set[int]]:
        """Ids of tensors that a function reads or writes, and of those that it writes."""
        seen = _Seen(ids)
        below = set(map(id, own_tensors(module.modules()))) & self._places.keys()
        try:
            with seen:
                fill()
        except Exception:  # of any kind, in the user's function
            if not any(map(is_meta, own_tensors([module]))):
                return set(), set()  # it does not support modules without own tensors
            # It reads values, which meta tensors lack: assume that it writes all tensors of the module.
            return below, below
        for key in below:
            if self._places[key].is_replaced:  # by to_empty, as FSDP1 requires of such a function
                seen.touched.add(key)
                seen.written.add(key)
                self._places[key].put(self._places[key].meta)
        return seen.touched, seen.written


class _Place:
    """The place of a meta tensor in the model, with several names if it is tied."""

    def __init__(self, meta: Tensor) -> None:
        self.meta, self.storage = meta, meta.untyped_storage()._cdata
        self.names: list[str] = []
        self._holders: list[tuple[dict[str, Tensor | None], str]] = []

    def add(self, name: str, held: dict[str, Tensor | None], own_name: str) -> None:
        self.names.append(name)
        self._holders.append((held, own_name))

    @property
    def is_replaced(self) -> bool:
        """True if a holder has another tensor than the meta one."""
        return any(held[name] is not self.meta for held, name in self._holders)

    def put(self, tensor: Tensor) -> None:
        for held, name in self._holders:
            held[name] = tensor

    def give(self, device: torch.device) -> None:
        if not self.is_replaced:
            self.put(like(self.meta, unfilled(self.meta, device)))

    def taken(self, filled_by: str) -> tuple[tuple[str, ...], Tensor]:
        """Return the names and the value, and put the meta tensor back into the model."""
        tensors = [held[name] for held, name in self._holders]
        value = next((tensor for tensor in reversed(tensors) if tensor is not None), self.meta).detach()
        self.put(self.meta)
        if bool(value.isnan().any()):  # always False for integers
            raise ArgumentError(
                f"{self.names[0]} was on the meta device, and filling {filled_by or 'the model'} has left numbers "
                "unwritten, or NaN; let param_init_fn or reset_parameters write all of it"
            )
        return tuple(self.names), value


class _Seen(TorchDispatchMode):
    """Records reads and writes of tensors with these storages."""

    def __init__(self, ids: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ids = ids
        self.touched: set[int] = set()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.touched |= self._known(tensors_in((args, kwargs)))
        self.written |= self._known(written_tensors(func, args, kwargs))
        return func(*args, **kwargs)

    def _known(self, tensors: Iterable[Tensor]) -> set[int]:
        keys = (self._ids.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return {key for key in keys if key is not None}


class _NaNs(TorchDispatchMode):
    """Fills memory that is allocated inside with NaN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_empty = "empty" in func._overloadpacket.__name__ and isinstance(made, Tensor) and not made.is_meta
        return made.fill_(torch.nan) if is_empty and made.is_floating_point() else made


def give_values(
    initial: ValueSource,
    parts: Iterable[nn.Module],
    device: torch.device,
    write: Callable[[tuple[str, ...], Tensor, Tensor], None],
) -> None:
    """Write the values into `parts`, this process's modules of the model. All processes call it together.

    Args:
        write: writes this process's part of a value, which is whole, into the parameter or buffer with these names.

    Raises:
        AtorchError: a parameter has got no value.
    """
    held = [_named(part) for part in parts]
    done: set[int] = set()
    for names, value in initial.drawn(device):
        for tensors in held:
            for target in {id(tensors[name]): tensors[name] for name in names if name in tensors}.values():
                write(names, target, value)
                done.add(id(target))
    for name, tensor in (pair for tensors in held for pair in tensors.items()):
        if id(tensor) not in done and is_unfilled(tensor):
            raise AtorchError(
                f"{name} was on the meta device and has got no value: a method of the strategy has made it of another "
                "parameter; give the model on a real device, and report this"
            )


def _named(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by all their names."""
    pairs = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: tensor for named in pairs for name, tensor in named}


def _places(model: nn.Module) -> dict[int, _Place]:
    places: dict[int, _Place] = {}
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and is_meta(tensor):
                    place = places.setdefault(id(tensor), _Place(tensor))
                    place.add(f"{path}.{name}" if path else name, held, name)
    return places


def refuse_meta_attributes(model: nn.Module) -> None:
    """Raise for meta tensors held as ordinary attributes instead of parameters or buffers."""
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers") or (isinstance(module, nn.RNNBase) and name == "_flat_weights"):
                continue
            hidden = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and is_meta(leaf)), None)
            if hidden is not None:
                other = names.get(id(hidden))
                what = "that is neither a parameter nor a buffer" if other is None else f"which is {other} elsewhere"
                raise ArgumentError(
                    f"{f'{path}.{name}' if path else name} of {type(model).__name__} is a tensor on the meta device "
                    f"{what}, and would not be given values; give the model on a real device, or make it a buffer"
                )
