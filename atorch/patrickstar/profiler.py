"""Records which memory is whose, and where chunks are, while a model trains.

    from atorch.patrickstar.profiler import profiler

    profiler.start()
    ...                       # make an engine, train
    profiler.end()
    profiler.save("profile.json")

Engines tell their `Profiler` of everything; it keeps where chunks are, and the rest only between `start` and `end`.
`atorch visualize profile.json` draws what was saved.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.patrickstar.profile import ChunkEvent, MemoryEvent, MemoryTier, PhaseEvent, Profile


class Profiler:
    """A recording: `start`, `end`, `save`. The other methods are for engines."""

    def __init__(self) -> None:
        self.is_running = False
        self.device = ""
        self.budget_bytes: int | None = None
        self._held: dict[tuple[str, int, MemoryTier], int] = {}
        self._chunk_bytes: Counter[MemoryTier] = Counter()
        self._end_s: float | None = None
        self._clear()

    def start(self) -> None:
        """Begin a recording, with where the chunks are now; one that was there before is dropped.

        Raises:
            ArgumentError: one is under way.
        """
        if self.is_running:
            raise ArgumentError("profiler.start was called while the profiler runs; call profiler.end first")
        self._clear()
        self.is_running = True
        for (kind, chunk, tier), num_bytes in self._held.items():
            self._chunks.append(ChunkEvent(0, 0.0, kind, chunk, tier, num_bytes))

    def end(self) -> None:
        """End the recording.

        Raises:
            ArgumentError: none is under way.
        """
        if not self.is_running:
            raise ArgumentError("profiler.end was called without profiler.start before it")
        self._end_s, self.is_running = self._now(), False

    def save(self, path: str | Path) -> None:
        """Write the recording as JSON, whatever the file is called.

        Raises:
            ArgumentError: there is none that has ended.
            CheckpointError: the file cannot be written.
        """
        self.recorded().save(Path(path))

    def recorded(self) -> Profile:
        """The recording that has ended.

        Raises:
            ArgumentError: there is none.
        """
        if self._end_s is None:
            raise ArgumentError("there is no profile yet; call profiler.start, train, and profiler.end before")
        if not self._memory:
            logger.warning("the profile is empty: no engine of atorch.patrickstar has worked while it was recorded")
        return Profile(
            device=self.device,
            budget_bytes=self.budget_bytes,
            end_s=self._end_s,
            phases=tuple(self._phases),
            memory=tuple(self._memory),
            chunks=tuple(self._chunks),
        )

    def works_on(self, device: str, budget_bytes: int | None) -> None:
        """An engine computes on `device` and may hold `budget_bytes` there; its chunks replace those of one before."""
        for kind, chunk, tier in list(self._held):
            self.holds(kind, chunk, tier, 0)
        self.device, self.budget_bytes = device, budget_bytes

    def phase(self, name: str) -> None:
        """A phase begins, and the one before ends."""
        if self.is_running:
            self._phases.append(PhaseEvent(self._moment, self._now(), name))

    def holds(self, kind: str, chunk: int, tier: MemoryTier, num_bytes: int) -> None:
        """A tier holds `num_bytes` of a chunk from now on; 0 where it was dropped."""
        place = (kind, chunk, tier)
        self._chunk_bytes[tier] += num_bytes - self._held.pop(place, 0)
        if num_bytes:
            self._held[place] = num_bytes
        if self.is_running:
            self._chunks.append(ChunkEvent(self._moment, self._now(), kind, chunk, tier, num_bytes))

    def moment(self, device_bytes: int) -> None:
        """An operation begins, while the device holds `device_bytes` in all."""
        if not self.is_running:
            return
        import psutil

        self._moment += 1
        now, held = self._now(), self._chunk_bytes
        self._memory.append(MemoryEvent(self._moment, now, "GPU", device_bytes, held["GPU"]))
        host_bytes = psutil.Process().memory_info().rss
        self._memory.append(MemoryEvent(self._moment, now, "CPU", host_bytes, held["CPU"]))

    def _clear(self) -> None:
        self._began = time.perf_counter()
        self._end_s = None
        self._moment = 0
        self._phases: list[PhaseEvent] = []
        self._memory: list[MemoryEvent] = []
        self._chunks: list[ChunkEvent] = []

    def _now(self) -> float:
        return time.perf_counter() - self._began


profiler = Profiler()
