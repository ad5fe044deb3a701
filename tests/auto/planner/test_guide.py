"""The guide finds nearly the best of spaces whose truth is known, with a quarter of the runs."""

import itertools
import math
import statistics

import numpy as np
import pytest

from atorch.auto.planner.estimate import Scored
from atorch.auto.planner.explore import MIN_GAIN, NEAR
from atorch.auto.planner.guide import Guide
from atorch.auto.planner.plan import Estimate

SIZES = (4, 3, 2, 2, 2)  # settings by slot


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
    guide, measured = Guide([candidate for candidate, _ in space]), {}
    while len(measured) < len(space) // 4:
        gains = guide.gains()
        index = int(gains.argmax())
        if measured and gains[index] < MIN_GAIN:
            break
        measured[index] = truth[index] * math.exp(rng.normal(0, 0.03))
        guide.tell(index, measured[index])
    near = [i for i in measured if measured[i] <= min(measured.values()) * (1 + NEAR)]
    chosen = min(near, key=lambda i: truth[i] * math.exp(rng.normal(0, 0.005)))
    return truth[chosen] / min(truth) - 1, len(measured)


@pytest.mark.parametrize(("wrong_by", "together"), [(0.25, 0.07), (0.5, 0.07), (0.25, 0.15)])
def test_regret_is_small_with_a_quarter_of_the_runs(wrong_by, together):
    regrets, runs = zip(*(regret(seed, wrong_by, together) for seed in range(24)), strict=True)
    assert statistics.median(regrets) <= 0.01
    assert max(regrets) <= 0.10
    assert statistics.mean(runs) <= math.prod(SIZES) / 5


def test_the_estimated_best_comes_first():
    guide = Guide([scored(["a"], 2.0), scored([], 1.0), scored(["b"], 3.0)])
    assert int(guide.gains().argmax()) == 1


def test_a_measurement_moves_what_is_alike():
    guide = Guide([scored([], 1.0), scored(["a"], 1.0), scored(["a", "b"], 1.0), scored(["b"], 1.0)])
    guide.tell(0, 2.0)
    guide.tell(1, 1.0)
    mean, deviation = guide.predictions()
    assert mean[2] < mean[3] - 0.3  # `a` halved the time of one, so it is expected to halve the other's
    assert deviation[0] < 0.05 < deviation[3]
    assert guide.gains()[0] == guide.gains()[1] == 0  # what was measured need not be again


def test_what_alone_can_be_the_reason_is_convicted():
    guide = Guide([scored(each, 1.0) for each in (["m"], ["m", "a"], ["m", "b"], ["m", "a", "b"], ["m", "a", "c"])])
    guide.tell_failed(1)
    assert guide.convicted() == []
    assert guide.gains()[4] == guide.gains()[0] / 2  # `a` is suspect
    guide.tell_failed(3)
    assert guide.convicted() == []  # once it might have been `b`
    guide.tell(2, 1.0)
    assert guide.convicted() == ["'a'"]  # `m` and `b` ran
