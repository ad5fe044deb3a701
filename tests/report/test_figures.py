"""A plan's figures in words."""

import pytest

from atorch.report.figures import (
    CATEGORIES,
    cluster_rows,
    counterfactual,
    headline,
    left_out,
    legend,
    nearest_changes,
    shared_methods,
    shown_estimates,
    slower,
    why_not,
)
from atorch.report.html import columns
from tests.report.answers import answer


@pytest.mark.parametrize(
    ("step_s", "told"),
    [(10.0, "as fast"), (10.001, "as fast"), (11.0, "10.0% slower"), (9.0, "10.0% faster"), (25, "2.5× as slow")],
)
def test_times_are_compared(step_s, told):
    assert slower({"estimate": {"step_s": 10.0}}, {"step_s": step_s}) == told


def test_a_counterfactual_that_cannot_be_has_no_ratio():
    assert counterfactual({"change": "tensor 1", "ratio": None, "reason": "is short"}) == "tensor 1 is short"
    assert (
        counterfactual({"change": "tensor 1", "ratio": 3.0, "reason": "slow"}) == "tensor 1 would be 3× as slow: slow"
    )


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


def test_shared_methods_need_two_strategies():
    assert shared_methods([["a", "b"], ["b", "c"], ["b"]]) == ["b"]
    assert shared_methods([["a"]]) == []


def test_one_node_is_not_counted():
    plan = answer(40)
    plan["cluster"]["num_nodes"] = 1
    assert headline(plan) == "8 × NVIDIA H100 80GB HBM3, 1,024 samples a step"
    assert headline(plan, "job").endswith("a step: job")
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


def test_what_is_left_out_is_counted_by_reason():
    assert left_out([{"why": "slower"}] * 5 + [{"why": "memory"}] * 7) == "12 more: 7 out of memory, 5 slower"
    assert left_out([]) == ""
    assert why_not("hardware") == "not on this hardware"
    assert why_not("slower") == "slower"


def test_the_legend_has_what_does_not_say_itself_what_it_is():
    told = legend(["masters", "gradients", "exposed_comm", "masters"])
    assert told.startswith("masters: ")
    assert "; exposed comm: " in told
    assert told.count("masters") == 1
    assert "gradients" not in told
    assert {"working", "transient", "masters", "traffic"} <= CATEGORIES.keys()
