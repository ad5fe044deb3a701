"""Sources held out one at a time: nothing of a source has a say in what is estimated of it."""

import pytest

from atorch.cost import step_seconds
from benchmarks.published.evaluate import Case, by_data_sheet
from benchmarks.published.fit import with_constants
from benchmarks.published.leave_out import by_source, leave_one_out
from benchmarks.published.table import MEASURED, Row
from tests.benchmarks.test_rows import RUN


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
