"""The course of every pass: a batch of another shape keeps another amount for backward, and is foreseen when it comes.

So is, once more, one whose last pass was not as it was foreseen: the model has changed. What goes another way each time
is left to be fetched as it is needed.

Processes that share chunks must fetch the same ones in the same order: they go by the largest batch that any of them
has had. Which that is, is asked before every pass; it is one number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError, AtorchError, OutOfBudgetError
from atorch.runtime.chunk.course import Course, Pass

Foresee = Callable[[Any], Pass]


class Courses:
    """Foresees passes.

    Args:
        foresee: what a pass on a batch will do.
        group: processes that share the chunks; None for this one alone.
        device: where they exchange numbers.
    """

    def __init__(self, foresee: Foresee, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._foresee, self._group, self._device = foresee, group, device
        self._known: dict[Hashable, Course] = {}
        self._again: set[Hashable] = set()  # foreseen twice
        self._largest = 0
        self._batch: Any = None
        self._shapes: Hashable = ()
        self._numel = 0

    def expect(self, batch: Any, tensors: Iterable[Tensor]) -> None:
        """The next pass is on `batch`, which has these tensors."""
        listed = list(tensors)
        self._batch = batch
        self._shapes = tuple((tensor.shape, tensor.dtype) for tensor in listed)
        self._numel = sum(tensor.numel() for tensor in listed)

    def first(self) -> Pass:
        """The pass that is expected, on the largest of the processes' batches.

        Raises:
            AtorchError: it cannot be foreseen, here or on a process that shares the chunks.
        """
        if self._group is None:
            return self._foresee(self._batch)
        every: list[Any] = [None] * self._group.size()
        dist.all_gather_object(every, (self._numel, self._attempt()), group=self._group)
        self._largest = max(numel for numel, _ in every)
        fault = next((found for _, found in every if isinstance(found, str)), None)
        if fault is not None:
            raise ArgumentError(fault)
        chosen: Pass = next(found for numel, found in every if numel == self._largest)
        return chosen

    def begin(self, first: Course) -> None:
        """`first` is the course of the pass that `first()` gave."""
        self._known = {self._key(): first}

    def next(self, course_of: Callable[[Pass], Course]) -> Course:
        """The course of the pass that begins."""
        key = self._key()
        strayed = key in self._known and self._known[key].strayed and key not in self._again
        if self._group is not None:
            most = torch.tensor([self._numel, strayed], device=self._device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
            strayed = bool(most[1])
            if int(most[0]) > self._largest:
                self._known.clear()
        if key not in self._known:
            self._known[key] = course_of(self.first())
        elif strayed:
            self._again.add(key)
            with suppress(OutOfBudgetError):  # then as before, by need
                self._known[key] = course_of(self.first())
        return self._known[key]

    def _key(self) -> Hashable:
        return self._shapes if self._group is None else "largest"

    def _attempt(self) -> Pass | str:
        try:
            return self._foresee(self._batch)
        except AtorchError as error:
            return str(error)
