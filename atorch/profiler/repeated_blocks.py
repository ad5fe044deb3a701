"""Equal blocks of a model: found without running them, and run once, each recorded in a stretch of its own.

Two blocks are alike if their modules have the same classes, parameters of the same shapes and the same attributes, at
any depth. Numbers that count up with the blocks, such as a layer's cache index, may differ.

A block that equals an earlier one, with inputs of the same shapes, computes the same. It does not run again. It returns
new values of the shapes that the first one returned, and its stretch refers to the first one's operations.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from atorch.model.pytree import map_tensors, tensor_bytes, tensors_in
from atorch.profiler.dataflow import StorageId
from atorch.profiler.recording import Recorder, Stretch

_PLAIN = (str, bytes, float, complex, bool, type, set, frozenset, torch.Size, torch.dtype, torch.device)


def groups_of_alike(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """Names of blocks, grouped by likeness, in the order of each group's first block."""
    ends = {name: name.rpartition(".")[2] for name in blocks}  # a block's number, if it is in a list
    indices = {name: int(ends[name]) if ends[name].isdigit() else place for place, name in enumerate(blocks)}
    groups: list[list[str]] = []
    for name, block in blocks.items():
        for group in groups:
            if _Comparison(indices[name] - indices[group[0]]).alike(blocks[group[0]], block):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


