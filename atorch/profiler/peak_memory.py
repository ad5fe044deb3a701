"""The most memory that something takes, over what was taken before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PeakMemory:
    """Measures peaks against the moment it was made: allocated bytes on CUDA, resident bytes of the process on CPU.

    Resident bytes are what the operating system sees: whole pages, and what the allocator keeps after a peak. What it
    kept of earlier owners is given back first where the C library can (glibc), or it would be used again unseen.
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
        """Keep the most that is seen inside; on CUDA the allocator has kept it since this was made."""
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
    """Let the C library return freed memory to the operating system, where it has a way to."""
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
