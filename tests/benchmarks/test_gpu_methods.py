"""The table of methods on a GPU runs through without one, and goes on where it was left."""

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
    kept, known = tmp_path / "rows.jsonl", "amp + chunk"
    kept.write_text(json.dumps({"name": known, "ms": 1.0, "tokens_per_s": 2.0}) + "\n")
    command = [sys.executable, ROOT / "benchmarks" / "gpu_methods.py", "--tiny", "--json", kept, "--only"]
    done = subprocess.run(
        [*command, "by hand, fp32", "amp + checkpoint", known], capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [each["name"] for each in rows] == [known, "by hand, fp32", "amp + checkpoint"]
    assert not any("failed" in each for each in rows), done.stderr
    assert done.stdout.splitlines()[-1] == "1B Llama, amp + chunk | 1.0 ms, 2 tokens/s"
