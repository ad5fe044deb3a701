"""`atorch calibrate` writes a file that loads, and finds out before measuring that it cannot."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from atorch.cli import main
from atorch.cluster.spec import ClusterSpec
from atorch.profiler import calibrate as calibration


@pytest.fixture
def measured(monkeypatch):
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


SHAPE = {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "vocab": 32000}
RUN = {"shape": SHAPE, "seq": 1024, "batch": 64, "strategy": ["parallel_mode", "ddp"], "step_s": 0.2}


@pytest.fixture
def timed(tmp_path):
    """A function that writes a file of runs, and returns the command that fits to it."""

    def write(runs, *more):
        path = tmp_path / "runs.json"
        path.write_text(json.dumps(runs))
        return ["calibrate", "--runs", str(path), "--output", str(tmp_path / "mine.json"), *more]

    return write


def test_constants_are_fitted_to_runs_of_ones_own(timed, tmp_path, capsys):
    runs = [{**RUN, "batch": 64 * count, "step_s": 0.12 * count} for count in (1, 2, 4)]
    runs += [{**RUN, "devices": "2x4", "strategy": [["half", "bf16"], "zero2", "parallel_mode"], "step_s": 0.08}]
    runs += [{**RUN, "devices": 4, "strategy": ["parallel_mode", ["amp_native", "bf16"], "ddp"], "step_s": 0.09}]
    assert main(timed(runs, "--cluster", "8xH100-80GB")) == 0
    output = " ".join(capsys.readouterr().out.split())
    found, shipped = ClusterSpec.load(tmp_path / "mine.json"), ClusterSpec.load("8xH100-80GB")
    assert found.device.efficiency != shipped.device.efficiency
    assert "fitted by atorch calibrate on 5 runs" in found.source_of("device.efficiency.traffic")
    assert "device.efficiency.traffic" in output
    assert "median error: " in output
    assert "mine.json: NVIDIA H100 80GB HBM3 as these runs have it" in output
    assert main(["plan", "--layers", "2", "--hidden", "256", "--heads", "4", "--ffn", "512", "--vocab", "100", "--seq",
                 "64", "--cluster", str(tmp_path / "mine.json"), "--verify", "0", "--include", "ddp"]) == 0  # fmt: skip


def test_few_runs_are_said_to_be_few(timed, capsys):
    assert main(timed([RUN], "--cluster", "8xH100-80GB")) == 0
    assert "1 runs move few constants; give 5 or more" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ({}, "holds no list of 1 to 1000 runs"),
        ([], "holds no list"),
        ([3], "run 1 of"),
        ([{**RUN, "step": 1}], "has an unknown 'step'; did you mean 'step_s'?"),
        ([{**RUN, "model": "config.json"}], "has both of model and shape"),
        ([RUN, {key: value for key, value in RUN.items() if key != "shape"}], "has neither of model and shape"),
        ([{key: value for key, value in RUN.items() if key != "step_s"}], "has no step_s"),
        ([{**RUN, "step_s": "fast"}], "step_s = 'fast'; it is seconds of a step, above 0"),
        ([{**RUN, "batch": 0}], "batch = 0; it is samples of a step"),
        ([{**RUN, "devices": "2x4x8"}], "devices = '2x4x8'; it is a number of one node's, or such as '2x8'"),
        ([{**RUN, "shape": {**SHAPE, "hiden": 3}}], "did you mean 'hidden'?"),
        ([{**RUN, "shape": {**SHAPE, "hidden": 0.5}}], "hidden = 0.5; it is a whole number"),
        ([{**RUN, "strategy": ["fdsp"]}], "fsdp"),
    ],
)
def test_a_fault_in_the_runs_is_one_line(runs, told, timed, tmp_path, capsys):
    assert main(timed(runs, "--cluster", "8xH100-80GB")) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("reading ")]
    assert told in lines[0]
    assert len(lines) == 1
    assert not (tmp_path / "mine.json").exists()


def test_runs_are_of_a_cluster(timed, capsys):
    assert main(timed([RUN])) == 2
    assert "give --cluster, such as 8xH100-80GB" in capsys.readouterr().err
    assert main(["calibrate", "--cluster", "8xL4"]) == 2
    assert "--cluster is for --runs" in capsys.readouterr().err
