"""The steps of `make gpu` are all there and end within nine minutes; wheels are for the machine that is meant."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands(*arguments: str) -> str:
    """What make would run; nothing is run."""
    asked = ["make", "--dry-run", "--always-make", "--no-print-directory", *arguments]
    made = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return made.stdout.replace("\\\n", " ")


def test_every_gpu_test_is_a_step_of_less_than_nine_minutes():
    printed = commands("gpu", "ARGS=--tiny", "SYSTEM=1")
    steps = [line for line in printed.splitlines() if "-m pytest" in line or "gpu_methods.py" in line]
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {name for line in steps for name in re.findall(r"tests/gpu/(\w+\.py)", line)} == files
    groups = re.findall(r"benchmarks/gpu_methods.py (?:--group (\w+) )?--json \S+ --tiny", printed)
    assert sorted(groups) == ["", "chunk", "fp8", "search"]  # none is the table
    for line in steps:
        (seconds,) = re.findall(r"timeout (\d+) ", line)
        assert int(seconds) < 9 * 60, line
    assert "tests/gpu/test_probes.py" in steps[0]


def test_steps_can_be_chosen():
    printed = commands("gpu", "STEPS=offload", "SYSTEM=1", "ARGS=--tiny")
    assert re.findall(r"tests/gpu/(\w+)\.py", printed) == ["test_offload"]
    assert "gpu_methods.py" not in printed


def test_wheels_are_for_the_machine_without_an_index():
    printed = commands("wheels")
    assert "--only-binary=:all:" in printed
    assert "--python-version 3.12 --implementation cp" in printed
    assert {"pydantic", "pydantic-core", "platformdirs", "torchao"} <= set(printed.split())


def test_another_torch_has_an_environment_of_its_own():
    printed = commands("test-torch", "VERSION=2.15.0", "ARGS=tests/runtime")
    assert ".venv-torch-2.15.0/bin/python -m pytest" in printed
    assert "torch==2.15.0" in printed
    assert re.search(r"-o filterwarnings=default tests/runtime$", printed, re.MULTILINE)
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert "filterwarnings" not in commands("test-torch", f"VERSION={pinned[1]}")
