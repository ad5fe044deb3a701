"""Tables as files: columns in any order and case, and none that must be there but what names a run's shape."""

import random

import pytest

from atorch.cost import step_seconds
from atorch.errors import ArgumentError
from benchmarks.published.evaluate import Case, evaluate, results_of
from benchmarks.published.metrics import in_order
from benchmarks.published.rules import rule_of_thumb, short_formula
from benchmarks.published.table import GIVEN, MEASURED, Row, read_rows
from benchmarks.published.transfer import transfer
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


TEXTS = (
    "", "none", "nan", "-1", "0", "1e30", "1e9", "abc", "1,024", "8.0", "0.5", "3", "true", "N/A", "inf", "2k", "~7",
    "1/2", "tp8", "[8]", "999999999", "FULL", "fp8 hybrid", "tf32", "int8", "selective", "HSDP", "ZeRO-3", "SDPA", "²",
    "8 experts top-2", "oom", "x" * 50,
)  # fmt: skip


def test_columns_are_found_by_name(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text('\ufeff Model ,N_GPUS,notes\nLlama-3 8B,8,"fast, they say"\nMixtral 8x7B\n', encoding="utf-8")
    rows = read_rows(path)
    assert [(each.row_id, each.text("model"), each.number("n_gpus")) for each in rows] == [
        ("mine-1", "llama-3 8b", 8), ("mine-2", "mixtral 8x7b", None),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n"])
def test_a_file_without_columns_is_refused(tmp_path, text):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="none of the columns"):
        read_rows(path)
    with pytest.raises(ArgumentError, match="is not read"):
        read_rows(tmp_path / "other.csv")


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_row_says_it_is_estimated_or_refused(seed):
    draw = random.Random(seed)
    for _ in range(100):
        given, measured = dict(RUN), dict.fromkeys(MEASURED, "") | {"step_time_s": "1.0", "status": "ok"}
        for column in draw.sample((*GIVEN[1:], *MEASURED), 3):
            (given if column in given else measured)[column] = draw.choice(TEXTS)
        (result,) = evaluate([Row(given, measured)], "none")
        if result.refused:
            assert result.estimated_s is None
        else:
            assert 0 < result.estimated_s < 1e9
            assert 0 < result.estimated_bytes < 1e18
