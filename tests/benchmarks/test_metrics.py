"""The figures of the accuracy tables against small cases worked by hand."""

import pytest

from benchmarks.published import metrics

CELL = ("framework", "model", "8", "2048")


def run(name, measured=None, estimated=None, **others):
    """A timed run of 100 tokens a step."""
    known = {"cell": CELL, "global_batch": 1.0, "tokens": 100.0, "said_to_fit": True}
    return metrics.Result(row_id=name, measured_s=measured, estimated_s=estimated, **{**known, **others})


def test_ranks_and_quantiles():
    assert metrics.ranks([30.0, 10.0, 20.0, 20.0]).tolist() == [4.0, 1.0, 2.5, 2.5]

    assert metrics.spearman([1, 1, 1], [1, 2, 3]) is None

    assert metrics.quantile([-0.3, None, 0.1], 0.5) == pytest.approx(0.2)
    assert metrics.quantile([-0.3, None, 0.1], 0.5, signed=True) == pytest.approx(-0.1)
    assert metrics.quantile([None], 0.5) is None


@pytest.mark.parametrize(
    ("left", "right", "rho"),
    [
        ([1, 2, 3, 4, 5], [2, 4, 6, 8, 10], 1.0),
        ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 1 - 6 * 4 / (5 * 24)),  # 1 - 6 Σd² / (n (n² - 1))
    ],
)
def test_spearman_by_hand(left, right, rho):
    assert metrics.spearman(left, right) == pytest.approx(rho)


def test_regret_is_what_the_choice_loses():
    cell = [run("a", 2.0, 1.0), run("b", 1.0, 3.0), run("c", 1.5, 2.0)]
    assert metrics.regret(cell, 1) == pytest.approx(1.0)
    assert metrics.regret(cell, 2) == pytest.approx(0.5)
    assert metrics.regret(cell, 3) == 0.0

    tied = [run("slow", 4.0, 1.0), run("fast", 1.0, 1.0), run("mean", 2.0, 1.0)]
    assert metrics.regret(tied, 1) == pytest.approx((3.0 + 0.0 + 1.0) / 3)
    assert metrics.regret(tied, 2) == pytest.approx((0.0 + 0.0 + 1.0) / 3)  # both but the fastest, of three pairs
    assert metrics.regret(tied, 3) == 0.0
    assert metrics.regret([run("first", 3.0, 0.5), *tied], 2) == pytest.approx((2.0 + 0.0 + 1.0) / 3)
    assert metrics.regret([*reversed(tied)], 1) == metrics.regret(tied, 1)  # the listing plays no part

    fast, slow = run("fast", 1.0, 1.0, said_to_fit=False), run("slow", 1.5, 2.0)
    assert metrics.regret([fast, slow], 1) == metrics.regret([fast, slow], 3) == pytest.approx(0.5)
    nothing = [fast, run("slower", 3.0, 1.0, said_to_fit=False)]
    assert metrics.regret(nothing, 1) == pytest.approx(2.0)  # nothing is ranked: the slowest
    ordered = [run(f"{i}", 1.0 + i, 1.0 + i) for i in range(5)]
    assert metrics.summary([*ordered, run("wrong", 0.5, 9.0, said_to_fit=False)])["spearman_median"] == pytest.approx(
        1.0
    )

    twice = run("twice", 3.0, 3.0, tokens=200.0)
    assert metrics.regret([twice, run("a", 2.0, 2.0)], 1) == 0.0


def test_a_refused_run_misses_its_figures_and_a_rule_has_an_order_alone():
    refused = run("no", 1.0, measured_bytes=5.0, label="fits", refused="unknown", said_to_fit=False)
    assert metrics.regret([run("a", 2.0, 1.0), refused], 1) == pytest.approx(1.0)
    figures = metrics.summary([refused])
    assert figures["refused"] == figures["time_mape"] == figures["memory_median_err"] == 1.0
    assert figures["fits_recall"] == 0.0
    assert figures["fits_precision"] is None

    placed = [run(f"{i}", 5.0 - i, place=float(i), label="fits", measured_bytes=1.0) for i in range(5)]
    figures = metrics.summary(placed)
    assert figures["spearman_median"] == pytest.approx(-1.0)
    assert figures["time_mape"] is figures["memory_median_err"] is figures["fits_precision"] is None
    assert figures["regret_top1_mean"] == pytest.approx(4.0)


def test_errors_are_of_the_estimate_over_the_measured():
    results = [
        run("a", 1.0, 1.1, measured_bytes=100.0, estimated_bytes=110.0, label="fits", said_to_fit=True),
        run("b", 1.0, 0.7, measured_bytes=100.0, estimated_bytes=80.0, label="fits", said_to_fit=False),
        run("c", label="oom", said_to_fit=True),
        run("d", said_to_fit=True),  # ended for another reason
        run("e", measured_bytes=100.0, estimated_bytes=300.0, memory_kind="driver"),
        run("f", measured_bytes=100.0, estimated_bytes=115.0, memory_kind="allocated"),
    ]
    figures = metrics.summary(results)
    assert figures["rows"] == 6
    assert figures["allocated_median_err"] == figures["allocated_p95_err"] == pytest.approx(0.15)
    assert figures["time_mape"] == figures["time_median_err"] == pytest.approx(0.2)
    assert figures["memory_median_err"] == pytest.approx(0.15)
    assert figures["memory_p95_err"] == pytest.approx(0.195)
    assert figures["fits_precision"] == figures["fits_recall"] == 0.5
    assert figures["spearman_median"] is None  # two runs are no cell
    assert figures["regret_top1_mean"] is None


def test_cells_and_the_first_three():
    many = [run(f"many{i}", 1.0 + i, 1.0 + i, global_batch=64.0) for i in range(5)]
    few = [run(f"few{i}", 1.0 + i, 1.0 + i, global_batch=8.0 * (1 + i)) for i in range(3)]
    other = [run("other", 1.0, 1.0, cell=("framework", "model", "16", "2048"))]
    untimed = [run("crashed", None, 1.0, global_batch=64.0)]
    found = [{each.row_id for each in cell} for cell in metrics.cells([*many, *few, *other, *untimed])]
    assert found == [{each.row_id for each in many}, {each.row_id for each in few}, {"other"}]

    good = [run(f"ran{i}", 1.0, 1.0 + i, label="fits", said_to_fit=True) for i in range(3)]
    late = run("late", None, 9.0, label="oom", said_to_fit=True)
    early = run("early", None, 0.5, label="oom", said_to_fit=True)
    known = run("known", None, 0.1, label="oom", said_to_fit=False)
    assert metrics.doomed_in_first([*good, late, known]) == (0, 1)
    assert metrics.doomed_in_first([*good, early]) == (1, 1)
    tied = run("tied", None, 3.0, label="oom", said_to_fit=True)  # as the third of the good ones
    assert metrics.doomed_in_first([*good, tied]) == (pytest.approx(0.5), 1)


@pytest.mark.parametrize(
    ("size", "ran", "device", "out"),
    [
        (8, [(1, 10.0), (2, 14.0)], 37.0, True),  # 10, 14, 22, 38
        (8, [(1, 10.0), (2, 14.0)], 39.0, False),
        (8, [(1, 100.0)], 50.0, False),  # one size tells no slope
        (8, [(1, 100.0), (1, 101.0)], 50.0, False),
    ],
)
def test_a_crash_is_of_memory_where_a_line_through_other_sizes_passes_the_device(size, ran, device, out):
    assert metrics.runs_out_of_memory(size, ran, device) is out
