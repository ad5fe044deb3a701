"""`atorch explain-oom`: what a log and a snapshot say, the plan beside it, and statuses."""

import io
import json
import pickle

import pytest

from atorch.cli import main
from tests.files.test_out_of_memory import snapshot

LOG = """[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 92, in train
[rank1]:     optimizer.step()
[rank1]:   File "/opt/lib/python3.10/site-packages/torch/optim/adamw.py", line 608, in _multi_tensor_adamw
[rank1]:     exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.25 \
GiB of which 1.00 GiB is free. Process 77 has 9.00 GiB memory in use. Including non-PyTorch memory, this process has \
69.25 GiB memory in use. Of the allocated memory 61.00 GiB is allocated by PyTorch, and 7.50 GiB is reserved by \
PyTorch but unallocated.
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return str(path)


def test_a_log_is_explained(log, capsys):
    assert main(["explain-oom", log]) == 0
    shown = capsys.readouterr().out
    for words in (
        "rank 1, GPU 1: the device's memory ran out, in the optimizer step",
        "/home/me/train.py:92 in train: optimizer.step()",
        "2 GiB, and 1 GiB were free",
        "1 more in this log, in all of ranks 0, 1",
        "expandable_segments:True",
        "9 GiB are held by others (9 GiB by process 77)",
        "zero1 or fsdp",
    ):
        assert words in shown


def test_standard_input_is_read(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"exitcode  : -9 (pid: 3)\n")))
    assert main(["explain-oom", "-"]) == 0
    assert "signal 9" in capsys.readouterr().out


def test_a_snapshot_is_explained(tmp_path, capsys):
    path, out = tmp_path / "snapshot.pickle", tmp_path / "out.json"
    path.write_bytes(pickle.dumps(snapshot()))
    assert main(["explain-oom", str(path), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "the device's memory ran out, in the optimizer step" in shown
    assert "train.py:9 in main" in shown
    assert "At the end: 390 B. Allocated in: no Python frames" in shown
    (found,) = json.loads(out.read_text())["out_of_memory"]
    assert found["at_end"]["largest"][0]["bytes"] == 300


@pytest.mark.parametrize(("gpu", "fits"), [("A100-80GB", True), ("rtx3090", False)])
def test_the_plan_stands_beside_it(log, tmp_path, capsys, gpu, fits):
    """A plan that should fit is told with the changes that save what was missing."""
    setup, out = tmp_path / "accelerate.yaml", tmp_path / "out.json"
    setup.write_text(FSDP)
    job = f"Qwen/Qwen3-8B --explain {setup} --gpu {gpu} --batch 16 --micro-batch 1 --seq 2048 --json {out}"
    assert main(["explain-oom", log, *job.split()]) == 0
    plan = json.loads(out.read_text())["plan"]
    assert plan["fits"] == fits
    least = plan["changes"][0]
    assert least["saves_bytes"] >= 2**30
    assert f"Least change: {least['change']}, which saves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.log"], "there is no log or snapshot 'none.log'"),
        (["empty.log"], "empty.log has no message about exhausted memory"),
        (["empty.log", "Qwen/Qwen3-8B"], "give --explain"),
        (["empty.log", "--json", "no/where.json"], "it is in no folder that is there"),
        (["harm.pickle"], "nothing of it was run"),
    ],
)
def test_what_cannot_be_explained_has_status_1(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").write_text("step 1: loss 2.3\n")
    (tmp_path / "harm.pickle").write_bytes(pickle.dumps(print))
    assert main(["explain-oom", *arguments]) == 1
    assert message in capsys.readouterr().err
