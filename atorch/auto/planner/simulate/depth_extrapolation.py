"""Extrapolates a simulation of few equal blocks to the full depth of the model.

The live bytes at one moment of a step, such as the gradient's arrival at the second block, are linear in the number of
blocks. The peak is not, because its moment moves with depth. So every moment is extrapolated, and the maximum is taken
afterwards. The first and last block of a run have other neighbours, and prefetching or late freeing reaches one block
further. So two blocks at each end are extrapolated from 3 repeats and 4, the fewest that contain them; the blocks in
between are interpolated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atorch.profiler.memory_tracker import ACTIVATIONS, MemorySample

SHORT, LONG = 3, 4

Sent = Mapping[tuple[str, tuple[str, ...]], tuple[float, float]]  # (kind, axes) → (calls, bytes)


@dataclass(frozen=True)
class Observed:
    """Bytes live and sent in one step."""

    moments: tuple[MemorySample, ...]
    sent: Sent
    sent_each: Sent = field(default_factory=dict)
    """Bytes sent from the start of the last but one forward pass to that of the last."""

    def with_more(self, micro_batches: int) -> Observed:
        """The step with that many more micro-batches, each of which sends as much as was sent between the last starts.

        torch's PipelineStage keeps a receive buffer for every micro-batch from the first step on.
        """
        sent, received = dict(self.sent), 0.0
        for key, (calls, size) in self.sent_each.items():
            calls_before, bytes_before = sent[key]
            sent[key] = calls_before + micro_batches * calls, bytes_before + micro_batches * size
            received += micro_batches * size if key == ("receive", ("pipeline",)) else 0.0
        moments = tuple(
            replace(moment, memory={**moment.memory, ACTIVATIONS: moment.memory.get(ACTIVATIONS, 0.0) + received})
            for moment in self.moments
        )
        return replace(self, moments=moments, sent=sent)


class UnlikeError(Exception):
    """The moments of two depths do not correspond, so that they cannot be extrapolated."""


def extend(short: Observed, long: Observed, repeats: int) -> Observed:
    """The step of a model of `repeats` blocks, extrapolated from observations with SHORT and with LONG blocks.

    Raises:
        UnlikeError: the two have different moments, or send different kinds of messages.
    """
    steps = repeats - LONG
    moments: list[MemorySample] = []
    for few, many in zip(*map(_same_runs, (short, long), (long, short)), strict=True):
        if few[0].index is None:
            moments.append(MemorySample(few[0].name, None, _line(few[0].memory, many[0].memory, steps)))
        elif (len(few), len(many)) == (SHORT, LONG):
            moments += _run(few, many, repeats)
        else:
            raise UnlikeError(f"{few[0].name} has {len(few)} moments in {SHORT} blocks and {len(many)} in {LONG}")
    if short.sent.keys() != long.sent.keys():
        raise UnlikeError(f"messages are {sorted(short.sent)} in {SHORT} blocks and {sorted(long.sent)} in {LONG}")
    sent = {
        key: (calls + (calls - short.sent[key][0]) * steps, size + (size - short.sent[key][1]) * steps)
        for key, (calls, size) in long.sent.items()
    }
    return Observed(tuple(moments), sent)


def _same_runs(seen: Observed, other: Observed) -> list[list[MemorySample]]:
    """Runs of consecutive moments with one name over the blocks; a moment outside of blocks is a run of its own."""
    runs, others = _runs(seen), _runs(other)
    if [run[0].name for run in runs] != [run[0].name for run in others]:
        raise UnlikeError(f"a step goes through {len(runs)} kinds of moments at one depth and {len(others)} at another")
    return runs


def _runs(seen: Observed) -> list[list[MemorySample]]:
    keyed = itertools.groupby(
        enumerate(seen.moments), lambda pair: (pair[1].name, None if pair[1].index is not None else pair[0])
    )
    return [[moment for _, moment in group] for _, group in keyed]


def _run(few: Sequence[MemorySample], many: Sequence[MemorySample], repeats: int) -> list[MemorySample]:
    """The moments of all blocks, in the order of the step."""
    ends = {place: _line(few[place].memory, many[place].memory, repeats - LONG) for place in (0, 1, -2, -1)}
    memories = [ends[0], ends[1]]
    for place in range(2, repeats - 2):
        memories.append(_line(ends[1], ends[-2], (place - 1) / (repeats - 3) - 1))
    memories += [ends[-2], ends[-1]]
    rises = few[0].index == 0
    indices = range(repeats) if rises else range(repeats - 1, -1, -1)
    return [MemorySample(few[0].name, index, memory) for index, memory in zip(indices, memories, strict=True)]


def _line(one: Mapping[str, float], two: Mapping[str, float], steps: float) -> dict[str, float]:
    """`two + steps * (two - one)`, by category."""
    return {
        name: two.get(name, 0.0) + (two.get(name, 0.0) - one.get(name, 0.0)) * steps
        for name in dict.fromkeys((*one, *two))
    }
