"""Scripts in the shape of the vendor's public examples run as they are, and train as they do in plain PyTorch.

They import `smdistributed.modelparallel.torch`. Here that is `atorch.smp`, by the alias, or what `plain.py` makes.
"""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.smp.plain import plain_packages

SCRIPTS = Path(__file__).parent / "scripts"
Parameters = dict[str, Any]


def printed(rank: int, size: int, script: str, arguments: tuple[str, ...], parameters: Parameters | None) -> str:
    """The output of a script on this process; `parameters` are the launcher's; None runs it plainly."""
    before, told = list(sys.argv), io.StringIO()
    packages = {name: held for name, held in sys.modules.items() if name.startswith("smdistributed")}
    try:
        sys.argv[:] = [script, *arguments]
        if parameters is None:
            for name in packages:
                del sys.modules[name]
            sys.modules.update(plain_packages())
        else:
            importlib.import_module("atorch.smp.alias")
            os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(parameters)
        with contextlib.redirect_stdout(told):
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    finally:
        sys.argv[:] = before
        os.environ.pop("SM_HP_MP_PARAMETERS", None)
        if parameters is None:
            for name in plain_packages():
                del sys.modules[name]
            sys.modules.update(packages)
        else:
            from atorch import smp

            if smp.is_initialized():
                smp.shutdown()
    return told.getvalue()


def numbers(text: str, before: str) -> list[float]:
    found = [float(each) for each in re.findall(re.escape(before) + r":? ([-\d.e]+)", text)]
    assert found, text
    return found


PIPELINE_2 = {"partitions": 2, "microbatches": 4, "ddp": True}
DATA_2 = {"microbatches": 2, "ddp": True}
DEGREES = {"pipeline 2": (2, PIPELINE_2), "data 2": (2, DATA_2), "pipeline 2 data 2": (4, PIPELINE_2)}


