"""Schedules: replayed moment by moment, against brute force over everything a device could hold, against the bound."""

from __future__ import annotations

import cProfile
import itertools
import math
import pstats
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atorch.runtime.chunk.transfer_schedule import (
    ScheduleStep,
    Shortfall,
    StepRuns,
    TransferSchedule,
    choose_pinned,
    schedule,
    transfer_cost,
)


@dataclass(frozen=True)
class Given:
    """What is to be scheduled."""

    moments: list[ScheduleStep]
    chunk_bytes: list[int]
    budget: int
    prefetch: int = 0
    pinned: frozenset[int] = frozenset()

    def scheduled(self) -> TransferSchedule | Shortfall:
        return schedule(self.moments, self.chunk_bytes, self.budget, pinned=self.pinned, prefetch=self.prefetch)

    def size(self, chunks: frozenset[int]) -> int:
        return sum(self.chunk_bytes[chunk] for chunk in chunks)

    def least(self) -> int | None:
        """The least that can be fetched, by trying all that could be held at each moment; None: nothing fits."""
        fetched = {self.pinned: 0}
        for moment in self.moments:
            after: dict[frozenset[int], int] = {}
            for here, so_far in fetched.items():
                total = so_far + self.size(moment.needs - here)
                for kept in subsets(here - moment.needs - self.pinned):
                    held = self.pinned | moment.needs | kept
                    if self.size(held) + moment.other_bytes <= self.budget:
                        after[held] = min(total, after.get(held, total))
            fetched = after
        return min(fetched.values(), default=None)


def subsets(chunks: frozenset[int]) -> Iterator[frozenset[int]]:
    for count in range(len(chunks) + 1):
        yield from map(frozenset, itertools.combinations(chunks, count))


@dataclass
class Replayed:
    """What happens on a device that follows a schedule; refuses what the device cannot do."""

    fetched: int = 0
    peak: int = 0
    most_early: int = 0  # transfers under way for later, at once
    held: frozenset[int] = frozenset()

    @classmethod
    def of(cls, case: Given, found: TransferSchedule) -> Replayed:
        self = cls(held=case.pinned)
        early: frozenset[int] = frozenset()
        for moment, step in zip(case.moments, found.steps, strict=True):
            assert self.held.issuperset(step.evict)
            self.held -= frozenset(step.evict)
            coming = (*step.fetch, *step.prefetch)
            assert self.held.isdisjoint(coming)
            assert len(set(coming)) == len(coming)
            assert moment.needs.issuperset(step.fetch)
            assert moment.needs.isdisjoint(step.prefetch)
            self.held |= frozenset(coming)
            self.fetched += case.size(frozenset(coming))
            assert self.held >= moment.needs
            early = (early | frozenset(step.prefetch)) - moment.needs
            self.most_early = max(self.most_early, len(early))
            self.peak = max(self.peak, case.size(self.held) + moment.other_bytes)
        return self


