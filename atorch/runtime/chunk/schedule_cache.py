"""A cache of schedules for passes: a batch of a new shape saves other amounts for backward, so it is traced first.

If a pass deviates from its trace, the model changed. Then it is traced once more. A pass that deviates again fetches
chunks on demand.

A pass is traced on fake tensors. If that fails, values decide the path through the model, and passes are traced by real
runs from then on.

Processes that share chunks must fetch the same chunks in the same order. So they use the trace of the largest batch so
far on any of them. Before every pass they agree on it by a reduction of two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.distributed.collectives import all_reduce_max, first_not_none, host_comm_device
from atorch.distributed.fingerprints import hash_pair
from atorch.errors import ArgumentError, AtorchError, OutOfBudgetError
from atorch.logs import logger
from atorch.runtime.chunk.pass_schedule import AccessTrace, PassSchedule

if TYPE_CHECKING:
    from atorch.runtime.chunk.operations import Operations


class TraceBatch(Protocol):
    """Traces the pass on a batch, on fake tensors or by a real run."""

    def __call__(self, batch: Any, /, *, for_real: bool = ...) -> AccessTrace: ...


class ScheduleCache:
    """Traces passes, and keeps their schedules.

    Args:
        trace_batch: traces the pass on a batch.
        group: processes that share the chunks; None for a single process.
    """

    def __init__(self, trace_batch: TraceBatch, group: dist.ProcessGroup | None) -> None:
        self._trace_batch, self._group = trace_batch, group
        self._known: dict[Hashable, PassSchedule] = {}
        self._again: set[Hashable] = set()  # traced twice
        self._for_real = False
        self._largest = 0
        self._batch: Any = None
        self._shapes: Hashable = ()
        self._numel = 0

    def expect(self, batch: Any, tensors: Iterable[Tensor]) -> None:
        """Note that the next pass is on `batch`, which has these tensors."""
        listed = list(tensors)
        self._batch = batch
        self._shapes = tuple((tensor.shape, tensor.dtype) for tensor in listed)
        self._numel = sum(tensor.numel() for tensor in listed)

    def first(self) -> AccessTrace:
        """The trace of the expected pass, on the largest of the processes' batches.

        Raises:
            AtorchError: it cannot be traced, here or on a process that shares the chunks.
        """
        numel, attempt = self._largest_attempt()
        if isinstance(attempt, AtorchError) and not self._for_real:
            logger.info("a pass is traced by a real run on the host: %s", attempt)
            self._for_real = True
            numel, attempt = self._largest_attempt()
        if isinstance(attempt, AtorchError):
            raise attempt
        self._largest = numel
        return attempt

    def schedule_passes(self, operations: Operations) -> None:
        """Schedule each later pass of a model whose first pass is the one that `first()` returned."""
        self._known = {self._key(): operations.residency.pass_schedule}
        operations.schedule_for = partial(self.next, operations.schedule_of)

    def next(self, schedule_of: Callable[[AccessTrace], PassSchedule]) -> PassSchedule:
        key = self._key()
        diverged = key in self._known and self._known[key].diverged and key not in self._again
        if self._group is not None:
            both = torch.tensor([self._numel, diverged], device=host_comm_device())
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            most, diverged = both.tolist()
            if most > self._largest:
                self._known.clear()
        if key not in self._known:
            self._known[key] = schedule_of(self.first())
        elif diverged:
            self._again.add(key)
            with suppress(OutOfBudgetError):  # then chunks are still fetched on demand
                self._known[key] = schedule_of(self.first())
        return self._known[key]

    def _key(self) -> Hashable:
        return self._shapes if self._group is None else "largest"

    def _largest_attempt(self) -> tuple[int, AccessTrace | AtorchError]:
        """The elements of the largest batch, and the trace of its process, or an error of any process.

        Only that process broadcasts its trace: a trace takes megabytes, so gathering all would not scale.
        """
        attempt = self._attempt()
        if self._group is None:
            return self._numel, attempt
        fault = first_not_none(str(attempt) if isinstance(attempt, AtorchError) else None, self._group)
        if fault is not None:
            return self._numel, attempt if isinstance(attempt, AtorchError) else ArgumentError(fault[1])
        assert not isinstance(attempt, AtorchError), "no process has a fault"
        ways = hash_pair([sorted(access.parameters) for access in attempt.accesses])
        most, one, other = all_reduce_max([self._numel, *ways], self._group)
        varies = self._for_real or one != -other
        own_trace = attempt._replace(varies=varies) if self._numel == most else None
        traced = first_not_none(own_trace, self._group)
        assert traced is not None, "some batch is the largest"
        return most, traced[1]

    def _attempt(self) -> AccessTrace | AtorchError:
        try:
            return self._trace_batch(self._batch, for_real=self._for_real)
        except AtorchError as error:
            return error
