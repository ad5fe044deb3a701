"""Records memory use and locations of chunks while a model trains.

    from atorch.patrickstar.profiler import profiler

    profiler.start()
    ...                       # make an engine, train
    profiler.end()
    profiler.save("profile.json")

Engines report all events to the `Profiler`. It always tracks the locations of chunks, and records events only between
`start` and `end`. `atorch visualize profile.json` draws a saved profile.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from atorch.errors import ArgumentError
from atorch.logs import logger
from atorch.patrickstar.profile import ChunkEvent, MemoryEvent, MemoryTier, PhaseEvent, Profile


class Profiler:
    """A recording: `start`, `end`, `save`. Engines call the other methods."""

    def __init__(self) -> None:
        self.is_running = False
        self.device = ""
        self.budget_bytes: int | None = None
        self._held: dict[tuple[str, int, MemoryTier], int] = {}
        self._chunk_bytes: Counter[MemoryTier] = Counter()
        self._end_s: float | None = None
        self._clear()

    def start(self) -> None:
        """Begin a recording with the current locations of chunks; an earlier recording is dropped.

        Raises:
            ArgumentError: a recording is running.
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
            ArgumentError: no recording is running.
        """
        if not self.is_running:
            raise ArgumentError("profiler.end was called without profiler.start before it")
        self._end_s, self.is_running = self._now(), False

    def save(self, path: str | Path) -> None:
        """Write the recording as JSON, under any file name.

        Raises:
            ArgumentError: no recording has ended.
            CheckpointError: the file cannot be written.
        """
        self.recorded().save(Path(path))

    def recorded(self) -> Profile:
        """The last recording.

        Raises:
            ArgumentError: no recording has ended.
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
        """Record an engine's device and its budget there; its chunks replace those of an earlier engine."""
        for kind, chunk, tier in list(self._held):
            self.holds(kind, chunk, tier, 0)
        self.device, self.budget_bytes = device, budget_bytes

    def phase(self, name: str) -> None:
        """Record that a phase begins, which ends the previous one."""
        if self.is_running:
            self._phases.append(PhaseEvent(self._moment, self._now(), name))

    def holds(self, kind: str, chunk: int, tier: MemoryTier, num_bytes: int) -> None:
        """Record that a tier holds `num_bytes` of a chunk from now on; 0 if it was dropped."""
        place = (kind, chunk, tier)
        self._chunk_bytes[tier] += num_bytes - self._held.pop(place, 0)
        if num_bytes:
            self._held[place] = num_bytes
        if self.is_running:
            self._chunks.append(ChunkEvent(self._moment, self._now(), kind, chunk, tier, num_bytes))

    def moment(self, device_bytes: int) -> None:
        """Record that an operation begins, with `device_bytes` in use on the device."""
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
