"""Records memory use and locations of chunks while a model trains.

    from atorch.patrickstar.profiler import profiler

    profiler.start()
    ...                       # make an engine, train
    profiler.end()
    profiler.save("profile.json")

Engines report all events to the `Profiler`. It always tracks the locations of chunks, and records events only between
`start` and `end`. `atorch visualize profile.json` draws a saved profile, versioned JSON under any name. A *moment*
counts the engine's operations; times are in seconds since the start. A chunk may be on both tiers at once: its host
copy stays while a copy is on the device.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from atorch.errors import ArgumentError, CheckpointError, shown
from atorch.files import write
from atorch.files.strict_json import Format, read_json
from atorch.logs import logger

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = Format("profile", CheckpointError, max_bytes=2**26, max_depth=4, max_values=2**24)
MemoryTier = Literal["GPU", "CPU"]
"""GPU is the computing device, of any type, and CPU the host's memory."""


class PhaseEvent(NamedTuple):
    """The start of a phase: `forward`, `backward`, `optimizer`, or another."""

    moment: int
    time_s: float
    name: str


class MemoryEvent(NamedTuple):
    """Bytes in use on a tier at a moment, in all and by chunks."""

    moment: int
    time_s: float
    tier: MemoryTier
    total_bytes: int
    chunk_bytes: int


class ChunkEvent(NamedTuple):
    """A change of a tier's bytes of a chunk to `num_bytes`; 0 if it was dropped."""

    moment: int
    time_s: float
    kind: str
    chunk: int
    tier: MemoryTier
    num_bytes: int


class TierInterval(NamedTuple):
    """A chunk on a tier, from start to end in seconds."""

    chunk: int
    start_s: float
    end_s: float
    tier: MemoryTier


class PhaseSpan(NamedTuple):
    """A phase, from start to end in seconds."""

    name: str
    start_s: float
    end_s: float


class Profile(BaseModel):
    """A profile: its events in order of time."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal["atorch profile"] = "atorch profile"
    version: Literal[1] = 1
    device: str = ""
    budget_bytes: int | None = None
    end_s: float = 0.0
    phases: tuple[PhaseEvent, ...] = ()
    memory: tuple[MemoryEvent, ...] = ()
    chunks: tuple[ChunkEvent, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Self:
        """The profile in a file.

        Raises:
            CheckpointError: the file cannot be read, or is not a profile.
        """
        origin = "give a file that atorch.patrickstar's profiler.save wrote"
        try:
            return cls.model_validate(read_json(path, FORMAT))
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {origin} (PatrickStar's own are pickles, which are not read)") from None
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"])) or "the file"
            raise CheckpointError(
                f"{str(path)!r} is no profile: {place} is {shown(fault['input'], 40)}: {fault['msg']}; {origin}"
            ) from None

    def save(self, path: Path) -> None:
        """Write the profile to a file.

        Raises:
            CheckpointError: the file cannot be written.
        """
        text = self.model_dump_json() + "\n"
        if len(text) > FORMAT.max_bytes:
            raise CheckpointError(
                f"the profile has {len(text):,} bytes, and one that can be read again has {FORMAT.max_bytes:,} at "
                "most; profile fewer steps"
            )
        write(path, text, FORMAT)

    def from_first_phase(self) -> Profile:
        """The profile with times since its first phase; earlier chunk events move to time 0."""
        begin = self.phases[0].time_s if self.phases else 0.0
        return self.model_copy(
            update={
                "end_s": self.end_s - begin,
                "phases": tuple(phase._replace(time_s=phase.time_s - begin) for phase in self.phases),
                "memory": tuple(
                    event._replace(time_s=event.time_s - begin) for event in self.memory if event.time_s >= begin
                ),
                "chunks": tuple(event._replace(time_s=max(0.0, event.time_s - begin)) for event in self.chunks),
            }
        )

    def spans(self) -> list[PhaseSpan]:
        ends = [*(phase.time_s for phase in self.phases[1:]), self.end_s]
        return [PhaseSpan(phase.name, phase.time_s, end) for phase, end in zip(self.phases, ends, strict=False)]

    def kinds(self) -> set[str]:
        return {event.kind for event in self.chunks}

    def stays(self, kind: str) -> Iterator[TierInterval]:
        """The stays of a kind's chunks: on the device while it has a copy, else on the host while it has one."""
        held: dict[int, dict[MemoryTier, int]] = defaultdict(dict)
        since: dict[int, tuple[MemoryTier, float]] = {}
        for event in self.chunks:
            if event.kind != kind:
                continue
            held[event.chunk][event.tier] = event.num_bytes
            current = _nearest(held[event.chunk])
            tier, start = since.get(event.chunk, (None, 0.0))
            if current != tier:
                if tier is not None and event.time_s > start:
                    yield TierInterval(event.chunk, start, event.time_s, tier)
                since.pop(event.chunk, None)
                if current is not None:
                    since[event.chunk] = current, event.time_s
        for chunk, (tier, start) in since.items():
            yield TierInterval(chunk, start, self.end_s, tier)


def _nearest(held: dict[MemoryTier, int]) -> MemoryTier | None:
    if held.get("GPU"):
        return "GPU"
    return "CPU" if held.get("CPU") else None


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
            device=self.device, budget_bytes=self.budget_bytes, end_s=self._end_s, phases=tuple(self._phases),
            memory=tuple(self._memory), chunks=tuple(self._chunks),
        )  # fmt: skip

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
