"""Results of the last stage's function, on every process of its pipeline.

A result usually has the same form in every step: tensors of equal shapes at equal places. Then only its tensors are
broadcast, packed in buckets. A result of a new form is broadcast as an object first.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.model.pytree import leaves_of, map_tensors, tensors_in
from atorch.runtime.data_parallel.buckets import broadcast
from atorch.runtime.pipeline.capture.shapes import shape_of
from atorch.runtime.pipeline.pipeline import from_place

EXACT = (bool, int, float, str, type(None))
"""Types whose repr determines the value."""


class StepResults:
    """Broadcasts results from process `place` of a pipeline to all of its processes.

    Args:
        place: the source's rank in the group.
    """

    def __init__(self, place: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._place, self._group, self._device = place, group, device
        self._is_source = group.rank() == place
        self._known: dict[Hashable, tuple[str | None, Any]] = {}  # the form, and meta tensors in it

    def is_new(self, kind: Hashable, data: Any) -> bool:
        """True if `data` has another form than before in such steps; on other processes, if no form is known yet."""
        form, _ = self._known.get(kind, (None, None))
        return form is None or (self._is_source and form != _form_of(data))

    def give(self, kind: Hashable, data: Any, *, is_new: bool) -> Any:
        """Return the data on every process. `is_new` must be equal on all."""
        if is_new:
            result = from_place(data, self._place, self._group, self._device)
            self._known[kind] = _form_of(result), map_tensors(lambda leaf: leaf.to("meta"), result)
        else:
            _, example = self._known[kind]
            result = data if self._is_source else map_tensors(self._empty, example)
            broadcast([(self._place, tensors_in(result))], self._group)
        return data if self._is_source else result

    def _empty(self, leaf: Tensor) -> Tensor:
        return leaf.new_empty(leaf.shape, device=self._device)


def _form_of(data: Any) -> str | None:
    """The structure of nested data, with shapes in place of tensors; None if its words do not determine it."""
    if not all(type(leaf) in EXACT or isinstance(leaf, Tensor) for _, leaf in leaves_of(data)):
        return None
    return repr(map_tensors(shape_of, data))
