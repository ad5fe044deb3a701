"""What passes of an engine's model will need, from the batches that it is given.

A batch of another shape keeps another amount for backward, and has a course of its own. Processes that share chunks
must fetch the same ones in the same order: they go by the largest batch that any of them has had.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk_trace import foreseen
from atorch.distributed.collectives import gather_objects, together
from atorch.errors import ArgumentError
from atorch.patrickstar.embeddings import foresee_lookups
from atorch.profiler.tensors import tensors_of
from atorch.runtime.chunk.course import Course, Pass

_LARGEST = "largest"


class Foresight:
    """Foresees passes of `model`, which computes in `dtype` on `device`."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._model, self._dtype, self._device, self._group = model, dtype, device, group
        self.on_host: set[str] = set()  # names of embeddings that the device does not see
        self._batch: Any = None
        self._largest = 0
        self._known: dict[Hashable, Course] = {}

    def expect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The next pass is on these."""
        self._batch = args, kwargs

    def agreed(self) -> Pass:
        """The pass that all processes go by, on the largest of their batches."""
        mine = together(self._foreseen)
        passes: list[tuple[int, Pass]] = gather_objects((self._numel(), mine))
        self._largest, chosen = max(passes, key=lambda each: each[0])
        return chosen

    def courses(self, first: Course, make: Callable[[Pass], Course]) -> Callable[[], Course]:
        """A function that gives the course of the pass that begins; `first` is that of the pass that was agreed on."""
        self._known = {self._shapes() if self._group is None else _LARGEST: first}

        def of_next() -> Course:
            shapes = self._shapes()
            if shapes not in self._known:
                self._known[shapes] = make(self._foreseen())
            return self._known[shapes]

        def of_largest() -> Course:
            most = torch.tensor(self._numel(), device=self._device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
            if int(most) > self._largest:
                self._known[_LARGEST] = make(self.agreed())
            return self._known[_LARGEST]

        return of_next if self._group is None else of_largest

    def _shapes(self) -> Hashable:
        return tuple((tensor.shape, tensor.dtype) for tensor in tensors_of(self._batch))

    def _numel(self) -> int:
        return sum(tensor.numel() for tensor in tensors_of(self._batch))

    def _foreseen(self) -> Pass:
        def loss(duplicate: nn.Module, batch: Any) -> Tensor:
            foresee_lookups(duplicate, self.on_host, self._dtype)
            return _loss(duplicate, batch)

        return foreseen(self._model, self._batch, loss, device_type=self._device.type, dtype=self._dtype)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """A loss to foresee a backward pass by: the model's own where it gives one, else one as costly as most are."""
    args, kwargs = batch
    found = [each for each in tensors_of(model(*args, **kwargs)) if each.requires_grad]
    own = [each for each in found if each.numel() == 1]
    if own:
        return own[0]
    if not found:
        raise ArgumentError(f"{type(model).__name__} gives no tensor that gradients could come from")
    return torch.stack([each.float().log_softmax(-1).sum() for each in found]).sum()
