"""Folders of other programs converted: values bit for bit, runs that go on, and files of strangers refused.

`deepspeed.zip` was written by DeepSpeed 0.19.8 itself, in bf16 on two processes at each ZeRO stage. Its `expected`
files hold what DeepSpeed's own `zero_to_fp32.py` and `ds_to_universal.py` read there.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import atorch
from atorch.checkpoint.convert import OF_DEEPSPEED, convert
from atorch.errors import CheckpointError
from atorch.files.weights import check_pickle, read_weights
from tests.auto.checkpointing import small_job
from tests.checkpoint.test_damage import ODD, mutate, places, scrambled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable:UserWarning")  # DCP's


class Net(nn.Module):
    """The model of `deepspeed.zip`, a tied head, a frozen layer and two groups of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen = nn.Embedding(7, 6), nn.Linear(6, 5).requires_grad_(False)
        self.a, self.head = nn.Linear(5, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.scalar = nn.Parameter(torch.zeros(1))

    def groups(self) -> list[dict[str, Any]]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [
            {"params": [parameter for parameter in trained if parameter.dim() > 1]},
            {"params": [parameter for parameter in trained if parameter.dim() < 2]},
        ]


def unpacked(folder: Path, name: str) -> Path:
    with zipfile.ZipFile(Path(__file__).with_name("deepspeed.zip")) as archive:
        archive.extractall(folder, [entry for entry in archive.namelist() if entry.startswith(name)])
    return folder / name


def in_file(folder: Path) -> dict[str, torch.Tensor]:
    with atorch.Checkpoint.open(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_deepspeed_goes_on(tmp_path: Path, stage: int) -> None:
    folder = unpacked(tmp_path, f"zero{stage}")
    path, left_out = convert(folder, tmp_path / "run")
    assert (path.name, left_out) == ("step-000000003", ["random states", "the loader's position"])
    expected = load_file(folder / "expected.safetensors")
    found = in_file(tmp_path / "run")
    assert found.keys() == {
        *expected,
        *(f"optim.{name}.step" for name in ("embed.weight", "a.weight", "a.bias", "scalar")),
    }
    assert all(torch.equal(found[name].to(value.dtype), value) for name, value in expected.items())

    model = Net()
    optim = torch.optim.AdamW(model.groups(), lr=1.0)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 3, dtype=torch.int64))
    result = atorch.auto_accelerate(
        model, optim, data, lambda batch, output: output.sum(), dataloader_args={"batch_size": 4}, load_strategy=[]
    )[1]
    assert atorch.resume_or_start(tmp_path / "run", result) == 3
    weights, others = result.optim.param_groups
    assert [(group["lr"], group["weight_decay"], group["betas"]) for group in (weights, others)] == [
        (1e-2, 0.1, (0.9, 0.999)),
        (1e-2, 0.0, (0.9, 0.999)),
    ]
    for name, parameter in result.model.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"].to(parameter.dtype))
        if parameter.requires_grad:
            state = result.optim.state[parameter]
            assert float(state["step"]) == 3
            assert torch.equal(state["exp_avg"], expected[f"optim.{name}.exp_avg"])
            assert torch.equal(state["exp_avg_sq"], expected[f"optim.{name}.exp_avg_sq"])
    assert torch.equal(result.model.count, torch.tensor([3]))