def sampled(names: Collection[str], sample: str) -> list[Any]:
    return [pytest.param(name, marks=[] if name == sample else pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("amp", sampled("01", "1"))
@pytest.mark.parametrize("degrees", sampled(DEGREES, "pipeline 2 data 2"))
def test_mnist(pool: Pool, tmp_path: Path, degrees: str, amp: str) -> None:
    ranks, parameters = DEGREES[degrees]
    folders = [str(tmp_path / name) for name in ("plain", "smp")]
    given = ("--save_full_model", "--amp", amp, "--model-dir")
    (plain,) = pool.run(printed, "mnist.py", (*given, folders[0]), None, ranks=1)
    first, *others = pool.run(printed, "mnist.py", (*given, folders[1]), parameters, ranks=ranks)
    assert numbers(first, "Average loss") == pytest.approx(numbers(plain, "Average loss"), rel=1e-3)
    assert numbers(first, "Accuracy") == numbers(plain, "Accuracy")
    assert not any("Average loss" in other for other in others)
    models = [torch.load(Path(folder) / "pt_mnist_checkpoint.pt")["model_state_dict"] for folder in folders]
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-3, atol=1e-4)

    # Each goes on from what the other has saved.
    again = pool.run(printed, "mnist.py", ("--load", "full", "--model-dir", folders[0]), parameters, ranks=ranks)[0]
    (right,) = pool.run(printed, "mnist.py", ("--load", "full", "--model-dir", folders[1]), None, ranks=1)
    assert numbers(again, "Average loss") == pytest.approx(numbers(right, "Average loss"), rel=1e-3)


@pytest.mark.parametrize("degrees", sampled(DEGREES, "pipeline 2"))
def test_bert_pretraining(pool: Pool, tmp_path: Path, degrees: str) -> None:
    """Eight steps, plainly, and four, a checkpoint by ranks, and four more."""
    ranks, parameters = DEGREES[degrees]
    (plain,) = pool.run(
        printed, "bert_pretrain.py", ("--steps_this_run", "8", "--output_dir", str(tmp_path / "plain")), None, ranks=1
    )
    folder = ("--output_dir", str(tmp_path / "smp"))
    first = pool.run(printed, "bert_pretrain.py", folder, parameters, ranks=ranks)[0]
    rest = (*folder, "--steps_this_run", "8", "--resume_from_checkpoint")
    second = pool.run(printed, "bert_pretrain.py", rest, parameters, ranks=ranks)[0]
    assert "resume step from  4" in second
    losses = numbers(first, "Loss") + numbers(second, "Loss")
    assert losses == pytest.approx(numbers(plain, "Loss"), rel=1e-3)
    assert losses[-1] < losses[0]


GPT: dict[str, tuple[int, str]] = {
    "pipeline 2": (2, "--pipeline_parallel_degree 2 --microbatches 2"),
    "by hand": (2, "--pipeline_parallel_degree 2 --microbatches 4 --manual_partition 1 --checkpoint_sublayers 1"),
    "pipeline 2 data 2": (4, "--pipeline_parallel_degree 2 --microbatches 2 --placement_strategy spread"),
    "tensor 2": (2, "--tensor_parallel_degree 2 --prescaled_batch 1"),
    "tensor 2 of other rows": (2, "--tensor_parallel_degree 2 --microbatches 2 --logits_output yes"),
    "tensor 2 pipeline 2": (4, "--tensor_parallel_degree 2 --pipeline_parallel_degree 2 --microbatches 2"),
    "data 2": (2, "--microbatches 2 --gradient_accumulation 2"),
    "late parameters": (2, "--pipeline_parallel_degree 2 --microbatches 2 --delayed_param 1 --logits_output yes"),
}


@pytest.mark.parametrize("degrees", sampled(GPT, "by hand"))
def test_gpt(pool: Pool, tmp_path: Path, degrees: str) -> None:
    """Eight steps, plainly, and four, a checkpoint, and four more."""
    ranks, options = GPT[degrees]
    given = options.split()
    accumulation = ("--gradient_accumulation", "2") if "--gradient_accumulation" in given else ()
    (plain,) = pool.run(printed, "gpt_simple.py", ("--max_steps", "8", *accumulation), None, ranks=1)
    given += ["--checkpoint-dir", str(tmp_path / "partial"), "--model-dir", str(tmp_path / "full")]
    save = (*given, "--checkpoint_freq", "2", "--num_kept_checkpoints", "1")
    first = pool.run(printed, "gpt_simple.py", save, {}, ranks=ranks)[0]
    rest = (*given, "--load_partial", "1", "--max_steps", "8", "--save_final_full_model", "1")
    second = pool.run(printed, "gpt_simple.py", rest, {}, ranks=ranks)[0]
    assert "After_partition True" in first
    assert "Resuming from saved batch index 4" in second
    losses = numbers(first, "Validation loss") + numbers(second, "Validation loss")
    if degrees == "late parameters":  # drawn at the first step, which are others than plain construction's
        assert losses == sorted(losses, reverse=True)
    else:
        assert losses == pytest.approx(numbers(plain, "Validation loss"), rel=1e-3)
    assert [path.name for path in (tmp_path / "partial").glob("*_partial")] == ["total_steps4_partial"]
    assert (tmp_path / "full" / "fullmodel.pt").exists()


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.nightly
def test_a_script_is_started_by_torchrun_as_it_is(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "atorch.smp.alias"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPTS / "mnist.py"), "--save_partial_model", "--model-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**ENVIRONMENT, "SM_HP_MP_PARAMETERS": json.dumps(PIPELINE_2)},
    )
    assert done.returncode == 0, done.stderr
    assert numbers(done.stdout, "Accuracy")[0] > 12  # of 80, of ten classes
    assert {path.name for path in tmp_path.iterdir()} == {f"pt_mnist_checkpoint.pt_{rank}" for rank in range(2)}
