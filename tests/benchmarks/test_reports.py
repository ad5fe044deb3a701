"""Public reports that nothing was fitted to, and what the planner says of them."""

import pytest

from benchmarks.reports import answer_of, reports


def test_every_report_has_a_source_and_an_answer():
    rows = reports()
    assert len({row["name"] for row in rows}) == len(rows) >= 20
    assert all(row["source"] and ("words" in row) != ("values" in row) for row in rows)
    assert not {row["metric"] for row in rows if "gib" in row} - {"allocated", "reserved", "driver"}
    assert sum(not row["fits"] for row in rows) >= 10


def test_an_answer_is_beside_what_was_measured():
    (row,) = (row for row in reports() if row["name"] == "Qwen 7B, LoRA, A100, 8,192 tokens")
    answer = answer_of(row)
    assert answer.is_right
    assert answer.in_band
    assert answer.time == pytest.approx(1, abs=0.1)
    assert not answer_of({**row, "fits": False}).is_right
    assert answer_of({**row, "options": f"{row['options']} --seq 0"}).refused


@pytest.mark.slow
def test_nearly_every_report_is_told_right_whether_it_fits():
    answers = [answer_of(row) for row in reports()]
    assert not [answer.refused for answer in answers if answer.refused]
    assert sum(answer.is_right for answer in answers) >= 0.95 * len(answers)
