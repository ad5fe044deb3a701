"""The guide finds nearly the best with a quarter of the runs; what turns with the baseline prove."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from atorch.auto.planner.dry_runs.dry_run_loop import MIN_GAIN
from atorch.auto.planner.dry_runs.step_timing import LONGER, LOOKS, MIN_TURNS, Verdict, in_turns
from atorch.auto.planner.dry_runs.surrogate_model import Surrogate
from atorch.auto.planner.dry_runs.time_budget import DEFAULT_S, DEFAULT_STARTS, DEFAULT_STEPS, RESERVED, TimeBudget
from atorch.auto.planner.plan import Estimate, Scored
from atorch.auto.planner.ranking import simplest
from atorch.auto.strategy import Strategy

SIZES = (4, 3, 2, 2, 2)  # settings by slot
FREE = np.zeros(1)  # starts that cost nothing


def scored(methods, step_s):
    # A tuple of names stands for a strategy: the guide only asks what methods are in it.
    return Scored(tuple(methods), Estimate(step_s=step_s, peak_bytes=0.0, memory={}))


def made_up(seed, wrong_by, together):
    """Candidates in estimated order with their true seconds.

    Methods act by factors, which the estimate misses by `wrong_by` (of the logarithm), the machine's speed by any.
    Pairs of methods add `together`.
    """
    rng = np.random.default_rng(seed)
    slots = [[f"slot{slot}={setting}" for setting in range(size)] for slot, size in enumerate(SIZES)]
    effect = {name: rng.normal(0, 0.3) for slot in slots for name in slot[1:]}
    guess = {name: value + rng.normal(0, wrong_by) for name, value in effect.items()}
    pair = {each: rng.normal(0, together) for each in itertools.combinations(effect, 2)}
    machine, found = rng.normal(0, 1), []
    for combination in itertools.product(*slots):
        methods = [name for name, slot in zip(combination, slots, strict=True) if name != slot[0]]
        pairs = sum(pair[each] for each in itertools.combinations(methods, 2))
        truth = math.exp(sum(effect[name] for name in methods) + pairs + rng.normal(0, 0.02))
        found.append((scored(methods, math.exp(machine + sum(guess[name] for name in methods))), truth))
    return sorted(found, key=lambda item: item[0].estimate.step_s), rng


def regret(seed, wrong_by, together):
    """What a search with 3 % noise loses, its finalists compared within 0.5 %; and the runs it took."""
    space, rng = made_up(seed, wrong_by, together)
    truth = [seconds for _, seconds in space]
    guide, measured = Surrogate([candidate for candidate, _ in space], device_type="cpu"), {}
    while len(measured) < len(space) // 4:
        index = int(guide.expected(FREE).argmin())
        if index in measured:
            gains = guide.gains(index, FREE)
            index = int(gains.argmax())
            if gains[index] < MIN_GAIN:
                break
        measured[index] = truth[index] * math.exp(rng.normal(0, 0.03))
        guide.observe(index, measured[index])
    near = [i for i in measured if measured[i] <= min(measured.values()) * 1.35]
    chosen = min(near, key=lambda i: truth[i] * math.exp(rng.normal(0, 0.005)))
    return truth[chosen] / min(truth) - 1, len(measured)


@pytest.mark.parametrize(("wrong_by", "together"), [(0.25, 0.07), (0.25, 0.15)])
def test_regret_is_small_with_a_quarter_of_the_runs(wrong_by, together):
    regrets, runs = zip(*(regret(seed, wrong_by, together) for seed in range(10)), strict=True)
    assert statistics.median(regrets) <= 0.01
    assert max(regrets) <= 0.10
    assert statistics.mean(runs) <= math.prod(SIZES) / 5


def of(*candidates, **more):
    return Surrogate([scored(each, 1.0) for each in candidates], **more)


def test_what_promises_most_by_the_estimate_and_the_start_comes_first():
    guide = Surrogate([scored(["a"], 2.0), scored([], 1.0), scored(["b"], 3.0)])
    assert int(guide.expected(FREE).argmin()) == 1
    assert int(guide.gains(1, FREE).argmax()) == 0
    assert guide.gains(1, FREE)[1] == 0, "on itself"

    guide = Surrogate([scored(["a"], 1.0), scored(["b"], 1.1)])
    assert int(guide.expected(np.array([0.05, 0.01])).argmin()) == 0
    assert int(guide.expected(np.array([0.20, 0.01])).argmin()) == 1, "it starts so much sooner"
    free, dear = (guide.gains(0, np.array([0.01, each]))[1] for each in (0.01, 0.2))
    assert free > 2 * dear

    # One that is expected to take three times as long tells nothing that is worth knowing.
    guide = Surrogate([scored(["a"], 1.0), scored([], 3.0)])
    assert guide.gains(0, FREE)[1] < 0.001
    assert guide.gains(1, FREE)[0] > 0.5


def test_what_is_learnt_of_one_is_learnt_of_what_is_alike():
    guide = of([], ["a"], ["a", "b"], ["b"], device_type="cpu")
    guide.observe(0, 2.0)
    guide.observe(1, 1.0)
    mean, deviation = guide.predictions
    assert mean[2] < mean[3] - 0.3  # `a` halved the time of one, so it is expected to halve the other's
    assert deviation[0] < 0.1 < deviation[3]
    assert guide.gains(1, FREE)[0] == guide.gains(1, FREE)[1] == 0  # what was measured need not be again

    def one(methods, **seconds):
        return Scored(tuple(methods), Estimate(step_s=1.0, peak_bytes=0.0, memory={}, time=seconds))

    guide = Surrogate([one(["a"], matmul=1.0), one(["b"], offload=1.0), one(["c"], offload=0.9, matmul=0.1)])
    guide.observe(0, 1.0)
    guide.observe(1, 2.0)
    mean, _ = guide.predictions
    assert mean[2] > 0.3

    near, far = (of(["a"], ["b"], ["c"], ["d"]) for _ in range(2))
    for index, seconds in enumerate((1.0, 1.5, 0.7)):
        near.observe(index, 1.0)
        far.observe(index, seconds)
    assert far.predictions[1][3] > 2 * near.predictions[1][3]


def test_failures_are_explained_and_what_hardly_runs_is_tried_where_it_is_worth_it():
    guide = of(["m"], ["m", "a"], ["m", "b"], ["m", "a", "b"], ["m", "a", "c"], ["m", "d"])
    sure = guide.runs[5]
    guide.observe_failure(1)
    assert guide.runs[4] < 0.7 * sure, "`a` is suspect"
    assert guide.runs[5] > 0.95 * sure, "what all have is not"
    guide.observe_failure(3)
    assert guide.runs[4] < 0.2 * sure
    assert guide.runs[2] > 0.8 * sure, "`b` is explained away"
    guide.observe(4, 1.0)
    assert guide.runs[4] == 1.0

    same, other = (of(["a", "b"], ["a", "c"], ["a"], ["d"]) for _ in range(2))
    for guide, second in ((same, "no kernel"), (other, "no library")):
        guide.observe_failure(0, "no kernel")
        guide.observe_failure(1, second)
    assert same.runs[2] < 0.01 < other.runs[2], "one reason has one cause"

    def one(methods, needed):
        return Scored(tuple(methods), Estimate(step_s=1.0, peak_bytes=needed, memory={}))

    guide = Surrogate([one(["a"], 60.0), one(["a", "b"], 20.0), one(["a", "c"], 65.0)], memory_bytes=100.0)
    before = guide.runs
    guide.observe_failure(0, of_memory=True)
    after = guide.runs
    assert after[1] > 0.9 * before[1]
    assert after[2] < 0.5 * before[2]

    guide, attempt = of(["a"], ["a", "b"], ["c"]), np.full(3, 0.05)
    guide.observe_failure(0)
    assert guide.expected(attempt)[1] > guide.expected(attempt)[2]
    fifth = guide.expected(attempt)[2] + math.log(1.2)
    assert guide.expected(attempt)[1] < fifth, "it is, rather than what takes a fifth longer"


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
