"""`smp.save` and `smp.load`: partial files and full ones, at the degree that saved them and at others."""

import argparse
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import atorch.smp as smp
from atorch.errors import CheckpointError
from atorch.smp.checkpointing.states import CUTS, PARTIAL
from tests.auto.training import run_each
from tests.pool import Pool
from tests.smp.job import begun


@pytest.fixture
def alone() -> Iterator[None]:
    with begun({}):
        yield


def parts_of_a_model(rank: int, size: int) -> dict[str, Any]:
    """The partial states of one of `size` stages: a parameter of its own, and one that all share."""
    own, shared = f"layer{rank}.weight", "embedding.weight"
    names = [shared, *(f"layer{each}.weight" for each in range(size))]
    model = {PARTIAL: True, shared: torch.ones(2), own: torch.full((3,), float(rank))}
    optimizer = {
        PARTIAL: True,
        "state": {name: {"step": torch.tensor(5.0), "exp_avg": model[name] * 2} for name in (shared, own)},
        "param_groups": [{"lr": 0.1, "params": names}],
    }
    return {"model_state_dict": model, "optimizer_state_dict": optimizer, "step": 5}


def save_and_load(rank: int, size: int, path: str) -> Any:
    with begun({"partitions": size}):
        smp.save(parts_of_a_model(rank, size), path, partial=True)
        smp.barrier()
        return smp.load(path, partial=True)


