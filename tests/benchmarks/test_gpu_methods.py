"""What is run on a GPU runs through without one, and goes on where it was left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_methods
from tests.house.source import ROOT


@pytest.mark.parametrize("name", ["by hand, amp", "amp + chunk"])
def test_a_row_without_a_gpu(name: str) -> None:
    """A part of what runs through below, in this process."""
    figures = gpu_methods.in_process(name, tiny=True)
    assert figures["ms"] > 0
    assert figures["tokens_per_s"] == pytest.approx(2 * 16 / (figures["ms"] / 1e3))
    assert ("estimated_gib" in figures) == (not name.startswith(gpu_methods.BY_HAND))
    assert f"Llama, {name}" in str(gpu_methods.row(name, figures))


@pytest.mark.slow
def test_a_search_without_a_gpu() -> None:
    name = "8 rows, automatic in 60 s"
    figures = gpu_methods.in_process(name, tiny=True)
    assert f"{figures['chosen']} after" in str(gpu_methods.row(name, figures))
    assert gpu_methods.in_process("8 rows, by hand, bf16 + compiled blocks", tiny=True)["ms"] > 0


def make_gpu(folder: Path, *more: str) -> list[str]:
    """The command, without a GPU and beside what is there."""
    steps = ["make", "gpu", "SYSTEM=1", f"PYTHON={sys.executable}", "GPU_PACKAGES=", f"DONE={folder}"]
    return [*steps, f"SITE={folder}/site", *more]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_it_runs_through(tmp_path: Path) -> None:
    done = subprocess.run(make_gpu(tmp_path, "ARGS=--tiny"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "methods.jsonl").read_text().splitlines()]
    assert [each["name"] for each in rows] == list(gpu_methods.VARIANTS)
    assert not any("failed" in each for each in rows), rows
    rows = [json.loads(line) for line in (tmp_path / "search.jsonl").read_text().splitlines()]
    assert [each["name"] for each in rows] == list(gpu_methods.SEARCHES)
    assert not any("failed" in each for each in rows), rows
    steps = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {path.stem for path in tmp_path.glob("*.passed")} == {*steps, "table"}


@pytest.mark.nightly
@pytest.mark.slow
def test_it_runs_through_and_is_resumed(tmp_path: Path) -> None:
    kept, known = tmp_path / "methods.jsonl", "amp + chunk"
    kept.write_text(json.dumps({"name": known, "ms": 1.0, "tokens_per_s": 2.0}) + "\n")
    chosen = f'ARGS=--tiny --only "by hand, fp32" "amp + offload" "{known}"'
    command = make_gpu(tmp_path, "STEPS=probes table", chosen)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [each["name"] for each in rows] == [known, "by hand, fp32", "amp + offload"]
    assert not any("failed" in each for each in rows), done.stderr
    assert "1B Llama, amp + chunk | 1.0 ms, 2 tokens/s" in done.stdout.splitlines()
    assert {each.name for each in tmp_path.glob("*.passed")} == {"probes.passed", "table.passed"}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Nothing to be done" in again.stdout
