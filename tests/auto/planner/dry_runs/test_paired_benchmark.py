"""What turns with the baseline prove, and in which order compositions come."""

import random

import pytest

from atorch.auto.planner.dry_runs.step_timing import LONGER, LOOKS, MIN_TURNS, Verdict, in_turns
from atorch.auto.planner.dry_runs.time_budget import DEFAULT_S, DEFAULT_STARTS, DEFAULT_STEPS, RESERVED, TimeBudget
from atorch.auto.planner.plan import Estimate, Scored
from atorch.auto.planner.ranking import simplest
from atorch.auto.strategy import Strategy


def noisy(middle, noise, seed, turns=20):
    draw = random.Random(seed)
    return [middle * (1 + noise * draw.uniform(-1, 1)) for _ in range(turns)]


@pytest.mark.parametrize("seed", range(5))
def test_only_what_exceeds_the_noise_is_faster(seed):
    baseline = noisy(1.0, 0.02, seed)
    assert Verdict.of(noisy(0.9, 0.02, seed + 99), baseline).is_faster
    assert not Verdict.of(noisy(0.995, 0.02, seed + 99), baseline).is_faster
    assert not Verdict.of(noisy(1.1, 0.02, seed + 99), baseline).is_faster
    wild = noisy(0.97, 0.6, seed + 99, MIN_TURNS)
    assert not Verdict.of(wild, noisy(1.0, 0.6, seed, MIN_TURNS)).is_faster


class Steps:
    """A trial whose steps take what it is told; None fails."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    def step(self):
        return self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


def test_turns_end_for_what_is_slower_or_fails_and_are_more_where_there_is_noise():
    failed = []
    times = in_turns({0: Steps(1.0), 1: Steps(2.0, 2.0, 2.0, None), 2: Steps(3.0)}, 5, lambda s: True, failed.append)
    assert failed == [1]
    assert {index: len(each) for index, each in times.items()} == {0: 5, 2: 5}
    left = iter([True] * 4 + [False])
    times = in_turns({0: Steps(1.0), 1: Steps(2.0)}, 5, lambda s: next(left), failed.append)
    assert {index: len(each) for index, each in times.items()} == {0: 2, 1: 2}

    def steps(middle, seed):
        return Steps(*noisy(middle, 0.02, seed, 60))

    trials = {0: steps(1.0, 0), 1: steps(0.7, 1), 2: steps(0.701, 2), 3: steps(0.9, 3)}
    times = in_turns(trials, 40, lambda s: True, lambda index: None, baseline=0)
    assert {index: len(each) for index, each in times.items()} == {0: 40, 1: 40, 2: 40, 3: LOOKS[0]}
    times = in_turns({0: steps(0.7, 0), 1: steps(1.0, 1)}, 40, lambda s: True, lambda index: None, baseline=0)
    assert {len(each) for each in times.values()} == {LOOKS[0]}, "nothing is left that could be taken"

    def turns(noise):
        trials = {0: Steps(*noisy(1.0, noise, 0, 100)), 1: Steps(*noisy(0.95, noise, 1, 100))}
        return {len(each) for each in in_turns(trials, 10, lambda s: True, lambda index: None, baseline=0).values()}

    assert turns(0.02) == {10}
    assert turns(0.9) == {10 * LONGER}


def test_the_default_limit_grows_with_what_is_chosen_and_a_given_one_does_not():
    now = [100.0]
    clock = TimeBudget(None, now=lambda: now[0])
    now[0] += 10
    assert clock.left == pytest.approx(DEFAULT_S * (1 - RESERVED) - 10)
    clock.expects(step_s=100.0, start_s=1.0)
    assert clock.left == pytest.approx(DEFAULT_STEPS * 100 * (1 - RESERVED) - 10)
    clock.expects(step_s=1.0, start_s=100.0)
    assert clock.left == pytest.approx(DEFAULT_STARTS * 100 * (1 - RESERVED) - 10)
    given = TimeBudget(3.0, now=lambda: now[0])
    given.expects(100.0, 100.0)
    now[0] += 4
    assert given.left < 0


def order(*strategies, **arguments):
    found = [
        Scored(Strategy.of(methods), Estimate(step_s=step_s, peak_bytes=peak, memory={}))
        for methods, step_s, peak in strategies
    ]
    return simplest(found, **arguments)


MESH, SPLIT = ("parallel_mode", [("data", 2)]), ("parallel_mode", [("tensor", 2)])
BF16 = ("amp_native", "bf16")


def test_the_simplest_is_ddp_or_what_is_given():
    found = order(
        ([MESH, "fsdp", "compile"], 0.5, 1), ([MESH, "fsdp"], 0.8, 2), ([MESH, "ddp", BF16], 0.6, 3),
        ([MESH, "ddp"], 1.0, 4), ([SPLIT, "tensor_parallel"], 0.4, 1),
    )  # fmt: skip
    assert found == [3, 1, 4, 0, 2]

    given = Strategy.of(["checkpoint"])
    assert order(([("checkpoint", {"selective": True})], 0.5, 1), (["checkpoint"], 1.0, 1), requested=given)[0] == 1
