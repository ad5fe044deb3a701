"""What importing costs, and what is public."""

import subprocess
import sys

import atorch

# Imported by the functions that use them. Some of it comes with torch itself: only what atorch adds is counted.
DEFERRED = (
    "rich", "scipy", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torch._dynamo", "torch._inductor", "torchao", "transformers", "typer", "deepspeed",
    "fairscale",
)  # fmt: skip

PUBLIC = {
    "Checkpoint", "ClusterSpec", "Plan", "RunMonitor", "StragglerDetector", "Strategy", "auto_accelerate",
    "checkpoint_sequential", "checkpoint_wrapper", "clip_grad_norm", "export", "is_recomputing", "load_checkpoint",
    "load_methods", "load_pretrained", "load_whole_state", "plan", "resume_or_start", "save_checkpoint",
    "wait_for_checkpoint", "whole_state",
}  # fmt: skip


def loaded(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_the_front_door_adds_nothing_heavy_to_torch():
    added = loaded("from atorch.auto import auto_accelerate") - loaded("import torch")
    heavy = sorted(name for name in added if name.startswith(DEFERRED))
    assert not heavy, "import these inside the function that uses them"


def test_the_package_alone_does_not_load_torch():
    assert "torch" not in loaded("import atorch, atorch.errors")


def test_help_does_not_load_torch():
    command = [sys.executable, "-X", "importtime", "-m", "atorch.cli", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "rich", "pydantic", "numpy"}


def test_public_names():
    assert set(atorch.__all__) == PUBLIC
    assert atorch.__all__ == sorted(atorch.__all__)


def test_public_names_exist():
    for name in PUBLIC:
        assert getattr(atorch, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(atorch, "auto_acelerate")
