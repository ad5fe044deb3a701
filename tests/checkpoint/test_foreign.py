"""Folders of torch.distributed.checkpoint, converted and refused; and checkpoints that `dcp.load` reads."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner

from atorch import Checkpoint, load_checkpoint, load_pretrained
from atorch.checkpoint.convert import convert
from atorch.checkpoint.files import save
from atorch.checkpoint.foreign import CheckpointReader
from atorch.cli import app
from atorch.errors import CheckpointError
from tests.auto.checkpointing import small_job
from tests.checkpoint.jobs import whole
from tests.checkpoint.test_convert import Harm
from tests.pool import Pool, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")  # DCP's
VALUES = {
    "weight": torch.arange(24.0).view(6, 4),
    "bias": torch.arange(6.0).bfloat16(),
    "turned": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "count": torch.tensor(7),
}


def saved_by_dcp(rank: int, size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (size,))
    model = {**VALUES, "weight": distribute_tensor(VALUES["weight"], mesh, [Shard(0)])}
    dcp.save({"model": model, "optim": {"lr": 0.5, "state": [torch.ones(3)]}}, checkpoint_id=folder)


def test_a_folder_of_dcp_becomes_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved_by_dcp, str(tmp_path / "dcp"))
    run = CliRunner().invoke(app, ["checkpoint", "convert", str(tmp_path / "dcp"), str(tmp_path / "ours")])
    assert run.exit_code == 0, run.output
    assert "left out: optim.state.0, optim.lr" in run.output
    with Checkpoint.open(tmp_path / "ours") as checkpoint:
        assert checkpoint.names.keys() == {f"model.{name}" for name in VALUES}
        assert all(torch.equal(checkpoint.read(f"model.{name}"), value) for name, value in VALUES.items())
    run = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "ours")])
    assert "is whole: 4 tensors" in run.output


def test_a_model_alone_is_taken_for_one(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "ours")
    load_pretrained(other, tmp_path / "ours")
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_run_saved_by_dcp_goes_on(tmp_path: Path, is_flat: bool) -> None:
    result = small_job([])
    for _ in range(3):
        result.step(next(iter(result.dataloader)))
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model, optim = get_state_dict(result.model, result.optim, options=options)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = [float(result.step(next(iter(result.dataloader)))) for _ in range(3)]
    assert convert(tmp_path / "dcp", tmp_path / "run").left_out == []
    again = small_job([])
    again.optim.param_groups[0]["lr"] = 1.0
    load_checkpoint(tmp_path / "run", again)
    assert [float(again.step(next(iter(again.dataloader)))) for _ in range(3)] == expected


def test_code_in_the_metadata_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for data in (pickle.dumps(Harm()), pickle.dumps(Harm(), 2), b"ctorch.serialization\nos.mkdir\n(S'harm'\ntR."):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointError, match="which is no part of DCP's metadata"):
            convert(tmp_path, tmp_path / "ours")
    assert not (tmp_path / "harm").exists()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "trials",
    [300, pytest.param(10_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.nightly)],
)
def test_fuzzed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials: int) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    dcp.save({"model": VALUES}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    draw, refused = random.Random(trials), 0
    written = {path: path.read_bytes() for path in sorted((tmp_path / "dcp").iterdir())}
    for _ in range(trials):
        path = draw.choice(list(written))
        changed = bytearray(written[path])
        for _ in range(draw.choice([1, 1, 4])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed[: draw.choice([len(changed), len(changed), draw.randrange(len(changed))])])
        try:
            convert(tmp_path / "dcp", tmp_path / "ours")
        except CheckpointError:
            refused += 1
        path.write_bytes(written[path])
    assert refused > trials / 4


@on_ranks(2)
def test_dcp_loads_a_checkpoint(rank: int, size: int, tmp_path: Path) -> None:
    tensors = {f"model.{name}": whole(value) for name, value in VALUES.items()}
    save(tmp_path, 3, {**tensors, "optim.weight.exp_avg": whole(VALUES["weight"] * 2)}, {})
    zeros = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    zeros["weight"] = distribute_tensor(zeros["weight"], init_device_mesh("cpu", (size,)), [Shard(1)])
    moment = torch.zeros(6, 4)
    state = {"model": zeros, "optim": {"state": {"weight": {"exp_avg": moment}}}}
    dcp.load(state, storage_reader=CheckpointReader(tmp_path))
    assert torch.equal(zeros.pop("weight").full_tensor(), VALUES["weight"])
    assert all(torch.equal(value, VALUES[name]) for name, value in zeros.items())
    assert torch.equal(moment, VALUES["weight"] * 2)
