"""What is run on a GPU runs through without one, and goes on where it was left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT


@pytest.mark.matrix
@pytest.mark.slow
def test_it_runs_through_and_is_resumed(tmp_path: Path) -> None:
    kept, known = tmp_path / "methods.jsonl", "amp + chunk"
    kept.write_text(json.dumps({"name": known, "ms": 1.0, "tokens_per_s": 2.0}) + "\n")
    command = ["make", "gpu", "SYSTEM=1", f"PYTHON={sys.executable}", "GPU_PACKAGES=", f"DONE={tmp_path}"]
    command += [
        f"SITE={tmp_path}/site",
        "STEPS=probes table",
        f'ARGS=--tiny --only "by hand, fp32" "amp + offload" "{known}"',
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [each["name"] for each in rows] == [known, "by hand, fp32", "amp + offload"]
    assert not any("failed" in each for each in rows), done.stderr
    assert "1B Llama, amp + chunk | 1.0 ms, 2 tokens/s" in done.stdout.splitlines()
    assert {each.name for each in tmp_path.glob("*.passed")} == {"probes.passed", "table.passed"}
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Nothing to be done" in again.stdout
