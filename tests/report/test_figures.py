"""A plan's figures in words."""

import pytest

from atorch.report.columns import columns
from atorch.report.figures import cluster_rows, counterfactual, headline, shared_methods, shown_estimates, slower
from tests.report.answers import answer


@pytest.mark.parametrize(
    ("step_s", "told"),
    [(10.0, "as fast"), (10.001, "as fast"), (11.0, "10.0% slower"), (9.0, "10.0% faster"), (25, "2.5× as slow")],
)
def test_times_are_compared(step_s, told):
    assert slower({"estimate": {"step_s": 10.0}}, {"step_s": step_s}) == told


def test_a_counterfactual_that_cannot_be_has_no_ratio():
    assert counterfactual({"change": "tensor 1", "ratio": None, "reason": "short"}) == "tensor 1: short"
    assert (
        counterfactual({"change": "tensor 1", "ratio": 3.0, "reason": "slow"}) == "tensor 1 would be 3× as slow: slow"
    )


def test_every_strategy_is_shown_once():
    shown = list(shown_estimates(answer(400)))
    strategies = [tuple(each["strategy"]) for _, each in shown]
    assert len(set(strategies)) == len(strategies)
    assert [why for why, _ in shown[:4]] == ["chosen", "best today", "near tie", "near tie"]


def test_shared_methods_need_two_strategies():
    assert shared_methods([["a", "b"], ["b", "c"], ["b"]]) == ["b"]
    assert shared_methods([["a"]]) == []


def test_one_node_is_not_counted():
    plan = answer(40)
    plan["cluster"]["num_nodes"] = 1
    assert headline(plan) == "8 × NVIDIA H100 80GB HBM3, 1,024 samples a step"
    assert headline({}) == ""


def test_a_figure_has_the_source_nearest_above_it():
    rows = {place: (value, source) for place, value, source in cluster_rows(answer(40)["cluster"])}
    assert rows["device.memory_gib"] == ("79.1", "total memory that torch reports")
    assert rows["inter_node.latency_s"] == ("1.4e-05", "one port a device")
    assert rows["device.launch_s"] == ("4e-06", "")
    assert not [place for place in rows if place.startswith("sources")]


def test_columns_number_what_repeats():
    plan = {**answer(40), "pareto": []}
    plan["candidates"] = {
        "step_s": [1.23456, 2.0, 3.0],
        "peak_bytes": [1.0, 2.0, 3.0],
        "label": ["a + b", "b", "b + a"],
        "why": ["", "memory", ""],
    }
    found = columns(plan)
    assert found["parts"] == ["a", "b"]
    assert found["labels"] == [[0, 1], [1], [1, 0]]
    assert found["reasons"] == ["", "memory"]
    assert found["why"] == [0, 1, 0]
    assert found["step_s"] == [1.235, 2.0, 3.0]
