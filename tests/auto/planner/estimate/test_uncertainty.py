"""What is chosen among what the estimate cannot tell apart, how likely it is wrong, and what would tell."""

import math
from statistics import NormalDist

import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.planner.estimate.candidate_table import CATEGORIES, CandidateTable, preferred
from atorch.auto.planner.estimate.uncertainty import CLEAR, EstimateUncertainty, _saved, _saved_by_kind
from atorch.auto.strategy import METHODS
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Memory, ModelProfile, plain_cost
from atorch.cost.uncertainty import KINDS, OWN

SAME = dict.fromkeys(KINDS, 0.0) | {"products": 1.0, "common": 1.0}
ON_HOST = SAME | {"products": 0.5, "host": 0.5}
_normal = NormalDist()
PLANS = [(METHODS["checkpoint"](),), (METHODS["compile"](),), (METHODS["checkpoint"](), METHODS["compile"]())]


def judged(*plans):
    """(seconds, shares) of plans, the first two equally simple."""
    columns = CandidateTable(1.0, math.inf)
    profile = ModelProfile(segments=(), num_params=1, num_trainable=1, param_bytes=4, trainable_bytes=4, batch_size=1)
    doubt = EstimateUncertainty(plain_cost(profile), ClusterSpec.load("8xH100-80GB"))
    for methods, (seconds, shares) in zip(PLANS, plans, strict=False):
        columns.add(methods, seconds, Memory(**dict.fromkeys(CATEGORIES, 0.0)))
        doubt._shares[methods] = tuple(shares.values())
    return doubt, columns


def test_what_the_estimate_tells_apart_is_chosen_by_it():
    doubt, columns = judged((10.0, SAME), (10.1, SAME))
    assert doubt.chosen(columns) == preferred(columns) == 0
    assert doubt.note(columns, 0) is None
    assert doubt.chance(columns, 1, 0) == pytest.approx(0.5 - 0.04, abs=0.01)  # 1 % of sqrt(2) · OWN
    assert doubt.ties(columns, 0) == [1]

    doubt, columns = judged((10.0, ON_HOST), (10.9, SAME))
    assert doubt.chosen(columns) == 0

    doubt, columns = judged((10.0, SAME), (10.0 * math.exp(3 * OWN), SAME))
    assert doubt.chance(columns, 1, 0) < CLEAR
    assert doubt.ties(columns, 0) == []


def test_a_plan_that_is_as_fast_and_better_known_is_chosen_and_that_is_said():
    doubt, columns = judged((10.0, ON_HOST), (10.05, SAME))
    assert preferred(columns) == 0
    assert doubt.chosen(columns) == 1
    note = doubt.note(columns, 1)
    assert "by the estimate alone checkpoint" in note
    assert "0.5% slower" not in note
    assert "known less well (host memory, 50 % and 0 % of a step)" in note


def test_the_run_and_the_kind_of_work_that_would_decide_are_named():
    doubt, columns = judged((10.0, SAME), (10.2, ON_HOST))
    run, kind = doubt.decisive(columns, 0)
    assert run.strategy.methods == PLANS[1]
    assert kind.kind == "host"
    assert run.saves > kind.saves > 0
    doubt, columns = judged((10.0, SAME), (11.5, SAME))
    assert doubt.decisive(columns, 0) == ()


@pytest.mark.parametrize(("slower", "spread"), [(0.0, 0.1), (0.05, 0.1), (-0.05, 0.1), (0.1, 0.02)])
def test_what_knowing_saves_is_expected_over_what_may_be_found(slower, spread):
    numbers = [(number + 0.5) / 4000 for number in range(4000)]
    drawn = [max(0.0, -(slower + spread * z)) for z in map(_normal.inv_cdf, numbers)]
    by_hand = sum(drawn) / len(drawn) - max(0.0, -slower)
    assert _saved(slower, spread) == pytest.approx(by_hand, abs=1e-4)
    assert _saved_by_kind([slower], [spread]) == pytest.approx(by_hand, abs=2e-3)
