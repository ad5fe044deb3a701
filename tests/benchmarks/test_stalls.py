"""Runs that lost time for no reason that is told of them, by measured runs that are alike."""

import pytest

from benchmarks.published.stalls import stalled
from tests.benchmarks.test_rows import row


def slow(seconds, *given):
    """Places of the runs that stalled; of 16 devices, in two stages, in micro-batches of 2 of 64."""
    rows = [row(row_id=f"{place}", **each) for place, each in enumerate(given)]
    return set(stalled(rows, {f"{place}": each for place, each in enumerate(seconds)}))


@pytest.mark.parametrize(
    ("sizes", "seconds", "found"),
    [
        (("2", "4"), (1.0, 1.6), set()),  # 4 micro-batches for 8, and one to fill: 2 × 5/9 × 1.5
        (("2", "4"), (1.0, 2.9), set()),  # fewer micro-batches share out what ends a step, so that all counts: 2 × 1.5
        (("2", "4"), (1.0, 3.1), {"1"}),
        (("4", "2"), (1.0, 2.6), set()),  # 9/5 × 1.5
        (("4", "2"), (1.0, 2.8), {"1"}),
        (("2", "2"), (1.0, 1.4), set()),
        (("2", "2"), (1.0, 1.6), {"1"}),
        (("2", ""), (1.0, 9.0), set()),
    ],
)
def test_of_micro_batches_of_other_sizes(sizes, seconds, found):
    assert slow(seconds, *({"micro_batch": size} for size in sizes)) == found


def test_micro_batches_replicas_and_stages_take_no_longer_than_by_their_number():
    given = {"global_batch": "32"}, {"micro_batch": "4"}  # 4 and 4 of them
    assert not slow((1.0, 2.9), *given)
    assert slow((1.0, 3.1), *given) == {"1"}

    given = {}, {"n_gpus": "8", "dp": "2", "global_batch": "64"}  # 8 and 16 micro-batches
    assert not slow((9.0, 25.0), *given)
    assert slow((9.0, 26.0), *given) == {"1"}
    assert not slow((50.0, 17.0), *given), "twice the replicas may send for twice as long"
    assert slow((52.0, 17.0), *given) == {"0"}

    given = {"pp": "1", "dp": "8"}, {"pp": "4", "dp": "2"}  # 4 and 16 micro-batches, of which 3 more fill the pipeline
    longest = 1.5 * 19 / 4 * 0.412  # 4 of 16 blocks, one more, and a head as large as 3.9 of them, of 19.9
    assert not slow((1.0, 0.97 * longest), *given)
    assert slow((1.0, 1.3 * longest), *given) == {"1"}
    assert not slow((9.0, 1.0), *given), "a shorter one may be slower: it reduces more gradients"


def test_runs_that_differ_in_anything_else_are_not_alike():
    assert slow((1.0, 9.0), {"zero": "0"}, {"zero": "1"}) == {"1"}
    assert not slow((1.0, 9.0), {"tp": "1", "dp": "8"}, {"tp": "2"})
    assert not slow((1.0,), {}, {}), "of one nothing was timed"
    assert not slow((1.0, 9.0), {"layers": ""}, {"layers": ""}), "a model that is not known"