def load(rank: int, size: int, path: str, config: dict[str, Any]) -> Any:
    with begun(config):
        try:
            return smp.load(path, map_location="cpu")
        except CheckpointError as error:
            return str(error)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_each_stage_reads_what_it_wrote_and_another_degree_gets_whole_states(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    for rank, loaded in enumerate(pool.run(save_and_load, path)):
        assert same(loaded, parts_of_a_model(rank, 2))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.pt_0", "checkpoint.pt_1"]
    (tmp_path / "checkpoint.pt_best").write_text("another file")
    one, two = parts_of_a_model(0, 2), parts_of_a_model(1, 2)
    states = {**one["optimizer_state_dict"]["state"], **two["optimizer_state_dict"]["state"]}
    model = {**one["model_state_dict"], **two["model_state_dict"]}
    del model[PARTIAL]
    expected = {
        "model_state_dict": model,
        "optimizer_state_dict": {"state": states, "param_groups": one["optimizer_state_dict"]["param_groups"]},
        "step": 5,
    }
    for ranks, degree in ((4, 4), (2, 1), (1, 1)):
        for loaded in pool.run(load, path, {"partitions": degree, "ddp": True}, ranks=ranks):
            assert same(loaded, expected)


def test_files_left_from_more_processes_are_not_read(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    pool.run(save_and_load, path, ranks=4)
    pool.run(save_and_load, path, ranks=2)
    assert len(os.listdir(tmp_path)) == 4
    for loaded in pool.run(load, path, {"partitions": 4}, ranks=4):
        assert set(loaded["model_state_dict"]) == {"embedding.weight", "layer0.weight", "layer1.weight"}


def test_a_missing_file_is_named(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    pool.run(save_and_load, path, ranks=4)
    os.remove(f"{path}_2")
    told = pool.run(load, path, {"partitions": 2}, ranks=2)
    assert told[0] == told[1]
    assert "checkpoint.pt_0' to 3, of which 2 are not there" in told[0]
    told = pool.run(load, path, {"partitions": 4}, ranks=4)
    assert [isinstance(each, str) for each in told] == [False, False, True, False]


def cut_states(rank: int, size: int, path: str) -> None:
    """Save the partial states of two tensor ranks: rows 0, 1, 4, 5 and 2, 3, 6, 7 of a parameter."""
    runs = [(2 * rank, 2 * rank + 2), (2 * rank + 4, 2 * rank + 6)]
    whole = torch.arange(16.0).reshape(8, 2)
    part = torch.cat([whole[start:stop] for start, stop in runs])
    cuts = {"weight": {"dim": 0, "runs": runs, "shape": (8, 2)}}
    model = {PARTIAL: True, CUTS: cuts, "weight": part, "bias": torch.ones(2)}
    held = {"step": torch.tensor(1.0), "exp_avg": part * 2}
    optimizer = {PARTIAL: True, CUTS: cuts, "state": {"weight": held}, "param_groups": [{"params": ["weight"]}]}
    with begun({"tensor_parallel_degree": 2, "ddp": True}):
        smp.save({"model": model, "optimizer": optimizer}, path)


def test_parts_of_tensors_are_put_together(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    pool.run(cut_states, path)
    whole = torch.arange(16.0).reshape(8, 2)
    expected = {
        "model": {"weight": whole, "bias": torch.ones(2)},
        "optimizer": {
            "state": {"weight": {"step": torch.tensor(1.0), "exp_avg": whole * 2}},
            "param_groups": [{"params": ["weight"]}],
        },
    }
    assert same(pool.run(load, path, {}, ranks=1)[0], expected)
    # As many processes, but stages instead of slices.
    assert all(same(loaded, expected) for loaded in pool.run(load, path, {"partitions": 2}))
    (loaded, _) = pool.run(load, path, {"tensor_parallel_degree": 2, "ddp": True})
    assert loaded["model"]["weight"].shape == (4, 2)
    assert loaded["model"][PARTIAL] is True


def named(rank: int, size: int, path: str, order: str, other: str) -> Any:
    config = {"partitions": 2, "tensor_parallel_degree": 2, "ddp": True}
    with begun({**config, "placement_strategy": order}):
        smp.save({PARTIAL: True, f"{smp.pp_rank()} {smp.tp_rank()}": torch.ones(1)}, path)
        smp.barrier()
    with begun({**config, "placement_strategy": other}):
        loaded = smp.load(path)
        smp.barrier()
        return set(loaded)


def test_another_order_of_stages_and_slices_is_another_arrangement(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    places = ("0 0", "0 1", "1 0", "1 1")
    other, alike = run_each(pool, named, [(path, "DPT", "DTP"), (path, "DPT", "PDT")], ranks=4)
    assert other == [set(places)] * 4
    assert alike == [{PARTIAL, place} for place in places]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([{"step": 1}, {"step": 2}], "['step'] differs between the processes that saved it"),
        ([{"step": 1}, {}], "has 'step' on some processes alone"),
        (
            [{PARTIAL: True, "weight": torch.ones(2)}, {PARTIAL: True, "weight": torch.zeros(2)}],
            "['weight'] differs between the processes",
        ),
        (
            [
                {PARTIAL: True, CUTS: {"a": {"dim": 0, "runs": [(0, 1)], "shape": (4,)}}, "a": torch.ones(1)},
                {PARTIAL: True, CUTS: {"a": {"dim": 0, "runs": [(1, 3)], "shape": (4,)}}, "a": torch.ones(2)},
            ],
            "1 of its 4 elements are in no box",
        ),
        (
            [
                {PARTIAL: True, "state": {}, "param_groups": [{"lr": 0.1, "params": []}]},
                {PARTIAL: True, "state": {}, "param_groups": [{"lr": 0.2, "params": []}]},
            ],
            "['param_groups'][0]['lr'] differs",
        ),
    ],
)
def test_what_does_not_make_a_whole_is_told(tmp_path: Path, parts: list[Any], told: str) -> None:
    for number, part in enumerate(parts):
        torch.save(part, tmp_path / f"model.pt_{number}")
    with pytest.raises(CheckpointError) as error:
        smp.load(str(tmp_path / "model.pt"))
    assert told in str(error.value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("mark", "told"), [('{"mp_size": 0, "save": ""}', "were arranged as {'mp_size': 0"), ("{", "cannot be read")]
)
def test_a_damaged_record_of_the_save_is_told(tmp_path: Path, mark: str, told: str) -> None:
    path = tmp_path / "model.pt_0"
    torch.save({}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/smp_save.json", mark)
    with pytest.raises(CheckpointError, match=told):
        smp.load(str(tmp_path / "model.pt"))


@pytest.mark.usefixtures("alone")
def test_full_files_are_torchs_own(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    state = torch.nn.Linear(2, 2).state_dict()
    smp.save(state, path, partial=False)
    assert os.listdir(tmp_path) == ["model.pt"]
    assert same(dict(torch.load(path, weights_only=True)), dict(state))
    torch.save(state, path)
    assert same(dict(smp.load(path, partial=False)), dict(state))
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert same(dict(smp.load(path, partial=False)), dict(state))
    with pytest.raises(CheckpointError, match="no parts of it are; give partial=False"):
        smp.load(path)
    smp.save(state, str(tmp_path / "part.pt"))
    with pytest.raises(CheckpointError, match="part.pt_0'; give partial=True"):
        smp.load(str(tmp_path / "part.pt"), partial=False)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        smp.load(str(tmp_path / "other.pt"), partial=False)
    with pytest.raises(CheckpointError, match="there is no partial checkpoint"):
        smp.load(str(tmp_path / "folder" / "other.pt"))


def saved_twice(rank: int, size: int, path: str, killed: int) -> Any:
    with begun({"partitions": size}):
        for value in (1.0, 2.0):
            if value == 1 or rank != killed:
                smp.save({f"layer{rank}": torch.full((2,), value)}, path)
        smp.barrier()
        try:
            return smp.load(path)[f"layer{rank}"].tolist()
        except CheckpointError as error:
            return str(error)


def test_parts_of_two_saves_are_told(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    whole, apart = run_each(pool, saved_twice, [(path, -1), (path, 1)])
    assert whole == [[2.0, 2.0]] * 2
    for told in apart:
        assert "model.pt_0' and '" in told
        assert "model.pt_1' are of different saves, of which one was not finished" in told


def _on_meta(storage: torch.UntypedStorage, place: str) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device="meta")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("partial", [True, False])
def test_map_location_in_its_four_forms(tmp_path: Path, partial: bool) -> None:
    path = str(tmp_path / "model.pt")
    smp.save({"weight": torch.ones(2)}, path, partial=partial)
    for where in ("meta", torch.device("meta"), {"cpu": "meta"}, _on_meta):
        assert smp.load(path, map_location=where, partial=partial)["weight"].device.type == "meta"
    for where in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, place: storage):
        assert smp.load(path, map_location=where, partial=partial)["weight"].device.type == "cpu"


@pytest.mark.usefixtures("alone")
def test_arguments_of_torchs_functions_are_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    smp.save({"a": 1}, path, pickle_module=pickle, pickle_protocol=2)
    assert smp.load(path, pickle_module=pickle, weights_only=True, mmap=True) == {"a": 1}


class Bomb:
    """What runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("partial", [True, False])
def test_loading_runs_no_code(tmp_path: Path, caplog: pytest.LogCaptureFixture, partial: bool) -> None:
    path = str(tmp_path / "model.pt")
    smp.save({"bomb": Bomb(tmp_path / "gone off")}, path, partial=partial)
    assert "smp.load will refuse" in caplog.text  # said where it can still be helped
    with pytest.raises(CheckpointError, match=r"it holds posix\.mkdir, which is not plain data; tensors, numbers"):
        smp.load(path, partial=partial)
    assert not (tmp_path / "gone off").exists()
    caplog.clear()
    smp.save({"args": argparse.Namespace(lr=0.1)}, path, partial=partial)
    assert "it holds argparse.Namespace, which is not plain data" in caplog.text
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert smp.load(path, partial=partial)["args"].lr == 0.1


@pytest.mark.usefixtures("alone")
def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path / "model.pt")
    smp.save({"a": 1}, path)
    assert not caplog.records
    with pytest.raises(CheckpointError, match=r"model\.pt_0' cannot be written: .*tensors, numbers, strings"):
        smp.save({"a": lambda: None}, path)
    assert smp.load(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["model.pt_0"]
    (tmp_path / "folder.pt_0").mkdir()
    with pytest.raises(CheckpointError, match="is a directory, no ordinary file"):
        smp.save({}, str(tmp_path / "folder.pt"))
    Path(path + "_0").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(CheckpointError, match="is cut short: .* copy it again"):
        smp.load(path)
