"""Goodput is that of simulated runs, and the interval is the best of all."""

import random

import pytest

from atorch.cost.goodput import MTBF_S, RESTART_S, goodput


def simulated(mtbf_s, interval_s, stall_s, lost_s, segments):
    """The share of the time that trains, of `segments` intervals with failures at random."""
    draw, spent = random.Random(0), 0.0
    for _ in range(segments):
        while (lived := draw.expovariate(1 / mtbf_s)) < interval_s + stall_s:
            spent += lived
            while (again := draw.expovariate(1 / mtbf_s)) < lost_s:  # a failure while it restarts
                spent += again
            spent += lost_s
        spent += interval_s + stall_s
    return segments * interval_s / spent


@pytest.mark.parametrize(
    ("mtbf_s", "stall_s", "lag_s", "restart_s"),
    [(1e4, 10, 0, 600), (1e4, 10, 500, 100), (1e3, 60, 30, 300), (1e6, 1, 0, 60)],
)
def test_the_share_is_that_of_simulated_runs(mtbf_s, stall_s, lag_s, restart_s):
    found = goodput(mtbf_s, stall_s=stall_s, lag_s=lag_s, restart_s=restart_s, step_s=1.0)
    share = simulated(mtbf_s, found.interval_s, stall_s, restart_s + lag_s, 20_000)
    assert found.share == pytest.approx(share, rel=0.02)


def test_no_other_interval_is_better():
    for mtbf_s, stall_s in ((1e4, 10), (1e3, 60), (1e6, 1)):
        found = goodput(mtbf_s, stall_s=stall_s, lag_s=0, restart_s=60, step_s=1e-3)
        for factor in (0.3, 0.7, 1.4, 3):
            other = goodput(mtbf_s, stall_s=stall_s, lag_s=0, restart_s=60, step_s=max(1e-3, found.interval_s * factor))
            assert other.share <= found.share * (1 + 1e-4)


def test_a_checkpoint_is_at_most_one_a_step_and_one_at_a_time():
    more = {"mtbf_s": 1e5, "stall_s": 0.0, "restart_s": 60.0}
    assert goodput(**more, lag_s=0, step_s=3).interval_s == 3
    assert goodput(**more, lag_s=100, step_s=3).interval_s == 100
    assert goodput(1.0, stall_s=1e4, lag_s=0, restart_s=60, step_s=1e4).share == 0


def test_llama_3_405b_had_more_than_nine_tenths_of_its_time():
    """arXiv 2407.21783: "higher than 90% effective training time" on 16,384 devices, with up to 4 GB of state each."""
    found = goodput(MTBF_S / 16384, stall_s=1.0, lag_s=60, restart_s=RESTART_S, step_s=10)
    assert pytest.approx(3.1 * 3600, rel=0.01) == MTBF_S / 16384
    assert 0.9 < found.share < 0.95
