"""`atorch calibrate` writes a file that loads, and finds out before measuring that it cannot."""

from dataclasses import replace
from pathlib import Path

import pytest

from atorch.cli import main
from atorch.cluster import ClusterSpec
from atorch.profiler import calibrate as calibration


@pytest.fixture
def measured(monkeypatch):
    """What a calibration would find, and the budgets that it was given."""
    cluster = replace(
        ClusterSpec.load("2x4xL4"), sources={"device": "measured by atorch calibrate", "intra_node": "[a guess]"}
    )
    budgets = []
    monkeypatch.setattr(calibration, "calibrate", lambda world, budget_s: budgets.append(budget_s) or cluster)
    return cluster, budgets


def test_it_writes_what_it_measured(measured, tmp_path, capsys):
    cluster, budgets = measured
    path = tmp_path / "mine.json"
    assert main(["calibrate", "--output", str(path)]) == 0
    assert ClusterSpec.load(path) == cluster
    shown = capsys.readouterr().out
    assert "2 x 4 x NVIDIA L4" in shown
    assert "121 TFLOP/s" in shown
    assert "measured" in shown
    assert "[a guess]" in shown
    assert main(["calibrate", "--quick", "--output", str(path)]) == 0
    assert 0 < budgets[1] < budgets[0]


def test_the_file_has_a_name_by_itself(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate"]) == 0
    assert Path("cluster.json").is_file()


def test_a_place_that_is_not_there_is_told_before_measuring(measured, tmp_path, capsys):
    assert main(["calibrate", "-o", str(tmp_path / "nowhere" / "mine.json")]) == 2
    assert "is in no folder that is there" in capsys.readouterr().err
    assert measured[1] == []