class _Comparison:
    def __init__(self, step: int) -> None:
        self.step = step
        self._begun: set[tuple[int, int]] = set()  # pairs under comparison, to end cycles

    def alike(self, one: Any, other: Any) -> bool:
        """True if the two differ in counting numbers alone."""
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, int) and not isinstance(one, bool):
            return bool(one == other or other - one == self.step)
        if isinstance(one, torch.Tensor):
            return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        if (id(one), id(other)) in self._begun:
            return True
        self._begun.add((id(one), id(other)))
        return self._alike_inside(one, other)

    def _alike_inside(self, one: Any, other: Any) -> bool:
        if isinstance(one, types.FunctionType):
            return one.__code__ is other.__code__ and self._all(_inputs(one), _inputs(other))
        if isinstance(one, types.MethodType):
            return one.__func__ is other.__func__ and self.alike(one.__self__, other.__self__)
        if isinstance(one, partial):
            return self._all([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
        if isinstance(one, Mapping):
            # Hook tables have unique numbers as keys.
            same_keys = all(isinstance(key, int) for key in (*one, *other)) or list(one) == list(other)
            return same_keys and self._all(list(one.values()), list(other.values()))
        if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
            return self._all(one, other)
        if hasattr(one, "__dict__") and not isinstance(one, type):
            return self.alike(vars(one), vars(other))
        return isinstance(one, _PLAIN) and bool(one == other)

    def _all(self, ones: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(ones) == len(others) and all(map(self.alike, ones, others))


def _inputs(function: types.FunctionType) -> list[Any]:
    """Objects that a function depends on besides arguments and code."""
    cells = [] if function.__closure__ is None else [_content(cell) for cell in function.__closure__]
    return [*cells, function.__defaults__, function.__kwdefaults__, vars(function)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # an empty cell


@dataclass(frozen=True)
class _Run:
    """A run of a block: its stretch, its inputs in order, and its output."""

    stretch: Stretch
    inputs: list[StorageId]
    output: Any


class Blocks:
    """Records blocks of a copied model in stretches of their own.

    Args:
        groups: names of equal blocks; without groups, every block runs.
    """

    def __init__(self, recorder: Recorder, groups: Sequence[Sequence[str]] = ()) -> None:
        self._recorder = recorder
        self._group_of = {name: index for index, group in enumerate(groups) for name in group}
        self._runs: dict[Hashable, _Run] = {}

    def watch(self, blocks: Mapping[str, nn.Module]) -> None:
        """Record the blocks' runs from now on, by replacing their `forward`."""
        for name, block in blocks.items():
            setattr(block, "forward", self._watched(name, block.forward))  # noqa: B010  (mypy: a method)

    def _watched(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._recorder.stretches[-1].block:  # a block called by another one is a part of it
                return forward(*args, **kwargs)
            key = (self._group_of[name], *self._signature((args, kwargs))) if name in self._group_of else None
            run = self._runs.get(key) if key else None
            inputs = tensors_in((args, kwargs))
            self._recorder.stretches.append(self._stretch(name, inputs, run))
            try:
                if run is not None:
                    return self._repeat(run, inputs)
                stretch = self._recorder.stretches[-1]
                output = forward(*args, **kwargs)
                if key:
                    self._runs[key] = _Run(stretch, [self._recorder.value(tensor) for tensor in inputs], output)
                return output
            finally:
                self._recorder.stretches.append(Stretch())

        return watched

    def _stretch(self, name: str, inputs: Sequence[torch.Tensor], run: _Run | None) -> Stretch:
        stretch = Stretch(name, like=run.stretch if run else None)
        for tensor in inputs:
            value = self._recorder.value(tensor)
            stretch.inputs.setdefault(value, tensor_bytes(tensor))
        streams = (tensor for tensor in inputs if tensor.dim() == 3 and tensor.is_floating_point())
        stretch.seq_len = next((stream.shape[1] for stream in streams), 0)
        return stretch

    def _repeat(self, run: _Run, inputs: Sequence[torch.Tensor]) -> Any:
        """New values like those that the first run returned; saves the inputs and outputs that it saved."""
        recorder, new_of = self._recorder, dict(reversed(list(zip(run.inputs, inputs, strict=True))))
        for value, tensor in new_of.items():
            if value in run.stretch.needed:
                recorder.save(tensor)

        def renewed(before: torch.Tensor) -> torch.Tensor:
            value = recorder.value(before)
            if value not in new_of:
                new_of[value] = like(before)
                made = recorder.value(new_of[value])
                recorder.made[made] = len(recorder.stretches) - 1
                if value in run.stretch.saved:
                    recorder.all_saved.add(made)
                if value in recorder.activations:
                    recorder.activations.add(made)
            tensor = new_of[value]
            if (tensor.shape, tensor.stride()) == (before.shape, before.stride()):
                return tensor
            return tensor.as_strided(before.size(), before.stride(), before.storage_offset())

        with recorder.pausing():
            return map_tensors(renewed, run.output)

    def _signature(self, arguments: Any) -> Iterator[Hashable]:
        """The properties that a block's work depends on: shapes, and values of non-tensors."""
        yield torch.is_grad_enabled()
        value_of = self._recorder.value
        order = {value_of(tensor): index for index, tensor in reversed(list(enumerate(tensors_in(arguments))))}
        yield from described(arguments, lambda tensor: order[value_of(tensor)], lambda other: (type(other), id(other)))


def like(before: torch.Tensor) -> torch.Tensor:
    """A new tensor with a storage of the same size; one that requires a gradient is not a leaf, like any result."""
    num_elements = before.untyped_storage().nbytes() // before.element_size()
    whole = torch.empty(num_elements, dtype=before.dtype, device=before.device)
    if before.requires_grad:
        whole = whole.requires_grad_().clone()
    return whole.as_strided(before.size(), before.stride(), before.storage_offset())


def described(data: Any, tensor: Callable[[torch.Tensor], int], other: Callable[[Any], Hashable]) -> Iterator[Hashable]:
    """The parts of a call: shapes and identities of tensors, plain values, and `other(value)` of the rest."""
    if isinstance(data, torch.Tensor):
        yield tuple(data.shape), data.stride(), data.dtype, data.device.type, data.requires_grad, tensor(data)
    elif isinstance(data, Mapping):
        yield tuple(data)
        for value in data.values():
            yield from described(value, tensor, other)
    elif isinstance(data, (list, tuple)):
        yield type(data), len(data)
        for value in data:
            yield from described(value, tensor, other)
    elif data is None or isinstance(data, (bool, int, float, str, torch.dtype, torch.device)):
        yield data
    else:
        yield other(data)
