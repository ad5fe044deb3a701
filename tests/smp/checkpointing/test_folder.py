"""Checkpoints by tags: what is written, what is kept, and what is loaded again, at the same degree and at another."""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

import atorch.smp as smp
from atorch.errors import ArgumentError, CheckpointError
from atorch.smp.checkpointing.atomic_save import Staged
from atorch.smp.checkpointing.folder import _write_parts
from atorch.smp.checkpointing.states import PARTIAL
from atorch.smp.session import session
from tests.auto.training import run_each
from tests.pool import Pool


class Stage(torch.nn.Module):
    """A stage's part of a model, with the interface of a DistributedModel: a row of its own, and one that all share."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.rows = {f"layer{smp.pp_rank()}": torch.full((2,), value), "shared": torch.full((2,), value)}
        self.loaded: Any = None

    def local_state_dict(self) -> dict[str, Any]:
        return {PARTIAL: True, **self.rows}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        parts = smp.allgather(self.rows, smp.MP_GROUP)
        return {name: row for part in parts for name, row in part.items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.loaded = dict(state), strict


class Optimizer:
    def __init__(self, model: Stage) -> None:
        self.model = model
        self.loaded: Any = None

    def local_state_dict(self) -> dict[str, Any]:
        state = {name: {"exp_avg": row * 2} for name, row in self.model.rows.items()}
        return {PARTIAL: True, "state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def begin(config: dict[str, Any], value: float = 1.0) -> tuple[Stage, Optimizer]:
    smp.init(config)
    session().model = model = Stage(value)
    session().optimizer = optimizer = Optimizer(model)
    return model, optimizer


def saved(
    rank: int, size: int, path: str, config: dict[str, Any], tags: list[str], num_kept: int | None = None
) -> None:
    """Save partial checkpoints of several tags, each with its number as its values, and a full one."""
    model, optimizer = begin(config)
    for number, tag in enumerate(tags):
        model.rows = {name: torch.full((2,), float(number)) for name in model.rows}
        content = {"step": number}
        smp.save_checkpoint(
            path, tag, True, model, optimizer, user_content=content, num_kept_partial_checkpoints=num_kept
        )
    smp.save_checkpoint(path, "final", partial=False, model=model, user_content={"done": True})
    smp.shutdown()


def resumed(rank: int, size: int, path: str, config: dict[str, Any], given: dict[str, Any]) -> Any:
    model, optimizer = begin(config)
    try:
        content = smp.resume_from_checkpoint(path, **given)
        return content, model.loaded, optimizer.loaded
    except (ArgumentError, CheckpointError) as error:
        return str(error)
    finally:
        smp.shutdown()


PIPELINE = {"partitions": 2}


def test_what_was_saved_comes_back(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "made" / "for it")
    pool.run(saved, path, PIPELINE, ["one", "two"])
    assert sorted(os.listdir(path)) == ["final", "newest", "one_partial", "two_partial", "user_content_final"]
    assert sorted(os.listdir(f"{path}/two_partial")) == [
        "model_0.pt", "model_1.pt", "optimizer_0.pt", "optimizer_1.pt", "user_content.pt"
    ]  # fmt: skip
    for rank, (content, (state, strict), held) in enumerate(pool.run(resumed, path, PIPELINE, {})):
        assert content == {"step": 1}
        assert strict
        assert state.pop(PARTIAL)
        assert {name: row.tolist() for name, row in state.items()} == {f"layer{rank}": [1, 1], "shared": [1, 1]}
        assert {name: each["exp_avg"].tolist() for name, each in held["state"].items()} == {
            f"layer{rank}": [2, 2],
            "shared": [2, 2],
        }
        assert held["param_groups"] == [{"lr": 0.1, "params": [f"layer{rank}", "shared"]}]
    given = {"tag": "one", "strict": False, "load_optimizer": False}
    loaded, without = run_each(
        pool, resumed, [(path, PIPELINE, given), (path, PIPELINE, {"load_sharded_optimizer_state": False})]
    )
    for content, (state, strict), held in loaded:
        assert content == {"step": 0}
        assert not strict
        assert state["shared"].tolist() == [0, 0]
        assert held is None
    for _, _, held in without:
        assert held["state"] == {}
        assert held["param_groups"][0]["lr"] == 0.1


def written(rank: int, size: int, path: str) -> bool:
    model, optimizer = begin({**PIPELINE, "ddp": True})
    own = Staged(Path(path, str(rank)), "one_partial", "a" * 16)
    own.begin()
    _write_parts(own, "one", model, optimizer, None)
    smp.shutdown()
    return (own.part / "one_partial" / f"model_{rank % 2}.pt").exists()


def test_replicas_write_once(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path)
    pool.run(saved, path, {**PIPELINE, "ddp": True}, ["one"], ranks=4)
    assert len(os.listdir(tmp_path / "one_partial")) == 5
    assert pool.run(written, str(tmp_path / "apart"), ranks=4) == [True, True, False, False]
    (_, (state, _), _), *_ = pool.run(resumed, path, {**PIPELINE, "ddp": True}, {}, ranks=4)
    assert set(state) == {PARTIAL, "layer0", "shared"}


def doubled(state: dict[str, Any]) -> dict[str, Any]:
    """A translation of names and values."""
    return {f"model.{name}": row * 2 for name, row in state.items()}


def test_a_full_checkpoint_is_a_plain_file(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path)
    pool.run(saved, path, PIPELINE, ["one", "two"])
    plain = torch.load(tmp_path / "final", weights_only=True)
    assert {name: row.tolist() for name, row in plain.items()} == {
        name: [1, 1] for name in ("layer0", "shared", "layer1")
    }
    for content, (state, _), held in pool.run(
        resumed, path, PIPELINE, {"partial": False, "translate_function": doubled}
    ):
        assert content == {"done": True}
        assert state["model.layer1"].tolist() == [2, 2]
        assert held is None
    torch.save(plain, tmp_path / "of_torch")
    assert pool.run(resumed, path, PIPELINE, {"partial": False, "tag": "of_torch"})[0][0] is None


def saved_over(rank: int, size: int, path: str) -> Any:
    model, optimizer = begin(PIPELINE)
    smp.save_checkpoint(path, "one", model=model, optimizer=optimizer, user_content={"step": 1})
    if rank == 0:
        Path(path, "one_partial", "config.json").write_text("{}")
        Path(path, "one_partial", "model_0.pt").chmod(0o640)
    smp.barrier()
    smp.save_checkpoint(path, "one", model=model, user_content={"step": 2} if rank == 0 else None)
    content = smp.resume_from_checkpoint(path, load_optimizer=False)
    smp.shutdown()
    return content


def test_a_save_replaces_what_an_earlier_one_wrote_and_no_other_file(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(saved_over, str(tmp_path)) == [{"step": 2}] * 2
    folder = tmp_path / "one_partial"
    assert sorted(os.listdir(tmp_path)) == ["newest", "one_partial"]
    assert sorted(os.listdir(folder)) == ["config.json", "model_0.pt", "model_1.pt", "user_content.pt"]
    assert (folder / "model_0.pt").stat().st_mode & 0o777 == 0o640


def test_the_newest_partial_ones_are_kept(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path)
    (tmp_path / "mine_partial").mkdir()
    pool.run(saved, path, PIPELINE, ["one", "two", "three", "two"], 2)
    kept = [name for name in sorted(os.listdir(path)) if name.endswith("_partial")]
    assert kept == ["mine_partial", "three_partial", "two_partial"]
    assert pool.run(resumed, path, PIPELINE, {})[0][0] == {"step": 3}


def test_what_is_missing_is_told_on_all_processes(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path)
    pool.run(saved, path, PIPELINE, ["one"])
    told = pool.run(resumed, path, PIPELINE, {"tag": "two"})
    assert told[0] == told[1]
    assert "two_partial'; it has the partial ones ['one'], and the full one 'final'" in told[0]
    os.remove(tmp_path / "one_partial" / "model_1.pt")
    told = pool.run(resumed, path, PIPELINE, {})
    assert all("model_0.pt' to 1, of which 1 are not there" in each for each in told)
    assert "rank 1 failed" in told[0]


@pytest.fixture
def parts() -> Iterator[tuple[Stage, Optimizer]]:
    yield begin({})
    smp.shutdown()


# What is done in a folder with a model, and what the error says.
MEANT: list[tuple[Callable[[Path, Any], Any], str]] = [
    *((lambda path, model, tag=tag: smp.save_checkpoint(path, tag, model=model), "can name a file in the folder")
      for tag in ("", "a/b", "..", "newest", 100)),
    (lambda path, model: smp.save_checkpoint(path, "one", model=model, num_kept_partial_checkpoints=0), "at least 1"),
    (lambda path, _: smp.save_checkpoint(path, "one", partial=False), "no model"),
    (lambda path, _: smp.save_checkpoint(path, "one", model=torch.nn.Linear(2, 2)), "a Linear as model"),
    (lambda path, _: smp.save_checkpoint(path, "one", optimizer=torch.optim.SGD([torch.ones(1)])), "SGD as optimizer"),
    (lambda path, _: smp.resume_from_checkpoint(path, "one", partial=False, translate_function=3),  # type: ignore[arg-type]
     "translate_function is 3"),
    (lambda *_: smp.resume_from_checkpoint(1), "path is 1"),  # type: ignore[arg-type]
]  # fmt: skip
FOUND: list[tuple[Callable[[Path, Any], Any], str]] = [
    (lambda path, _: smp.resume_from_checkpoint(path), "lists no partial checkpoint"),
    (lambda path, _: smp.resume_from_checkpoint(path, partial=False), "lists no full checkpoint"),
    (lambda path, model: smp.save_checkpoint(path / "file", "one", model=model), "cannot be made"),
    (lambda path, model: (smp.save_checkpoint(path, "one", model=model), smp.resume_from_checkpoint(path)),
     "there is no partial checkpoint '.*optimizer_0.pt'"),
    (lambda path, model: smp.save_checkpoint(path, "two", model=model, user_content={"data": DataLoader([1])}),
     r"it holds torch\.utils\.data\.\S+, which is not plain data; .* a data loader, its"),
    (lambda path, _: (newest(path, "steps100"), smp.resume_from_checkpoint(path)), "line 1 column 1"),
    (lambda path, _: (newest(path, "[1]"), smp.resume_from_checkpoint(path)), r"holds \[1\]; it lists checkpoints"),
]  # fmt: skip
"""The last three find what those before have saved."""


def newest(path: Path, text: str) -> None:
    (path / "newest").write_text(text)


def test_what_cannot_be_meant_read_or_loaded_is_told(tmp_path: Path, parts: tuple[Stage, Optimizer]) -> None:
    model, optimizer = parts
    (tmp_path / "file").write_text("")
    for kind, cases in ((ArgumentError, MEANT), (CheckpointError, FOUND)):
        for call, told in cases:
            with pytest.raises(kind, match=told):
                call(tmp_path, model)
    newest(tmp_path, '{"partial": ["../elsewhere"], "full": null}')
    with pytest.raises(ArgumentError, match="tag is '../elsewhere'"):
        smp.resume_from_checkpoint(tmp_path)
    smp.save_checkpoint(tmp_path / "new", "one", model=model, optimizer=optimizer)
    session().optimizer = None
    with pytest.raises(ArgumentError, match="load_optimizer=False"):
        smp.resume_from_checkpoint(tmp_path / "new")
    session().model = None
    with pytest.raises(ArgumentError, match=r"no smp\.DistributedModel"):
        smp.resume_from_checkpoint(tmp_path / "new")


@dataclass
class Settings:
    rate: float
    inner: Any


def test_configurations_come_back_as_dicts(
    tmp_path: Path, parts: tuple[Stage, Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    args, rows = argparse.Namespace(lr=0.1, settings=[Settings(0.5, torch.ones(2))]), (1, "a")
    config = transformers.GPT2Config(n_layer=3)
    content = {"args": args, "model_config": config, "cls": {"rows": rows}, "num_params": np.prod((3, 5))}
    smp.save_checkpoint(tmp_path, "one", model=parts[0], user_content=content)
    found = smp.resume_from_checkpoint(tmp_path, load_optimizer=False)
    assert found["args"]["lr"] == 0.1
    assert found["args"]["settings"][0].pop("inner").tolist() == [1, 1]
    assert found["args"]["settings"] == [{"rate": 0.5}]
    assert found["model_config"] == config.to_dict()
    assert found["cls"] == {"rows": rows}
    assert (found["num_params"], type(found["num_params"])) == (15, int)
    assert "user_content['args']['settings'][0] is a Settings, and is saved as a dict" in caplog.text
