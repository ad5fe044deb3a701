"""Memory of the host and of the compute device: copies between them, and ledgers of the bytes in use in each.

Copies are synchronous, or overlap computation.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from atorch.errors import CapabilityError, OutOfBudgetError
from atorch.units import format_bytes

Wait = Callable[[], None]

PAGE = mmap.PAGESIZE
MOST_SUMS = 2  # most gradients that wait in page-locked memory to be added to others


def put(target: Tensor, source: Tensor, add: bool) -> None:
    target.add_(source.to(target)) if add else target.copy_(source)


class Transfer:
    """Copies synchronously, for a device that shares the host's memory."""

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Begin to copy `source` into `target`; the returned function waits until computation may read it."""
        target.copy_(source)
        return nothing

    def ahead(self, target: Tensor, source: Tensor) -> AbstractContextManager[None]:
        """Copy `source` into `target` ahead of work queued inside; computation waits for neither."""
        self.start(target, source)()
        return nullcontext()

    def keep(self, target: Tensor, source: Tensor, add: bool) -> Wait | None:
        """Begin to copy `source` into `target` on the host, or to add it there.

        The returned function waits until computation may overwrite `source`; None: it may already.
        """
        put(target, source, add)
        return None

    def kept(self) -> Wait:
        """A function that waits, on any thread, until all `keep` calls so far are done."""
        return nothing

    def settle(self) -> None:
        """Wait until all `keep` calls are done."""


class OnStream(Transfer):
    """Copies between pinned and device memory on one CUDA stream per direction. A thread adds sums on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._adding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adding")
        self._sums: list[Future[None]] = []

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Copy after the work queued now, which may still read the old contents of `target`."""
        computing = torch.cuda.current_stream(target.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        arrived = self._stream.record_event()
        return lambda: torch.cuda.current_stream(target.device).wait_event(arrived)

    @contextmanager
    def ahead(self, target: Tensor, source: Tensor) -> Iterator[None]:
        """Copy as `start` does; a collective queued inside runs after the copy."""
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            yield

    def keep(self, target: Tensor, source: Tensor, add: bool) -> Wait:
        """Copy after the work queued now, which computes `source`. With `add`, the thread adds the copy to `target`."""
        while len(self._sums) >= MOST_SUMS:
            self._sums.pop(0).result()
        self._back.wait_stream(torch.cuda.current_stream(source.device))
        landing = torch.empty(target.shape, dtype=target.dtype, pin_memory=True) if add else target
        with torch.cuda.stream(self._back):
            landing.copy_(source, non_blocking=True)
        left = self._back.record_event()
        if add:
            self._sums.append(self._adding.submit(_add_after, left, target, landing))
        return lambda: torch.cuda.current_stream(source.device).wait_event(left)

    def kept(self) -> Wait:
        left, sums = self._back.record_event(), list(self._sums)

        def wait() -> None:
            left.synchronize()
            for future in sums:
                future.result()

        return wait

    def settle(self) -> None:
        self._back.synchronize()
        while self._sums:
            self._sums.pop().result()


def transfer_for(device: torch.device) -> Transfer:
    return OnStream(device) if device.type == "cuda" else Transfer()


def _add_after(copied: torch.cuda.Event, target: Tensor, landing: Tensor) -> None:
    copied.synchronize()
    target.add_(landing)


def nothing() -> None:
    """Wait for nothing."""


def locked(numel: int, dtype: torch.dtype, owner: object) -> Tensor:
    """A host tensor that is page-locked for as long as `owner` lives.

    torch's own allocator of locked memory rounds every size up to a power of two. This one takes whole pages, since a
    page shared by two tensors cannot be locked twice.
    """
    num_bytes = numel * dtype.itemsize
    rounded = -(-num_bytes // PAGE) * PAGE
    memory = torch.empty(rounded + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    pages = memory[start : start + rounded]
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(pages.data_ptr(), rounded, 0))
    if status:
        raise CapabilityError(
            f"CUDA refused to lock {format_bytes(rounded)} of host memory (error {status}); raise the limit of locked "
            "memory (ulimit -l) or give the process more memory"
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, pages.data_ptr()).atexit = False
    return pages[:num_bytes].view(dtype)


class MemoryLedger:
    """Bytes in use in one memory, under a budget or, with None, without one. Not thread-safe."""

    def __init__(self, name: str, budget_bytes: int | None = None) -> None:
        self.name, self.budget_bytes = name, budget_bytes
        self.used_bytes = self.peak_bytes = 0

    def take(self, num_bytes: int, why: str) -> None:
        """Add `num_bytes`, which `why` takes.

        Raises:
            OutOfBudgetError: they would exceed the budget; the ledger is unchanged.
        """
        used = self.used_bytes + num_bytes
        if self.budget_bytes is not None and used > self.budget_bytes:
            raise OutOfBudgetError(
                f"{why} takes {format_bytes(num_bytes)} of the {self.name}, where {format_bytes(self.used_bytes)} of "
                f"{format_bytes(self.budget_bytes)} are in use: {used - self.budget_bytes:,} bytes too many; raise the "
                "budget by as many"
            )
        self.used_bytes, self.peak_bytes = used, max(self.peak_bytes, used)

    def give(self, num_bytes: int) -> None:
        """Release `num_bytes` that were taken."""
        if num_bytes > self.used_bytes:
            raise ValueError(f"{num_bytes} bytes were given back to the {self.name}, which lent {self.used_bytes}")
        self.used_bytes -= num_bytes
