"""Tables as files: columns in any order and case, and none that must be there but what names a run's shape."""

import random

import pytest

from atorch.errors import ArgumentError
from benchmarks.published.evaluate import evaluate
from benchmarks.published.table import GIVEN, MEASURED, Row, read_rows
from tests.benchmarks.test_rows import RUN

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