def test_accelerates_folders(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    try:
        runner = accelerate.Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        model, _ = runner.prepare(model, torch.optim.AdamW(model.parameters()))
        runner.save_state(tmp_path / "new")
        runner.save_state(tmp_path / "old", safe_serialization=False)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    for name in ("new", "old"):
        left_out = convert(tmp_path / name, tmp_path / f"run-{name}").left_out
        assert left_out == ["optimizer.bin", "random_states_0.pkl"]
        atorch.load_pretrained(again := nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), tmp_path / f"run-{name}")
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_folder_of_accelerates_fsdp(tmp_path: Path) -> None:
    """Written as `accelerate.utils.fsdp_utils` does, which has FSDP on accelerators alone."""
    result = small_job([])
    result.step(next(iter(result.dataloader)))
    model, optim = get_state_dict(result.model, result.optim)
    dcp.save({"model": model}, checkpoint_id=tmp_path / "state" / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": optim}, checkpoint_id=tmp_path / "state" / "optimizer_0", no_dist=True)
    assert convert(tmp_path / "state", tmp_path / "run").left_out == []
    expected = [float(result.step(next(iter(result.dataloader)))) for _ in range(2)]
    atorch.load_checkpoint(tmp_path / "run", again := small_job([]))
    assert [float(again.step(next(iter(again.dataloader)))) for _ in range(2)] == expected


def test_a_file_of_a_state_dict(tmp_path: Path) -> None:
    state = Net().state_dict()
    torch.save({**state, "half": torch.ones(3, dtype=torch.float8_e4m3fn), "epoch": 3}, tmp_path / "state")
    (tmp_path / "model.pt").symlink_to(tmp_path / "state")
    assert convert(tmp_path / "model.pt", tmp_path / "run").left_out == ["epoch"]
    atorch.load_pretrained(model := Net(), tmp_path / "run", strict=False)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert model.head.weight is model.embed.weight


def sharded(folder: Path) -> Path:
    """A folder as `save_pretrained(safe_serialization=False)` writes it, if it needs several files."""
    (made := folder / "sharded").mkdir()
    state = {name: value for name, value in Net().state_dict().items() if name != "head.weight"}
    where = {name: f"pytorch_model-0000{number % 2 + 1}-of-00002.bin" for number, name in enumerate(state)}
    for file in set(where.values()):
        torch.save({name: state[name] for name in state if where[name] == file}, made / file)
    (made / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return made


def test_a_model_in_several_files_of_torch(tmp_path: Path) -> None:
    first, second = sorted((made := sharded(tmp_path)).glob("*.bin"))
    second.rename(blob := tmp_path / "blob")
    second.symlink_to(blob)  # as the Hub's cache has it
    shutil.copy(first, made / "pytorch_model-00003-of-00003.bin")
    assert convert(made, tmp_path / "run").left_out == ["pytorch_model-00003-of-00003.bin"]
    found, expected = in_file(tmp_path / "run"), {**torch.load(first), **torch.load(second)}
    assert found.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in expected.items())
    first.replace(second)
    with pytest.raises(CheckpointError, match=f"{first.name} is missing"):
        convert(made, tmp_path / "other")
    shutil.copy(second, first)
    with pytest.raises(CheckpointError, match="has no '.*', which the index lists"):
        convert(made, tmp_path / "other")


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


class Many:
    def __reduce__(self) -> Any:
        return bytearray, (2**40,)


def first_states(folder: Path) -> Path:
    return folder / "global_step3" / "mp_rank_00_model_states.pt"


def last_states(folder: Path) -> Path:
    return folder / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def changed(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of what the model's file holds."""

    def work(folder: Path) -> None:
        state = torch.load(first_states(folder), weights_only=True)
        change(state)
        torch.save(state, first_states(folder))

    return work


def compressed(folder: Path) -> None:
    path = first_states(folder)
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))


def pipe(folder: Path) -> None:
    first_states(folder).unlink()
    os.mkfifo(first_states(folder))


def link(folder: Path) -> None:
    first_states(folder).rename(folder / "elsewhere.pt")
    first_states(folder).symlink_to(folder / "elsewhere.pt")


def expanded(state: Any) -> None:
    state["module"]["scale"] = torch.ones(1).expand(2**40)


def linked_folder(folder: Path) -> None:
    (folder / "global_step3").rename(folder.parent / "elsewhere")
    (folder / "global_step3").symlink_to(folder.parent / "elsewhere")


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "latest").write_text("../other"), "'../other', which is no name of a folder beside it"),
    (lambda folder: (folder / "latest").write_text("global_step4"), "global_step4"),
    (lambda folder: last_states(folder).unlink(), "is of stage 2 on .*, with files of 1"),
    (lambda folder: first_states(folder).unlink(), "lacks a file of model_states"),
    (lambda folder: last_states(folder).rename(last_states(folder).with_name(
        "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")), "lacks a file of optim_states"),
    (lambda folder: (folder / "global_step3" / "mp_rank_01_model_states.pt").touch(), "mp_rank_01_.* is a part of a"),
    (lambda folder: (folder / "global_step3" / "expert_1_mp_rank_00_model_states.pt").touch(), "is a part of a"),
    (changed(lambda state: state.update(more=Harm())), r"refers to posix\.mkdir, which is neither a tensor nor plain"),
    (changed(lambda state: state.update(more=Many())), r"refers to __builtin__\.bytearray, which is neither"),
    (changed(expanded), "no contiguous tensor"),
    (changed(lambda state: state["param_shapes"][0].update({"a.weight": (9, 9)})), "'model.a.weight': 51 of"),
    (changed(lambda state: state["param_shapes"].pop()), "ValueError"),
    (changed(lambda state: state["lr_scheduler"].update(deep=laughter())), "more than 1,000 values"),
    (changed(lambda state: state.update(global_steps=-1)), "it is of step -1"),
    (changed(lambda state: state.pop("module")), "KeyError: 'module'"),
    (compressed, "it holds more bytes than it has"),
    (pipe, "is no ordinary file"),
    (link, "cannot be read as an ordinary file"),
    (linked_folder, "global_step3 is a link"),
]  # fmt: skip


def laughter() -> Any:
    """A list that holds one list twice, which holds another twice, and so on."""
    value: Any = []
    for _ in range(20):
        value = [value, value]
    return value


@pytest.mark.parametrize(("damage", "told"), REFUSED)
def test_hostile_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(folder := unpacked(tmp_path, "zero2"))
    with pytest.raises(CheckpointError, match=told):
        convert(folder, tmp_path / "run")
    assert not (tmp_path / "harm").exists()
    assert not list((tmp_path / "run").glob("*"))


