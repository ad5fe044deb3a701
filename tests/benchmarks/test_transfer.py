"""Constants from a small model on few devices, tried on a large one on many."""

import pytest

from atorch.cost import step_seconds
from benchmarks.published.evaluate import Case
from benchmarks.published.table import MEASURED, Row
from benchmarks.published.transfer import transfer
from tests.benchmarks.test_rows import RUN

SMALL = {"model": "little", "n_gpus": "8", "pp": "1"}
LARGE = {"model": "big", "layers": "32", "hidden": "4096", "n_gpus": "128", "pp": "2", "global_batch": "256"}


def rows(*kinds):
    """Runs of each kind that differ in how they are split, and took as long as is estimated of them."""
    given = [
        {**RUN, **kind, "dp": "", "tp": tp, "micro_batch": micro, "row_id": f"{kind['model']}-{tp}-{micro}"}
        for kind in kinds
        for tp in ("1", "2", "4")
        for micro in ("1", "2")
    ]
    return [timed(each) for each in given]


def timed(given):
    case = Case.of(Row(given, dict.fromkeys(MEASURED, "") | {"step_time_s": "1.0"}))
    return Row(given, case.row.measured | {"step_time_s": str(step_seconds(case.cost, case.cluster))})


def test_a_table_with_both_says_what_the_large_runs_lose():
    found = transfer(rows(SMALL, LARGE))
    assert (found.small_model, found.large_model, found.fitted_on, found.ordered) == ("little", "big", 5, 6)
    assert found.loss == pytest.approx(found.by_large - found.by_small)
    assert min(found.by_small, found.by_large, found.among_small) > 0.9  # what made them is what is fitted


@pytest.mark.parametrize("kinds", [(SMALL,), (SMALL, {**LARGE, "n_gpus": "64"}), (LARGE, {**SMALL, "n_gpus": "16"})])
def test_a_table_without_either_says_nothing(kinds):
    assert transfer(rows(*kinds)) is None
