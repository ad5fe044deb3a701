"""Copies between host and compute device: at once, or beside computation."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from atorch.errors import CapabilityError
from atorch.units import format_bytes

Wait = Callable[[], None]

PAGE = mmap.PAGESIZE
MOST_SUMS = 2  # gradients that wait in locked memory to be added to others


class Transfer(Protocol):
    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Begin to copy `source` into `target`; the function that comes back waits until computation may read it."""
        ...

    def ahead(self, target: Tensor, source: Tensor) -> AbstractContextManager[None]:
        """Copy `source` into `target` before what is queued inside, and computation waits for neither."""
        ...

    def keep(self, target: Tensor, source: Tensor, add: bool) -> Wait | None:
        """Begin to copy `source` into `target` on the host, or to add it there.

        The function that comes back waits until computation may write where `source` lies; None: it may.
        """
        ...

    def kept(self) -> Wait:
        """A function that waits, on any thread, until the host has what it was to keep up to now."""
        ...

    def settle(self) -> None:
        """Wait until the host has all that it was to keep."""
        ...


def put(target: Tensor, source: Tensor, add: bool) -> None:
    target.add_(source.to(target)) if add else target.copy_(source)


class AtOnce:
    """Copies when it is asked to. Where host and device are one memory, nothing is gained by anything else."""

    def start(self, target: Tensor, source: Tensor) -> Wait:
        target.copy_(source)
        return nothing

    def ahead(self, target: Tensor, source: Tensor) -> AbstractContextManager[None]:
        target.copy_(source)
        return nullcontext()

    def keep(self, target: Tensor, source: Tensor, add: bool) -> None:
        put(target, source, add)

    def kept(self) -> Wait:
        return nothing

    def settle(self) -> None:
        """Nothing is under way."""


class OnStream:
    """Copies between pinned and device memory on CUDA streams, one for each direction. A thread adds on the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._adding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adding")
        self._sums: list[Future[None]] = []

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Copy after what is queued now, which may still read what lay in the memory of `target` before."""
        computing = torch.cuda.current_stream(target.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        arrived = self._stream.record_event()
        return lambda: torch.cuda.current_stream(target.device).wait_event(arrived)

    @contextmanager
    def ahead(self, target: Tensor, source: Tensor) -> Iterator[None]:
        """Copy as `start` does; what is queued inside, a collective on a stream of its own, comes after the copy."""
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            yield

    def keep(self, target: Tensor, source: Tensor, add: bool) -> Wait:
        """Copy after what is queued now, which computes `source`; of a sum the copy, and then the thread adds it."""
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
            for each in sums:
                each.result()

        return wait

    def settle(self) -> None:
        self._back.synchronize()
        while self._sums:
            self._sums.pop().result()


def transfer_for(device: torch.device) -> Transfer:
    return OnStream(device) if device.type == "cuda" else AtOnce()


def _add_after(copied: torch.cuda.Event, target: Tensor, landing: Tensor) -> None:
    copied.synchronize()
    target.add_(landing)


def nothing() -> None:
    """Wait for what is there."""


def locked(numel: int, dtype: torch.dtype, owner: object) -> Tensor:
    """A tensor on the host that is locked in memory for as long as `owner` lives.

    torch's own allocator of locked memory rounds every size up to a power of two. Whole pages, since a page that two
    tensors share cannot be locked twice.
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
