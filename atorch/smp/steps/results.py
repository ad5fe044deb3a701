"""Results of the last stage's function, on every process of its pipeline.

A result usually has the same form in every step: tensors of equal shapes at equal places. Then only its tensors are
broadcast, the small ones concatenated. A result of a new form is broadcast as an object first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.model.pytree import leaves_of, map_tensors, tensors_in
from atorch.runtime.pipeline.capture.shapes import TensorSpec, shape_of
from atorch.runtime.pipeline.pipeline import from_place

SMALL_BYTES = 2**16
"""Tensors up to this size are concatenated, by a copy, for one broadcast."""
EXACT = (bool, int, float, str, type(None))
"""Types whose repr determines the value."""


class ResultSpec:
    """The form of nested data: its structure, with shapes in place of tensors."""

    def __init__(self, data: Any) -> None:
        self.shapes = [shape_of(tensor) for tensor in tensors_in(data)]
        self.words = repr(map_tensors(shape_of, data))
        self.is_exact = all(type(leaf) in EXACT or isinstance(leaf, Tensor) for _, leaf in leaves_of(data))
        """True if the repr determines everything but the tensors."""

    def is_as(self, other: ResultSpec | None) -> bool:
        """True if both are known to have one form."""
        return other is not None and self.is_exact and other.is_exact and self.words == other.words


class StepResults:
    """Broadcasts results from process `place` of a pipeline to all of its processes.

    Args:
        place: the source's rank in the group.
    """

    def __init__(self, place: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._place, self._group, self._device = place, group, device
        self._known: dict[Hashable, tuple[ResultSpec, Any]] = {}  # the form, and meta tensors in it

    def is_new(self, kind: Hashable, data: Any) -> bool:
        """True if `data` has another form than before in such steps; on other processes, if no form is known yet."""
        form, _ = self._known.get(kind, (None, None))
        return form is None or (self._group.rank() == self._place and not ResultSpec(data).is_as(form))

    def give(self, kind: Hashable, data: Any, *, is_new: bool) -> Any:
        """Return the data on every process. `is_new` must be equal on all."""
        if is_new:
            result = from_place(data, self._place, self._group, self._device)
            self._known[kind] = ResultSpec(result), map_tensors(lambda leaf: leaf.to("meta"), result)
            return data if self._group.rank() == self._place else result
        form, example = self._known[kind]
        is_source = self._group.rank() == self._place
        tensors = [leaf.detach() for leaf in tensors_in(data)] if is_source else []
        received = dict(self._sent(form.shapes, tensors))
        if is_source:
            return data
        waiting = iter(range(len(form.shapes)))
        return map_tensors(lambda leaf: received[next(waiting)], example)

    def _sent(self, shapes: Sequence[TensorSpec], own: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Broadcast the tensors, by number; `own` are those of the source, and empty on other processes."""
        small: dict[torch.dtype, list[int]] = {}
        for number, (sizes, dtype) in enumerate(shapes):
            if torch.Size(sizes).numel() * dtype.itemsize <= SMALL_BYTES:
                small.setdefault(dtype, []).append(number)
                continue
            tensor = own[number].contiguous() if own else torch.empty(sizes, dtype=dtype, device=self._device)
            dist.broadcast(tensor, group=self._group, group_src=self._place)
            yield number, tensor
        for dtype, numbers in small.items():
            counts = [torch.Size(shapes[number].sizes).numel() for number in numbers]
            if own:
                flat = torch.cat([own[number].reshape(-1) for number in numbers])
            else:
                flat = torch.empty(sum(counts), dtype=dtype, device=self._device)
            dist.broadcast(flat, group=self._group, group_src=self._place)
            for number, piece in zip(numbers, flat.split(counts), strict=True):
                yield number, piece.view(shapes[number].sizes)
