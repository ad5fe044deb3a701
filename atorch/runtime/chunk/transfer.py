"""How bytes get from the host to the compute device: at once, beside computation, or over a link of a given speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

Wait = Callable[[], None]


class Transfer(Protocol):
    """A way to copy."""

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Begin to copy `source` into `target`; the function that comes back waits until computation may read it."""
        ...


class AtOnce:
    """Copies when it is asked to. Where host and device are one memory, nothing is gained by anything else."""

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Copy."""
        target.copy_(source)
        return _nothing


class OnStream:
    """Copies from pinned memory on a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Copy after what is queued now, which may still read what lay in the memory of `target` before."""
        computing = torch.cuda.current_stream(target.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        arrived = self._stream.record_event()
        return lambda: torch.cuda.current_stream(target.device).wait_event(arrived)


class Paced:
    """Copies in a thread, over a link of so many bytes a second: a machine that is not here."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transfer")

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Copy, not sooner than the link could, and after what was started before."""
        copying: Future[None] = self._thread.submit(self._copy, target, source)
        return copying.result

    def _copy(self, target: Tensor, source: Tensor) -> None:
        began = time.perf_counter()
        target.copy_(source)
        left = began + source.nbytes / self._rate - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def transfer_for(device: torch.device) -> Transfer:
    """The way that serves `device` best."""
    return OnStream(device) if device.type == "cuda" else AtOnce()


def _nothing() -> None:
    pass
