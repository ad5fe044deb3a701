"""What frameworks do differently, from their sources, as costs and layouts have it."""

from dataclasses import replace

import pytest

from benchmarks.published.layout import layout_of
from benchmarks.published.rows import cost_of
from tests.benchmarks.test_rows import row


def test_nanotron_copies_the_pieces_of_every_rank_under_zero():
    def copied(**given):
        given = {"framework": "nanotron", "global_batch": "4096", "pp": "1", "tp": "1", "dp": "", **given}
        return cost_of(replace(row(**given), knows_runs=False)).extra_s

    # 16 blocks of 4 weights and 2 norms each, a last norm, a head and a table; two buckets of 50 MiB a block, as
    # attention fits into that of the next feed-forward layer, and the head, and the table
    assert copied() == pytest.approx(16 * (99 + 34 + 1) * 5e-6)
    assert copied(n_gpus="8") == pytest.approx(copied() / 2)
    assert copied(zero="0") == 0
    with_stages = copied(n_gpus="32", pp="2")
    assert 0.5 * copied() < with_stages < 0.6 * copied()


def test_launches_of_nanotron_by_its_source_and_its_runs():
    def launches(knows_runs, **given):
        return cost_of(replace(row(framework="nanotron", **given), knows_runs=knows_runs)).ops_scale

    assert [launches(False, tp="2"), launches(False, tp="1", dp="8"), launches(True, tp="1", dp="8")] == [3.0, 2.0, 2.6]


@pytest.mark.parametrize(("group", "shared"), [("", 8), ("4", 4), ("all", 16), ("64", 16)])
def test_over_how_many_neighbours_zero_shares_out(group, shared):
    given = {"framework": "InternEvo", "tp": "1", "pp": "1", "dp": "16"}
    assert layout_of(row(zero_group=group, **given)).shared_by == shared
    assert layout_of(row(zero_group=group, **{**given, "zero": "0"})).shared_by == 16
