"""Blocks of a model are recorded each by itself, and those that are equal run once.

A block that is equal to an earlier one, and is given inputs of the same shapes, does the same. It is not run again: it
returns new values of the shapes that the first one returned, and its stretch refers to that one's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch.model.tensors import map_tensors, tensor_bytes, tensors_of
from atorch.profiler.capture.dataflow import StorageId
from atorch.profiler.capture.recording import Recorder, Stretch


@dataclass(frozen=True)
class _Run:
    """A run of a block: its stretch, the values it was given in their order, and what it returned."""

    stretch: Stretch
    given: list[StorageId]
    output: Any


class Blocks:
    """Gives blocks of a copied model stretches of their own.

    Args:
        groups: names of blocks that are equal; where there are none, every block runs.
    """

    def __init__(self, recorder: Recorder, groups: Sequence[Sequence[str]] = ()) -> None:
        self._recorder = recorder
        self._group_of = {name: index for index, group in enumerate(groups) for name in group}
        self._runs: dict[Hashable, _Run] = {}

    def watch(self, blocks: Mapping[str, nn.Module]) -> None:
        """Record the blocks' runs from now on. Their `forward` is replaced."""
        for name, block in blocks.items():
            setattr(block, "forward", self._watched(name, block.forward))  # noqa: B010  (mypy: a method)

    def _watched(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._recorder.stretches[-1].block:  # a block that another one calls is a part of it
                return forward(*args, **kwargs)
            key = (self._group_of[name], *self._signature((args, kwargs))) if name in self._group_of else None
            run = self._runs.get(key) if key else None
            given = list(tensors_of((args, kwargs)))
            self._recorder.stretches.append(self._stretch(name, given, run))
            try:
                if run is not None:
                    return self._repeat(run, given)
                stretch = self._recorder.stretches[-1]
                output = forward(*args, **kwargs)
                if key:
                    self._runs[key] = _Run(stretch, [self._recorder.value(each) for each in given], output)
                return output
            finally:
                self._recorder.stretches.append(Stretch())

        return watched

    def _stretch(self, name: str, given: Sequence[torch.Tensor], run: _Run | None) -> Stretch:
        stretch = Stretch(name, like=run.stretch if run else None)
        for tensor in given:
            value = self._recorder.value(tensor)
            stretch.inputs.setdefault(value, tensor_bytes(tensor))
        stretch.seq_len = next((each.shape[1] for each in given if each.dim() == 3 and each.is_floating_point()), 0)
        return stretch

    def _repeat(self, run: _Run, given: Sequence[torch.Tensor]) -> Any:
        """Values like those that the first run returned; what it saved of inputs and outputs is saved."""
        recorder, new_of = self._recorder, dict(reversed(list(zip(run.given, given, strict=True))))
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

    def _signature(self, given: Any) -> Iterator[Hashable]:
        """All that a block's work depends on: shapes, and the values of whatever is no tensor."""
        yield torch.is_grad_enabled()
        order = {self._recorder.value(each): index for index, each in reversed(list(enumerate(tensors_of(given))))}
        yield from described(given, lambda each: order[self._recorder.value(each)], lambda each: (type(each), id(each)))


def like(before: torch.Tensor) -> torch.Tensor:
    """A new tensor with a storage as large; one that needs a gradient is, as any result, no leaf."""
    num_elements = before.untyped_storage().nbytes() // before.element_size()
    whole = torch.empty(num_elements, dtype=before.dtype, device=before.device)
    if before.requires_grad:
        whole = whole.requires_grad_().clone()
    return whole.as_strided(before.size(), before.stride(), before.storage_offset())


def described(data: Any, tensor: Callable[[torch.Tensor], int], other: Callable[[Any], Hashable]) -> Iterator[Hashable]:
    """The parts of a call: shapes of tensors and which they are, plain values, and what `other` says of the rest."""
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
