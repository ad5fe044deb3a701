"""Records each block of a model in a stretch of its own, and runs equal blocks once.

A block that equals an earlier one, with inputs of the same shapes, computes the same. It does not run again: it returns
new values of the shapes that the first one returned, and its stretch refers to the first one's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from atorch.model.pytree import map_tensors, tensor_bytes, tensors_in
from atorch.profiler.capture.dataflow import StorageId
from atorch.profiler.capture.recording import Recorder, Stretch


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
            given = tensors_in((args, kwargs))
            self._recorder.stretches.append(self._stretch(name, given, run))
            try:
                if run is not None:
                    return self._repeat(run, given)
                stretch = self._recorder.stretches[-1]
                output = forward(*args, **kwargs)
                if key:
                    self._runs[key] = _Run(stretch, [self._recorder.value(tensor) for tensor in given], output)
                return output
            finally:
                self._recorder.stretches.append(Stretch())

        return watched

    def _stretch(self, name: str, given: Sequence[torch.Tensor], run: _Run | None) -> Stretch:
        stretch = Stretch(name, like=run.stretch if run else None)
        for tensor in given:
            value = self._recorder.value(tensor)
            stretch.inputs.setdefault(value, tensor_bytes(tensor))
        streams = (tensor for tensor in given if tensor.dim() == 3 and tensor.is_floating_point())
        stretch.seq_len = next((stream.shape[1] for stream in streams), 0)
        return stretch

    def _repeat(self, run: _Run, given: Sequence[torch.Tensor]) -> Any:
        """New values like those that the first run returned; saves the inputs and outputs that it saved."""
        recorder, new_of = self._recorder, dict(reversed(list(zip(run.inputs, given, strict=True))))
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
        """The properties that a block's work depends on: shapes, and values of non-tensors."""
        yield torch.is_grad_enabled()
        value_of = self._recorder.value
        order = {value_of(tensor): index for index, tensor in reversed(list(enumerate(tensors_in(given))))}
        yield from described(given, lambda tensor: order[value_of(tensor)], lambda other: (type(other), id(other)))


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
