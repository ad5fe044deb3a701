"""The rule of thumb and the short formula, by hand."""

import pytest

from benchmarks.published.evaluate import Case, results_of
from benchmarks.published.metrics import in_order
from benchmarks.published.rules import rule_of_thumb, short_formula
from benchmarks.published.table import MEASURED, Row
from tests.benchmarks.test_rows import RUN


def pairs(*given):
    rows = [
        Row({**RUN, "row_id": f"{place}", **each}, dict.fromkeys(MEASURED, "") | {"step_time_s": "1.0"})
        for place, each in enumerate(given)
    ]
    cases = [Case.of(row) for row in rows]
    return list(zip(cases, results_of(cases, rows), strict=True))


def test_the_smallest_split_comes_first_and_equal_ones_together():
    found = rule_of_thumb(pairs({"tp": "4", "dp": ""}, {"dp": ""}, {"tp": "1", "pp": "4", "dp": ""}))
    assert [[each.row_id for each in tied] for tied in in_order(found)] == [["1", "2"], ["0"]]


def test_the_formula_is_six_flops_a_parameter_and_token():
    ((case, result),) = pairs({"tp": "1", "pp": "1", "dp": "", "ckpt": "none", "zero": "1"})
    (found,) = short_formula([(case, result)])
    num_params = sum(each.count * each.num_params for each in case.cost.segments)
    tokens = 64 * 4096
    assert found.estimated_s == pytest.approx(6 * num_params * tokens / (16 * 0.4 * 989.4e12))
    assert found.estimated_bytes == pytest.approx(num_params * (6 + 12 / 16) + 16 * 34 * 2 * 4096 * 2048)
    ((case, result),) = pairs({"tp": "2", "pp": "2", "ckpt": "full", "zero": "1"})
    (split,) = short_formula([(case, result)])
    assert split.estimated_s == pytest.approx(found.estimated_s * 4 / 3 * (1 + 1 / 8))
    held = num_params * (6 + 12 / 4) / 4 + 2 * 8 * 2 * 2 * 4096 * 2048
    assert split.estimated_bytes == pytest.approx(held)
