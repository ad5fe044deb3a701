"""Results of the last stage's function, on every process of its pipeline.

What it returns has the same form step after step, nearly always: tensors of these shapes at these places. Then its
tensors alone are sent, the small ones side by side. A new form is sent as an object first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.model.pytree import leaves_of, map_tensors, tensors_in
from atorch.runtime.pipeline.capture.shapes import TensorSpec, shape_of
from atorch.runtime.pipeline.object_broadcast import from_place

SMALL_BYTES = 2**16
"""Tensors up to this size travel side by side, for which they are copied."""
EXACT = (bool, int, float, str, type(None))
"""Of these, what is written is what it was."""


class ResultSpec:
    """Nested data with the shapes of its tensors in their places."""

    def __init__(self, data: Any) -> None:
        self.shapes = [shape_of(tensor) for tensor in tensors_in(data)]
        self.words = repr(map_tensors(shape_of, data))
        self.is_exact = all(type(leaf) in EXACT or isinstance(leaf, Tensor) for _, leaf in leaves_of(data))
        """True if all but the tensors is known by its words."""

    def is_as(self, other: ResultSpec | None) -> bool:
        """True if both are certainly of one form."""
        return other is not None and self.is_exact and other.is_exact and self.words == other.words


class StepResults:
    """Gives what process `place` of a pipeline has to all of them.

    Args:
        place: in the group.
    """

    def __init__(self, place: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._place, self._group, self._device = place, group, device
        self._known: dict[Hashable, tuple[ResultSpec, Any]] = {}  # a form, and data of it

    def is_new(self, kind: Hashable, data: Any) -> bool:
        """True if `data` is not of the form that such steps had before; on other processes, whether none is known."""
        form, _ = self._known.get(kind, (None, None))
        return form is None or (self._group.rank() == self._place and not ResultSpec(data).is_as(form))

    def give(self, kind: Hashable, data: Any, *, is_new: bool) -> Any:
        """The data, on every process; it is new on all of them, or on none."""
        if is_new:
            found = from_place(data, self._place, self._group, self._device)
            self._known[kind] = ResultSpec(found), map_tensors(lambda leaf: leaf.to("meta"), found)
            return data if self._group.rank() == self._place else found
        form, example = self._known[kind]
        is_source = self._group.rank() == self._place
        own = [leaf.detach() for leaf in tensors_in(data)] if is_source else []
        got = dict(self._sent(form.shapes, own))
        if is_source:
            return data
        waiting = iter(range(len(form.shapes)))
        return map_tensors(lambda leaf: got[next(waiting)], example)

    def _sent(self, shapes: Sequence[TensorSpec], own: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The tensors, by number; `own` are those of the source, and on others none."""
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
