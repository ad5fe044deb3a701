"""Tables as files, runs in them that lost time for no reason, and sources held out one at a time."""

import random

import pytest

from atorch.cost import step_seconds
from atorch.errors import ArgumentError
from benchmarks.published.evaluate import Case, by_data_sheet, evaluate, results_of
from benchmarks.published.fit import with_constants
from benchmarks.published.leave_out import by_source, leave_one_out
from benchmarks.published.metrics import in_order
from benchmarks.published.rules import rule_of_thumb, short_formula
from benchmarks.published.stalls import stalled
from benchmarks.published.table import GIVEN, MEASURED, Row, read_rows
from benchmarks.published.transfer import transfer
from tests.benchmarks.test_rows import RUN, row


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


def runs(publisher, slower=1.0, **given):
    """Six runs that take as long as is estimated of devices whose products are so much slower."""
    found = []
    for place, (tp, micro) in enumerate((tp, micro) for tp in ("1", "2", "4") for micro in ("1", "2")):
        row = Row(
            {**RUN, "pp": "1", "n_gpus": "8", "dp": "", "tp": tp, "micro_batch": micro, **given}
            | {"row_id": f"{publisher}-{place}"},
            dict.fromkeys(MEASURED, ""),
            publisher,
        )
        case = by_data_sheet(Case.of(row))
        seconds = step_seconds(case.cost, with_constants(case.cluster, {"device.efficiency.matmul": 1 / slower}))
        found.append(Row(row.given, row.measured | {"step_time_s": str(seconds)}, publisher))
    return found


def errors(source):
    return [result.time_error for _, result in source]


def test_constants_come_from_other_sources_of_the_device_alone():
    found = leave_one_out({"a": runs("a", 1.3), "b": runs("b", 1.3), "c": runs("c", 1.3, hardware="A100-80GB")})
    assert max(map(abs, errors(found["a"]))) < 0.12  # nearly as slow as b's
    assert min(errors(found["c"])) < -0.1  # nobody else has the device: as fast as any
    alone = leave_one_out({"a": runs("a", 1.3)})
    assert errors(alone["a"])[0] < -0.1  # not even its own runs are known

    near, far = (runs(name, 1.3, n_gpus="16", hardware=text) for name, text in (("a", "H100"), ("b", "H100 (EFA)")))
    for name, rows in (("a", near), ("b", far)):
        ((case, _), *_) = leave_one_out({"a": near, "b": far})[name]
        assert case.cluster.inter_node == Case.of(rows[0]).cluster.inter_node

    assert {name: len(rows) for name, rows in by_source([*runs("a"), *runs("b"), *runs("a")]).items()} == {
        "a": 12,
        "b": 6,
    }


def test_what_was_read_off_runs_of_a_framework_is_not_known_of_a_held_out_source():
    given = {"framework": "nanotron", "n_gpus": "512", "pp": "2", "zero": "0", "global_batch": "4096"}
    ((case, result), *_) = leave_one_out({"a": runs("a", **given)})["a"]
    assert case.cost.extra_s == case.cost.hop_wait_s == 0
    assert Case.of(case.row).cost.extra_s == 0
    assert result.time_error < -0.1  # it was made with the wait
    assert Case.of(runs("a", **given)[0]).cost.extra_s == pytest.approx(0.26 * 2 * 16, rel=1.0)
