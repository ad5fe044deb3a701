"""The timeline of a pipeline: a simulated clock over the order of passes on each process.

A forward pass of a stage takes one tick, a backward pass two: one each for gradients of inputs and of weights if these
are separate. Sending takes none. A pass starts when its process is free and its inputs are there: activations of the
previous stage, gradients of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from atorch.errors import StrategyError

PassId = tuple[str, int, int]
"""(kind, stage, micro-batch); the kinds are those of `TICKS`."""
TICKS: Mapping[str, int] = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
"""The ticks of a pass. `input` and `weight` are a backward pass in two parts."""


@dataclass(frozen=True, slots=True)
class TimedPass:
    kind: str
    stage: int
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The passes of each process, in order."""

    processes: Sequence[Sequence[TimedPass]]

    @property
    def num_ticks(self) -> int:
        """Ticks from the start of the first pass to the end of the last one."""
        return max(timed.end for placed in self.processes for timed in placed)

    @property
    def bubble(self) -> float:
        """The share of the processes' time in which they wait."""
        busy = sum(timed.end - timed.start for placed in self.processes for timed in placed)
        return 1.0 - busy / (self.num_ticks * len(self.processes))

    def stages(self, process: int) -> list[int]:
        """The stages that a process holds, in the order of the model."""
        return sorted({timed.stage for timed in self.processes[process]})

    def most_held(self, process: int) -> float:
        """The most micro-batches whose activations a process holds at once, as a mean over its stages."""
        placed = self.processes[process]
        begun = [(timed.start, 1) for timed in placed if timed.kind == "forward"]
        done = [(timed.end, -1) for timed in placed if timed.kind in ("backward", "weight")]
        held = most = 0
        for _, change in sorted(begun + done):
            held += change
            most = max(most, held)
        return most / len(self.stages(process))


def timeline(order: Sequence[Sequence[PassId]]) -> Timeline:
    """The timeline in which each process runs its passes in its order, as early as possible.

    Raises:
        StrategyError: the orders of the processes deadlock.
    """
    last = max(stage for passes in order for _, stage, _ in passes)
    ends: dict[PassId, int] = {}
    placed: list[list[TimedPass]] = [[] for _ in order]
    moved = True
    while moved:
        moved = False
        for done, passes in zip(placed, order, strict=True):
            for kind, stage, micro_batch in passes[len(done) :]:
                ready = [_end(ends, kinds, at, micro_batch) for kinds, at in _needed(kind, stage, last)]
                if None in ready:
                    break
                start = max([0, *(end for end in ready if end is not None), *(timed.end for timed in done[-1:])])
                done.append(TimedPass(kind, stage, micro_batch, start, start + TICKS[kind]))
                ends[kind, stage, micro_batch] = start + TICKS[kind]
                moved = True
    for process, (done, passes) in enumerate(zip(placed, order, strict=True)):
        if len(done) < len(passes):
            kind, stage, micro_batch = passes[len(done)]
            raise StrategyError(
                f"process {process} waits for ever to do {kind} of micro-batch {micro_batch} on stage {stage}; order "
                "every pass after those that it needs"
            )
    return Timeline(placed)


def _needed(kind: str, stage: int, last: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """(kinds, stage) of the passes that a pass of the same micro-batch needs; only one of the kinds exists."""
    if kind == "forward" and stage > 0:
        yield ("forward",), stage - 1
    if kind in ("backward", "input"):
        yield ("forward",), stage
        if stage < last:
            yield ("backward", "input"), stage + 1
    if kind == "weight":
        yield ("input",), stage


def _end(ends: Mapping[PassId, int], kinds: Sequence[str], stage: int, micro_batch: int) -> int | None:
    return next((ends[kind, stage, micro_batch] for kind in kinds if (kind, stage, micro_batch) in ends), None)


def expected_bubble(schedule: str, processes: int, micro_batches: int, pieces: int = 1) -> float:
    """The share of the processes' time in which they wait, by formula.

    To fill and drain a pipeline of p processes takes (p - 1) / pieces micro-batches, with `pieces` stages a process
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). It takes a third of p - 1 if weight gradients fill the gaps
    (Qi et al. 2023, arXiv 2401.10241, section 2, for passes of equal length).
    """
    waited = (processes - 1) / (3 if schedule == "zero_bubble" else pieces)
    return waited / (micro_batches + waited)
