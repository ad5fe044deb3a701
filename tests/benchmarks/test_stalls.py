"""Runs that lost time for no reason that is told of them, by pairs and by columns."""

import pytest

from benchmarks.published.stalls import stalled
from tests.benchmarks.test_rows import row


def runs(*given):
    return [row(row_id=f"{i}", **each) for i, each in enumerate(given)]


@pytest.mark.parametrize(
    ("sizes", "seconds", "slow"),
    [
        (("1", "2"), (1.0, 1.9), set()),  # half as many that take up to twice as long, filling apart
        (("1", "2"), (1.0, 3.1), {"1"}),
        (("1", "2"), (3.1, 1.0), {"0"}),
        (("1", "4"), (1.0, 5.9), set()),
        (("1", "4"), (1.0, 6.1), {"1"}),
        (("2", "2"), (1.0, 1.6), {"1"}),
        (("2", ""), (1.0, 9.0), set()),
    ],
)
def test_of_a_pair_that_differs_in_its_micro_batch_neither_takes_much_longer(sizes, seconds, slow):
    rows = runs(*({"micro_batch": size} for size in sizes))
    assert set(stalled(rows, {"0": seconds[0], "1": seconds[1]})) == slow


def test_runs_that_differ_in_anything_else_are_no_pair():
    assert set(stalled(runs({"zero": "0"}, {"zero": "1"}), {"0": 1.0, "1": 9.0})) == {"1"}
    assert not stalled(runs({"tp": "1"}, {"tp": "2"}), {"0": 1.0, "1": 9.0})
    assert not stalled(runs({}, {}), {"0": 1.0})  # of one nothing was timed


def test_pipelines_of_nanotron_over_many_nodes_are_known_to_stall():
    rows = runs(
        {"framework": "nanotron", "n_gpus": "512"}, {"framework": "nanotron", "n_gpus": "256"},
        {"framework": "nanotron", "n_gpus": "512", "pp": "1"}, {"framework": "nanotron", "n_gpus": "64", "tp": "32"},
        {"framework": "Megatron-LM", "n_gpus": "512"},
    )  # fmt: skip
    assert set(stalled(rows, {each.row_id: 1.0 for each in rows})) == {"0", "3"}
