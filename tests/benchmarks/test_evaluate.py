"""A small table from its file to its figures: what is read, labelled, refused and left out."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost, step_seconds
from atorch.cost.transformer import TransformerShape, transformer_profile
from benchmarks.published.alone import matmul_share
from benchmarks.published.evaluate import evaluate
from benchmarks.published.fit import TimedRun, drawn, fitted, with_constants
from benchmarks.published.hardware import cluster_described
from benchmarks.published.table import GIVEN, MEASURED, read_rows

CLUSTER = ClusterSpec.load("8xH100-80GB")
PLACE = "device.efficiency.matmul"


def costs(count):
    """Steps of models that are more and more bound by their products."""
    for index in range(count):
        hidden = 2048 + 1024 * index
        shape = TransformerShape(
            layers=4, hidden=hidden, heads=16, kv_heads=16, ffn=4 * hidden, vocab=32000, seq_len=2048, head_dim=128
        )
        yield replace(plain_cost(transformer_profile(shape, 4)), dtype="bfloat16")


def runs(count, **factors):
    machine = with_constants(CLUSTER, {PLACE: 1.0, **factors})
    return [TimedRun(f"run {i}", cost, CLUSTER, step_seconds(cost, machine)) for i, cost in enumerate(costs(count))]


def test_a_constant_is_found_from_the_times_it_made():
    found = fitted(runs(6, **{PLACE: 0.8}), {PLACE: 1.0})
    assert found == {PLACE: pytest.approx(0.8, rel=0.01)}

    tight, wide = (fitted(runs(1, **{PLACE: 0.7}), {PLACE: width})[PLACE] for width in (0.02, 1.0))
    assert 0.7 < wide < 0.75 < tight < 1.0

    table = runs(6)
    table[0] = table[0]._replace(seconds=20 * table[0].seconds)
    assert fitted(table, {PLACE: 0.2})[PLACE] == pytest.approx(1.0, abs=0.05)

    assert fitted([]) == {}

    table = runs(8)
    few = [run.name for run in drawn(table, 3)]
    assert few == [run.name for run in drawn(table[::-1], 3)]
    assert len(set(few)) == 3

    moved = with_constants(CLUSTER, {PLACE: 10.0, "inter_node.latency_s": 2.0, "inter_node.efficiency": 0.5})
    assert moved.device.efficiency.matmul == 1.0
    assert moved.inter_node.latency_s == 2 * CLUSTER.inter_node.latency_s
    assert moved.inter_node.efficiency == CLUSTER.inter_node.efficiency / 2
    assert with_constants(CLUSTER, {}) == CLUSTER


ROOT = Path(__file__).parents[2]
RUN = {
    "model": "toy", "layers": "4", "hidden": "1024", "heads": "16", "ffn": "4096", "vocab": "32000", "seq_len": "2048",
    "arch": "llama swiglu", "hardware": "H100-80GB", "gpu_mem_gb": "80", "gpus_per_node": "8", "n_gpus": "8", "dp": "8",
    "micro_batch": "1", "global_batch": "64", "precision": "bf16", "framework": "Megatron-LM", "status": "ok",
    "mem_metric": "torch max allocated",
}  # fmt: skip


def table(path, *runs):
    """A CSV file of runs that differ from `RUN` as given."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*GIVEN, *MEASURED, "notes"])
        writer.writeheader()
        writer.writerows({**RUN, "row_id": f"toy-{i}", "notes": "fast", **run} for i, run in enumerate(runs))
    return path


def test_times_are_told_or_refused(tmp_path):
    runs = ({"step_time_s": "2.0"}, {"tok_s_gpu": "8192"}, {})
    results = evaluate(read_rows(table(tmp_path / "t.csv", *runs)))
    assert [each.measured_s for each in results] == [2.0, pytest.approx(64 * 2048 / 8192 / 8), None]
    assert {each.tokens for each in results} == {64 * 2048}

    (result,) = evaluate(read_rows(table(tmp_path / "t.csv", {"tp": "3", "dp": "", "step_time_s": "1.0"})))
    assert "do not divide" in result.refused
    assert (result.estimated_s, result.time_error, result.said_to_fit) == (None, -1.0, False)


def test_crashes_are_labelled_where_a_line_through_other_sizes_explains_them(tmp_path):
    runs = (
        {"micro_batch": "1", "peak_mem_gib": "30"}, {"micro_batch": "2", "peak_mem_gib": "50"},
        {"micro_batch": "4", "status": "crash_or_oom"}, {"micro_batch": "4", "status": "crash_or_oom", "zero": "1"},
        {"micro_batch": "8", "status": "oom", "zero": "1"},
    )  # fmt: skip
    results = evaluate(read_rows(table(tmp_path / "t.csv", *runs)))
    assert [each.label for each in results] == ["fits", "fits", "oom", None, "oom"]


def test_refitted_rows_are_left_out_and_data_sheets_know_no_fit(tmp_path):
    path = table(
        tmp_path / "t.csv", *({"step_time_s": str(1 + i), "global_batch": str(64 * (1 + i))} for i in range(8))
    )
    every, few = evaluate(read_rows(path), "shipped"), evaluate(read_rows(path), "5")
    assert (len(every), len(few)) == (8, 3)
    before, after = ({each.row_id: abs(each.time_error) for each in results} for results in (every, few))
    assert all(after[name] < before[name] for name in after)

    rows = read_rows(table(tmp_path / "t.csv", {"step_time_s": "1.0"}))
    assert evaluate(rows, "none")[0].estimated_s != evaluate(rows, "shipped")[0].estimated_s


def test_the_command_prints_a_line_a_table_and_writes_json(tmp_path):
    one = table(tmp_path / "one.csv", *({"step_time_s": str(1 + i), "micro_batch": str(2**i)} for i in range(4)))
    two = table(tmp_path / "two.csv", {"tp": "3", "dp": ""})
    written = tmp_path / "accuracy.json"
    command = [sys.executable, ROOT / "benchmarks/planner_accuracy.py", one, two, "--calibrate", "none"]
    shown = subprocess.run([*command, "--json", written], check=True, capture_output=True, text=True, cwd=tmp_path)
    data = json.loads(written.read_text())
    assert set(data) == {"tables", "all", "lines"}
    assert {name: each["rows"] for name, each in data["tables"].items()} == {"one": 4, "two": 1}
    assert data["all"]["refused"] == 0.2
    assert set(data["all"]) == set(data["tables"]["one"])
    assert "refused toy-0" in shown.stdout
    assert "models not fitted on" in shown.stdout


def test_typical_products_are_those_that_a_device_reaches_by_itself():
    def share(name):
        return matmul_share(cluster_described(name, None, 8, 8).device, otherwise=0.5)

    assert share("H100-80GB") == pytest.approx(0.85 * 0.803)
    assert share("B200") < share("GB200 NVL72") < share("A100-80GB")
    assert share("H100-96GB HBM2e 500W") < share("H100-80GB")
    assert share("V100-SXM2") == 0.5  # of which nothing is known
