"""A link between host and device with a given speed, for machines without one."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from atorch.runtime.chunk.transfer import Transfer, Wait, put


class Paced(Transfer):
    """Copies in threads over a simulated link with a fixed number of bytes a second in each direction."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._there, self._back = (ThreadPoolExecutor(max_workers=1, thread_name_prefix=to) for to in ("there", "back"))
        self._kept: list[Future[None]] = []

    def start(self, target: Tensor, source: Tensor) -> Wait:
        """Copy after all earlier copies, no faster than the link."""
        copying: Future[None] = self._there.submit(self._copy, target, source)
        return copying.result

    def keep(self, target: Tensor, source: Tensor, add: bool) -> Wait:
        """Copy or add, no faster than the link."""
        self._kept.append(self._back.submit(self._copy, target, source, add))
        return self._kept[-1].result

    def kept(self) -> Wait:
        """A function that waits for all `keep` calls up to now."""
        until_now = list(self._kept)

        def wait() -> None:
            for copying in until_now:
                copying.result()

        return wait

    def settle(self) -> None:
        """Wait for all `keep` calls."""
        while self._kept:
            self._kept.pop().result()

    @torch.no_grad()
    def _copy(self, target: Tensor, source: Tensor, add: bool = False) -> None:
        began = time.perf_counter()
        put(target, source, add)
        left = began + source.nbytes / self._rate - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def close(self) -> None:
        """End the threads."""
        self._there.shutdown()
        self._back.shutdown()
