"""Peak memory of a piece of code, relative to the memory in use before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PeakMemory:
    """Measures peaks relative to its creation: allocated bytes on CUDA, resident bytes of the process on CPU.

    Resident bytes are full pages, including memory that the allocator keeps after a peak. Freed memory is returned to
    the system first if the C library can do so (glibc), since its reuse would be invisible.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = "allocated" if device.type == "cuda" else "resident set growth"
        if device.type == "cpu":
            _give_back()
        self._before = self._now()
        self.peak_bytes = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the peak inside; on CUDA the allocator has recorded it since creation."""
        if self._device.type == "cuda":
            yield
            self._see(float(torch.cuda.max_memory_allocated(self._device)))
            return
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.002):
                self._see(self._now())

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        try:
            yield
        finally:
            self._see(self._now())
            done.set()
            sampler.join()

    def _see(self, num_bytes: float) -> None:
        self.peak_bytes = max(self.peak_bytes, num_bytes - self._before)

    def _now(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.memory_allocated(self._device))
        import psutil

        return float(psutil.Process().memory_info().rss)


def _give_back() -> None:
    """Let the C library return freed memory to the operating system, if it can."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