@st.composite
def cases(draw: st.DrawFn, sizes: st.SearchStrategy[int] | None = None, most_chunks: int = 5) -> Given:
    """Budgets from a little too small to a little more than enough; sizes all the same where none are given."""
    count = draw(st.integers(1, most_chunks))
    needs = st.frozensets(st.integers(0, count - 1), max_size=2)
    moments = draw(st.lists(st.builds(ScheduleStep, st.just("op"), needs, st.integers(0, 3)), max_size=14))
    each = st.just(draw(st.integers(1, 3))) if sizes is None else sizes
    chunk_bytes = draw(st.lists(each, min_size=count, max_size=count))
    largest = max((sum(chunk_bytes[chunk] for chunk in moment.needs) for moment in moments), default=0)
    budget = draw(st.integers(max(0, largest - 1), max(largest, sum(chunk_bytes) // 2) + 4))
    return Given(moments, chunk_bytes, budget, draw(st.integers(0, 4)))


ANY_SIZE = st.integers(0, 5)


def cost(found: TransferSchedule, chunk_bytes: list[int], transfer_bytes: int) -> int:
    """Bytes that travel, again those that are waited for, and `transfer_bytes` per transfer."""
    waited = sum(chunk_bytes[chunk] for step in found.steps for chunk in step.fetch)
    return found.fetched_bytes + waited + transfer_bytes * found.num_fetches


@settings(max_examples=300)
@given(cases(ANY_SIZE), st.integers(0, 5))
def test_whenever_anything_fits_a_device_can_follow_it_and_it_is_known_beforehand(case, transfer_bytes):
    found = case.scheduled()
    assert isinstance(found, TransferSchedule) == (case.least() is not None)
    runs = StepRuns.of([moment.needs for moment in case.moments], [moment.other_bytes for moment in case.moments])
    told = transfer_cost(runs, case.chunk_bytes, case.budget, transfer_bytes, prefetch=case.prefetch)
    # Moments that need the same, taken together, are one, the tightest of them.
    together = [ScheduleStep("op", needs, most) for needs, most in zip(runs.needs, runs.most_bytes, strict=True)]
    fewer = replace(case, moments=together).scheduled()
    assert type(fewer) is type(found)
    if isinstance(found, Shortfall):
        needed = case.size(found.moment.needs) + found.moment.other_bytes
        assert found.missing_bytes == fewer.missing_bytes == needed - case.budget
        assert isinstance(replace(case, budget=needed).scheduled(), TransferSchedule)
        assert isinstance(replace(case, budget=needed - 1).scheduled(), Shortfall)
        assert told is None
        return
    replayed = Replayed.of(case, found)
    assert replayed.peak <= case.budget
    assert replayed.most_early <= case.prefetch
    assert (replayed.fetched, replayed.peak) == (found.fetched_bytes, found.peak_bytes)
    assert told == cost(found, case.chunk_bytes, transfer_bytes)
    assert found.fetched_bytes == fewer.fetched_bytes
    plain = replace(case, prefetch=0).scheduled()  # prefetching changes when, and not what
    assert (found.fetched_bytes, found.num_fetches) == (plain.fetched_bytes, plain.num_fetches)
    assert [step.evict for step in found.steps] == [step.evict for step in plain.steps]
    assert not any(step.prefetch for step in plain.steps)


@given(cases())
def test_fetches_least_where_chunks_are_equally_large(case):
    found = case.scheduled()
    assert (found.fetched_bytes if isinstance(found, TransferSchedule) else None) == case.least()


@given(cases(ANY_SIZE))
def test_no_fetch_could_start_earlier(case):
    """With as many under way as one likes, each starts as soon as the budget lets it."""
    case = replace(case, prefetch=len(case.moments) * 2)
    found = case.scheduled()
    assume(isinstance(found, TransferSchedule))
    held: list[frozenset[int]] = []
    on: frozenset[int] = frozenset()
    for step in found.steps:
        on = (on - frozenset(step.evict)) | {*step.fetch, *step.prefetch}
        held.append(on)
    for now, step in enumerate(found.steps[1:], start=1):
        for chunk in (*step.fetch, *step.prefetch):
            before = case.moments[now - 1]
            assert case.size(held[now - 1] | {chunk}) + before.other_bytes > case.budget


@given(cases(ANY_SIZE), st.data())
def test_pinned_chunks_stay_and_take_room(case, data):
    pinned = data.draw(st.frozensets(st.integers(0, len(case.chunk_bytes) - 1)))
    case = replace(case, pinned=pinned)
    found = case.scheduled()
    others = [moment._replace(needs=moment.needs - pinned) for moment in case.moments]
    rest = schedule(others, case.chunk_bytes, case.budget - case.size(pinned), prefetch=case.prefetch)
    if isinstance(found, TransferSchedule):
        assert isinstance(rest, TransferSchedule)
        assert found.steps == rest.steps
    else:
        assert isinstance(rest, Shortfall)
        assert found.missing_bytes == rest.missing_bytes


def there_and_back(count: int, other_bytes: int = 0) -> list[ScheduleStep]:
    """Forward and backward of `count` blocks, a chunk each."""
    order = [*range(count), *reversed(range(count))]
    return [ScheduleStep(f"block {chunk}", frozenset({chunk}), other_bytes) for chunk in order]


def test_what_had_to_go_may_have_room_after_all():
    """Chunks 1 and 2, needed last, go at the first peak; at the second chunk 0 has to, which makes room for 2."""
    needs, others = [{0}, {1}, {2}, set(), set(), {0}, {1}, {2}], [0, 0, 0, 3, 5, 0, 0, 0]
    moments = [ScheduleStep("op", frozenset(each), other) for each, other in zip(needs, others, strict=True)]
    assert schedule(moments, [4, 1, 2], 7, prefetch=0).fetched_bytes == 4 + 1 + 2 + 4 + 1


STATES = 6  # bytes of states and gradients for each of a parameter


def traffic(case: Given, pinned: frozenset[int]) -> int | None:
    """Bytes of parameters that come and of gradients that go; None: it does not fit."""
    left = replace(case, pinned=pinned, budget=case.budget - STATES * case.size(pinned)).scheduled()
    if isinstance(left, Shortfall):
        return None
    return left.fetched_bytes + case.size(frozenset(range(len(case.chunk_bytes))) - pinned)


@given(cases(ANY_SIZE), st.integers(0, 120))
def test_pinning_fits_and_pays(case, more):
    case = replace(case, budget=case.budget + more)
    pinned = choose_pinned(case.moments, case.chunk_bytes, [STATES * size for size in case.chunk_bytes], case.budget)
    without = traffic(case, frozenset())
    if without is None:
        assert not pinned
    else:
        with_them = traffic(case, pinned)
        assert with_them is not None
        assert with_them <= without


@pytest.mark.parametrize("room", [1, 4, 8, 10, 20, 31, 47, 70])
def test_pins_the_best_number_of_equal_blocks(room):
    case = Given(there_and_back(10), [4] * 10, 4 * room)
    pinned = choose_pinned(case.moments, case.chunk_bytes, [STATES * 4] * 10, case.budget)
    every = [
        traffic(case, frozenset(chosen)) for count in range(11) for chosen in itertools.combinations(range(10), count)
    ]
    assert traffic(case, pinned) == min(found for found in every if found is not None)


@pytest.mark.parametrize("room", [8, 10, 20, 31, 47])
def test_pins_as_many_as_fit_where_the_host_has_no_room(room):
    case = Given(there_and_back(10), [4] * 10, 4 * room)
    states = [STATES * 4] * 10
    pinned = choose_pinned(case.moments, case.chunk_bytes, states, case.budget, fills_device=True)
    fewest = choose_pinned(case.moments, case.chunk_bytes, states, case.budget)
    assert traffic(case, pinned) is not None
    assert pinned >= fewest
    assert all(traffic(case, pinned | {chunk}) is None for chunk in set(range(10)) - pinned)


def test_what_saves_most_for_its_bytes_is_pinned_first_and_all_that_is_never_trained() -> None:
    moments = [ScheduleStep("0", frozenset({0}), 0), ScheduleStep("1", frozenset({1}), 0)]
    assert choose_pinned(moments, [1, 1], [9, 1], 4) == frozenset({1})
    assert choose_pinned(there_and_back(3), [4] * 3, [0, 0, 0], 12) == frozenset({0, 1, 2})


def test_of_shared_chunks_shares_are_kept_and_chunks_are_gathered_all_the_same():
    moments, sizes, states = there_and_back(4), [4] * 4, [3] * 4
    assert choose_pinned(moments, sizes, states, 4 + 12, is_shared=True) == frozenset(range(4)), "beside one chunk"
    assert len(choose_pinned(moments, sizes, states, 4 + 7, is_shared=True)) == 2
    assert choose_pinned(moments, sizes, states, 3, is_shared=True) == frozenset(), "not one chunk fits"


@pytest.mark.parametrize("share", [0.001, 0.3])
@pytest.mark.parametrize("is_even", [True, False])
def test_work_grows_no_faster_than_n_log_n(share: float, is_even: bool) -> None:
    def calls(num: int) -> float:
        drawn = random.Random(0)
        sizes = [100 if is_even else drawn.randint(10, 300) for _ in range(num)]
        there_and_back = [*range(num), *reversed(range(num))]
        moments = [ScheduleStep("", frozenset((chunk,)), 5 * chunk) for chunk in there_and_back]
        budget = int(share * sum(sizes)) + 5 * num + 300
        with cProfile.Profile() as profile:
            schedule(moments, sizes, budget)
            choose_pinned(moments, sizes, [3 * size for size in sizes], budget)
        return pstats.Stats(profile).total_calls / (num * math.log2(num))

    assert calls(1000) <= 1.3 * calls(125)
