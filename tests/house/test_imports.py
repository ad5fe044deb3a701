"""What importing costs, and what is public."""

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import atorch
from tests.house.source import modules

# Imported by the functions that use them. Some of it comes with torch itself: only what atorch adds is counted.
DEFERRED = (
    "rich", "scipy", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torch._dynamo", "torch._inductor", "torchao", "transformers", "typer", "deepspeed",
    "fairscale",
)  # fmt: skip

PUBLIC = {
    "Checkpoint", "ClusterSpec", "Plan", "RunMonitor", "StragglerDetector", "Strategy", "TransformerShape",
    "auto_accelerate", "checkpoint_sequential", "checkpoint_wrapper", "clip_grad_norm", "export", "is_recomputing",
    "load_checkpoint", "load_methods", "load_pretrained", "load_whole_state", "plan", "resume_or_start",
    "save_checkpoint", "wait_for_checkpoint", "whole_state",
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


def test_a_plan_of_a_shape_does_not_load_torch():
    plan = "import atorch; atorch.plan('Qwen/Qwen3-8B', cluster='8xH100-80GB', seq=512)._repr_html_()"
    assert not loaded(plan) & {"torch", "numpy", "rich", "psutil"}


def test_help_does_not_load_torch():
    command = [sys.executable, "-X", "importtime", "-m", "atorch", "--help"]
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


def test_what_benchmarks_and_examples_import_is_there():
    """Inside functions, too: no test runs all of them."""
    names = [
        (module.at(node), node.module, alias.name)
        for module in modules("benchmarks", "examples", "tools")
        for node, _ in module.nodes(ast.ImportFrom)
        if (node.module or "").partition(".")[0] == "atorch"
        for alias in node.names
    ]
    assert names
    lost = [
        f"{place}: {home}.{name}"
        for place, home, name in names
        if not hasattr(import_module(home), name) and find_spec(f"{home}.{name}") is None
    ]
    assert not lost
