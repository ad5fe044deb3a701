"""A plan's figures in words."""

import pytest

from atorch.report.figures import (
    headline,
    nearest_changes,
    shown_estimates,
    slower,
)
from tests.report.answers import answer


@pytest.mark.parametrize(
    ("step_s", "told"),
    [(10.0, "as fast"), (10.001, "as fast"), (11.0, "10.0% slower"), (9.0, "10.0% faster"), (25, "2.5× as slow")],
)
def test_times_are_compared(step_s, told):
    assert slower({"estimate": {"step_s": 10.0}}, {"step_s": step_s}) == told


def test_every_strategy_is_shown_once():
    shown = shown_estimates(answer(400), 20)
    strategies = [tuple(each["strategy"]) for _, each in shown]
    assert len(set(strategies)) == len(strategies)
    assert sorted(why for why, _ in shown[:5]) == ["chosen", "next", "next", "tie", "tie"]


def test_the_choice_is_shown_however_few_are():
    plan = answer(400)
    plan["estimate"]["step_s"] = 1e3
    assert [why for why, _ in shown_estimates(plan, 1)] == ["chosen"]
    assert [why for why, _ in shown_estimates(plan, 3)] == ["tie", "tie", "chosen"]


def test_of_one_axis_or_method_one_change_is_told():
    told = [
        {"change": "tensor 2", "what": "tensor", "ratio": 1.1},
        {"change": "tensor 4", "what": "tensor", "ratio": 1.2},
        {"change": "activations offloaded", "what": "offload", "ratio": 1.0001},
        {"change": "optimizer offloaded", "what": "offload", "ratio": 1.3},
    ]
    assert [each["change"] for each in nearest_changes(told)] == ["tensor 2", "optimizer offloaded"]


def test_one_node_is_not_counted():
    plan = answer(40)
    plan["cluster"]["num_nodes"] = 1
    assert headline(plan) == "8 × NVIDIA H100 80GB HBM3, 1,024 samples a step"
    assert headline(plan, "job").endswith("a step: job")
    assert headline({}) == ""
