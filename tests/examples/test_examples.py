"""Every example, run as its first lines say, with few steps: it learns, and what it saves can be used."""

import argparse
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from atorch import Strategy, auto_accelerate
from tests.house.source import ROOT

EXAMPLES = ROOT / "examples"
TINY = ("--steps", "20", "--batch-size", "8", "--seq", "64")


def run(script: str, *arguments: str, processes: int = 1, path: Path | None = None) -> str:
    """What an example prints; fails with its error where it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(EXAMPLES / script), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_readmes_diff_is_that_of_a_script_that_runs(tmp_path: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-")
    script = (EXAMPLES / "huggingface.py").read_text()
    assert script.count(new) == 1
    (tmp_path / "before.py").write_text(script.replace(new, old))
    names = (str(tmp_path / "before.py"), str(EXAMPLES / "huggingface.py"))
    both = f"import sys, runpy\nsys.path.append({str(EXAMPLES)!r})\nfor name in {names!r}:\n    runpy.run_path(name)\n"
    (tmp_path / "both.py").write_text(both)
    printed = run(str(tmp_path / "both.py"), "--steps", "12").splitlines()
    assert len(printed) == 2
    for before, after in map(before_and_after, printed):
        assert after < before - 0.5


def before_and_after(printed: str) -> tuple[float, float]:
    """The two held-out losses of a line such as `Loss on …: 6.05 → 3.02`."""
    found = re.search(r"Loss on .*: ([\d.]+) → ([\d.]+)", printed)
    assert found, printed
    return float(found[1]), float(found[2])


@pytest.mark.nightly  # `make demo` is its search
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_lm_searches_once_and_then_reuses_what_it_found(tmp_path: Path) -> None:
    saved = tmp_path / "strategy.json"
    printed = run("train_lm.py", *TINY, "--time-limit", "10", "--out", str(saved), processes=2)
    assert "No search" not in printed
    before, after = before_and_after(printed)
    assert after < before - 1
    assert f"--strategy {saved}" in printed

    written = saved.read_bytes()
    again = run("train_lm.py", *TINY, "--strategy", str(saved), processes=2)
    before, after = before_and_after(again)
    assert after < before - 1
    assert f"No search: {Strategy.of(saved)}" in again
    assert saved.read_bytes() == written


@pytest.mark.parametrize("strategy", [None, "strategy.json"])
def test_the_demo_gives_arguments_that_go_together(
    strategy: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """With a strategy's file there is no word on what is a search's alone; else the search has all of it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    of_strategy = importlib.import_module("train_lm").search_arguments
    (tmp_path / "strategy.json").write_text("[]")
    given = argparse.Namespace(strategy=strategy and str(tmp_path / strategy), out="found.json", time_limit=3.0)
    if strategy is None:
        assert of_strategy(given) == {"save_strategy_to_file": "found.json", "time_limit": 3.0}
        return
    with caplog.at_level(logging.WARNING, "atorch"):
        auto_accelerate(nn.Linear(2, 2), **of_strategy(given))
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_chunk_offload_learns_within_a_quarter_of_its_states(processes: int) -> None:
    sizes = ("--steps", "20", "--seq", "32", "--layers", "2", "--width", "256")
    printed = run("chunk_offload.py", *sizes, "--batch-size", str(2 * processes), processes=processes)
    before, after = before_and_after(printed)
    assert after < before - 0.5
    budget, peak = re.search(r"use ([\d.]+) MiB", printed), re.search(r"at most ([\d.]+) MiB", printed)
    assert budget is not None
    assert peak is not None
    assert float(peak[1]) <= float(budget[1])


@pytest.mark.nightly
def test_patrickstar_gpt2_learns_and_records_where_its_memory_goes(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    sizes = ("--steps", "6", "--layers", "2", "--width", "128", "--budget-mib", "8")
    printed = run("patrickstar_gpt2.py", *sizes, "--profile", str(profile), processes=2)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] - 0.5
    recorded = json.loads(profile.read_text())
    assert [name for _, _, name in recorded["phases"]].count("optimizer") == 6
    assert max(total for _, _, tier, total, _ in recorded["memory"] if tier == "GPU") <= 8 * 2**20


@pytest.mark.nightly
def test_smp_gpt2_learns_and_goes_on_at_another_degree(tmp_path: Path) -> None:
    sizes = ("--layers", "2", "--width", "64", "--seq", "32", "--folder", str(tmp_path))
    printed = run("smp_gpt2.py", "--steps", "20", *sizes, processes=4)
    assert "2 replicas in 2 stages, from step 0" in printed
    before, after = before_and_after(printed)
    assert after < before - 0.5
    again = run("smp_gpt2.py", "--steps", "30", "--resume", "--stages", "1", *sizes, processes=2)
    assert "2 replicas in 1 stages, from step 20" in again
    assert before_and_after(again)[0] == pytest.approx(after, abs=0.02)
    assert before_and_after(again)[1] < after


@pytest.mark.nightly
def test_digits_cnn_reads_digits() -> None:
    printed = run("digits_cnn.py", "--epochs", "3", "--time-limit", "5")
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 95


@pytest.mark.nightly
def test_lora_saves_an_adapter_that_peft_loads(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    printed = run("lora.py", "--base-steps", "20", "--steps", "20", "--out", str(adapter), processes=2)
    before, after = before_and_after(printed)
    assert after < before - 0.05

    from safetensors.torch import load_file

    weights = load_file(adapter / "adapter_model.safetensors")
    assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] == "LORA"
    # Whole matrices under peft's own names; B starts at zero, so what is not zero was trained.
    assert weights["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"].shape == (128, 16)
    assert min(float(weight.abs().sum()) for name, weight in weights.items() if "lora_B" in name) > 0


@pytest.mark.slow
def test_own_method_is_used_once_its_package_is_installed(tmp_path: Path) -> None:
    package, site = tmp_path / "own_method", tmp_path / "site"
    shutil.copytree(EXAMPLES / "own_method", package)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(site), str(package)], check=True, timeout=120)
    printed = run("own_method/train.py", "--epochs", "3", path=site)
    assert "Strategy: parallel_mode + ema" in printed
    last, averaged = (float(found) for found in re.findall(r"([\d.]+)% with", printed))
    assert averaged > 90
    assert averaged > last


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("models", "methods"),
    [
        (["llama"], ["sequence", "mixed"]),
        (["llama"], ["tensor", "megatron", "context", "pipeline"]),
        (["gpt2", "t5"], ["tensor", "pipeline"]),
        (["bert", "vit", "mixtral"], ["tensor", "pipeline"]),
        (["gpt2", "bert", "mixtral"], ["sequence", "megatron", "context"]),
        (["gpt2", "bert", "t5", "vit", "mixtral"], ["mixed"]),
    ],
    ids=lambda names: "-".join(names),
)
def test_parallel_train_learns_under_every_method(models: list[str], methods: list[str]) -> None:
    printed = run("parallel_train.py", "--models", *models, "--methods", *methods, "--steps", "10", processes=4)
    learnt = re.findall(r"(\w+) under (\w+): loss ([\d.]+) → ([\d.]+)", printed)
    assert {(model, method) for model, method, *_ in learnt} == {(a, b) for a in models for b in methods}, printed
    assert all(float(after) < float(before) for *_, before, after in learnt), printed
