"""When each process of a pipeline computes what: a simulated clock over the order in which each has its passes done.

A forward pass of a stage takes one tick, backward two, of which the gradients of inputs and of weights take one each
where they are apart; sending takes none. A pass starts when its process is free and what it needs is there: activations
of the stage before, gradients of the stage after.
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
        return max(each.end for placed in self.processes for each in placed)

    @property
    def bubble(self) -> float:
        """The share of the processes' time in which they wait."""
        busy = sum(each.end - each.start for placed in self.processes for each in placed)
        return 1.0 - busy / (self.num_ticks * len(self.processes))

    def stages(self, process: int) -> list[int]:
        """The stages that a process has, in the order of the model."""
        return sorted({each.stage for each in self.processes[process]})

    def most_held(self, process: int) -> float:
        """The most micro-batches whose activations a process holds at once, counted in all of its stages."""
        placed = self.processes[process]
        begun = [(each.start, 1) for each in placed if each.kind == "forward"]
        done = [(each.end, -1) for each in placed if each.kind in ("backward", "weight")]
        held = most = 0
        for _, change in sorted(begun + done):
            held += change
            most = max(most, held)
        return most / len(self.stages(process))


def timeline(order: Sequence[Sequence[PassId]]) -> Timeline:
    """The earliest that each process can do its passes in its order.

    Raises:
        StrategyError: processes wait for one another for ever.
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
                start = max([0, *(end for end in ready if end is not None), *(each.end for each in done[-1:])])
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
    """(kinds, stage) of the passes of the same micro-batch that one needs; of the kinds, whichever there is."""
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
    """The share of the processes' time in which formulas have them wait.

    To fill and drain a pipeline of p processes takes p - 1 micro-batches, of pieces where each process has several
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), and a third of that where gradients of weights fill the gaps
    (Qi et al. 2023, arXiv 2401.10241, section 2, for passes of equal length).
    """
    waited = (processes - 1) / (3 if schedule == "zero_bubble" else pieces)
    return waited / (micro_batches + waited)
