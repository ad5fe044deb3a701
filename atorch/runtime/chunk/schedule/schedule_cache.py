"""The course of every pass: a batch of another shape keeps another amount for backward, and is foreseen when it comes.

So is, once more, one whose last pass was not as it was foreseen: the model has changed, or its blocks are not as alike
as they look, and all of them are run from then on. What goes another way each time is left to be fetched as it is
needed.

A pass is foreseen on fake tensors. Where that fails, values decide which way the model goes: from then on passes are
foreseen by real runs.

Processes that share chunks must fetch the same ones in the same order: they go by the largest batch that any of them
has had. Which that is, is asked before every pass; it is one number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.distributed.collectives import first_told, largest, meeting_place
from atorch.distributed.fingerprints import both_ways
from atorch.errors import ArgumentError, AtorchError, OutOfBudgetError
from atorch.logs import logger
from atorch.runtime.chunk.schedule.pass_schedule import AccessTrace, PassSchedule


class Foresee(Protocol):
    """Foresees the pass on a batch, on fake tensors or by a real run; by a `whole` one, or of some blocks for all."""

    def __call__(self, batch: Any, /, *, for_real: bool = ..., whole: bool = ...) -> AccessTrace: ...


class Courses:
    """Foresees passes.

    Args:
        foresee: what a pass on a batch will do.
        group: processes that share the chunks; None for this one alone.
    """

    def __init__(self, foresee: Foresee, group: dist.ProcessGroup | None) -> None:
        self._foresee, self._group = foresee, group
        self._known: dict[Hashable, PassSchedule] = {}
        self._again: set[Hashable] = set()  # foreseen twice
        self._for_real = self._whole = False
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

    def first(self) -> AccessTrace:
        """The pass that is expected, on the largest of the processes' batches.

        Raises:
            AtorchError: it cannot be foreseen, here or on a process that shares the chunks.
        """
        numel, found = self._largest_attempt()
        if isinstance(found, AtorchError) and not self._for_real:
            logger.info("a pass is foreseen by a real run on the host: %s", found)
            self._for_real = True
            numel, found = self._largest_attempt()
        if isinstance(found, AtorchError):
            raise found
        self._largest = numel
        return found

    def begin(self, first: PassSchedule) -> None:
        """`first` is the course of the pass that `first()` gave."""
        self._known = {self._key(): first}

    def next(self, course_of: Callable[[AccessTrace], PassSchedule]) -> PassSchedule:
        key = self._key()
        strayed = key in self._known and self._known[key].strayed and key not in self._again
        if self._group is not None:
            both = torch.tensor([self._numel, strayed], device=meeting_place())
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            most, strayed = both.tolist()
            if most > self._largest:
                self._known.clear()
        if key not in self._known:
            self._known[key] = course_of(self.first())
        elif strayed:
            self._again.add(key)
            self._whole = True
            with suppress(OutOfBudgetError):  # then as before, by need
                self._known[key] = course_of(self.first())
        return self._known[key]

    def _key(self) -> Hashable:
        return self._shapes if self._group is None else "largest"

    def _largest_attempt(self) -> tuple[int, AccessTrace | AtorchError]:
        """The pass foreseen on the process with the largest batch, and that batch's elements; or what stops any.

        One of them tells it: a pass is megabytes, and what all have to tell would grow with their number.
        """
        attempt = self._attempt()
        if self._group is None:
            return self._numel, attempt
        fault = first_told(str(attempt) if isinstance(attempt, AtorchError) else None, self._group)
        if fault is not None:
            return self._numel, attempt if isinstance(attempt, AtorchError) else ArgumentError(fault[1])
        assert not isinstance(attempt, AtorchError), "no process has a fault"
        ways = both_ways([sorted(access.parameters) for access in attempt.accesses])
        most, one, other = largest([self._numel, *ways], self._group)
        varies = self._for_real or one != -other
        mine = attempt._replace(varies=varies) if self._numel == most else None
        foreseen = first_told(mine, self._group)
        assert foreseen is not None, "some batch is the largest"
        return most, foreseen[1]

    def _attempt(self) -> AccessTrace | AtorchError:
        try:
            return self._foresee(self._batch, for_real=self._for_real, whole=self._whole)
        except AtorchError as error:
            return error