@pytest.mark.parametrize("way", [b"\x85", b"q\x010h\x01\x85", b"q\x010(h\x01t", b"\x940h\x00\x85q\x00"])
def test_a_pickle_of_nested_tuples(way: bytes) -> None:
    """As the key of a dict, two million of them end the process."""
    for depth in (90, 200):
        data = b"\x80\x04}N" + way * depth + b"K\x01s."
        with pytest.raises(CheckpointError, match="nests tuples") if depth > 100 else contextlib.nullcontext():
            check_pickle(data)


def test_a_pickle_with_room_for_more_than_it_holds() -> None:
    check_pickle(pickle.dumps({"a": [1] * 300}, 2))
    for data in (b"\x80\x02Nr\xff\xff\xff\x7f.", b"Np2147483647\n."):
        with pytest.raises(CheckpointError, match="places for more values"):
            check_pickle(data)


def a_folder_of_dcp(folder: Path) -> Path:
    model = Net()
    model, optim = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def a_state_dict(folder: Path) -> Path:
    torch.save(Net().state_dict(), folder / "model.pt")
    return folder / "model.pt"


def a_model_with_an_index(folder: Path) -> Path:
    (made := folder / "made").mkdir()
    state = {name: value for name, value in Net().state_dict().items() if name != "head.weight"}
    for number, names in enumerate((list(state)[::2], list(state)[1::2])):
        save_file({name: state[name] for name in names}, made / f"{number}.safetensors")
    where = {name: f"{number % 2}.safetensors" for number, name in enumerate(state)}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return made


READERS: dict[str, Callable[[Path], Path]] = {
    "zero 2": lambda folder: unpacked(folder, "zero2"),
    "zero 3": lambda folder: unpacked(folder, "zero3"),
    "dcp": a_folder_of_dcp,
    "state dict": a_state_dict,
    "index": a_model_with_an_index,
    "index of torch's files": sharded,
}
MORE_ODD: list[Any] = [
    torch.ones(3),
    torch.ones(2, 2).t(),
    torch.ones(1).expand(2**40),
    torch.Size([7, 6]),
    torch.Size([2**62]),
    {1},
]


def mutated(draw: random.Random, path: Path, data: bytes) -> bytes:
    """A file with some of its contents replaced by odd values."""
    if path.suffix == ".json":
        mutate(draw, content := json.loads(data))
        return json.dumps(content).encode()
    if path.name == ".metadata":
        metadata = pickle.loads(data)  # noqa: S301  what DCP has written here
        forms, stored = metadata.state_dict_metadata, metadata.storage_data
        objects = [metadata, *forms.values(), *stored, *stored.values()]
        objects += [chunk for form in forms.values() for chunk in getattr(form, "chunks", ())]
        holder = draw.choice([holder for holder in (forms, stored, *map(vars, objects)) if holder])
        holder[draw.choice(list(holder))] = copy.deepcopy(draw.choice([*ODD, (1,), torch.Size([2**62]), (2**62, -1)]))
        return pickle.dumps(metadata)
    if path.suffix not in (".pt", ".bin"):
        return scrambled(draw, data)
    state = read_weights(path, "", classes=OF_DEEPSPEED)
    for name in ("loss_scaler", "param_slice_mappings"):  # objects, which torch.save would name otherwise
        state.get("optimizer_state_dict", {}).pop(name, None)
    mutate(draw, state)
    if draw.randrange(2):
        container, key = draw.choice(places(state) or [({}, 0)])
        container[key] = draw.choice(MORE_ODD)
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


def with_other_pickle(draw: random.Random, data: bytes) -> bytes:
    """A file of torch.save whose checksums are right, with another pickle."""
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file := io.BytesIO(), "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, scrambled(draw, content) if name.endswith("data.pkl") else content)
    return file.getvalue()


@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")  # torch's own, of what it reads
@pytest.mark.parametrize(
    "trials",
    [150, pytest.param(2_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("reader", READERS)
def test_fuzzed_folders_of_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, trials: int
) -> None:
    """Whatever their files hold, they are converted to as many bytes as they have at most, or refused."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    source = READERS[reader](tmp_path)
    files = [path for path in sorted(source.rglob("*")) if path.is_file()] if source.is_dir() else [source]
    files = [path for path in files if not path.name.startswith("expected")]
    most = 2 * sum(path.stat().st_size for path in files)
    draw, refused = random.Random(trials), 0
    for trial in range(trials):
        path = draw.choice(files)
        data = path.read_bytes()
        if trial % 3 == 2:
            written = mutated(draw, path, data)
        else:
            written = (with_other_pickle if trial % 3 and path.suffix in (".pt", ".bin") else scrambled)(draw, data)
        path.write_bytes(written)
        try:
            convert(source, tmp_path / "run")
            assert sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors")) < most
        except CheckpointError:
            refused += 1
        path.write_bytes(data)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert refused > trials / 4
    assert {path.name for path in tmp_path.iterdir()} <= {source.name}
