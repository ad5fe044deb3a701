"""Public configurations mean what their trainers' documentation and source say.

`public.json` has the values of each file, with its repository, path and commit, and the strategy that was derived by
hand from accelerate 1.15's launcher and plugins, and from deepspeed/runtime/config.py and zero/config.py.
"""

import json
import math
from pathlib import Path

import pytest

from atorch.auto.strategy import Strategy
from atorch.trainer_configs import Source, recognised
from atorch.trainer_configs.source import yaml_text

HALF = ["half", {"dtype": "bf16"}]
PUBLIC = json.loads(Path(__file__).with_name("public.json").read_text())


@pytest.mark.parametrize("row", PUBLIC, ids=[row["source"].partition("@")[0].partition(" ")[2] for row in PUBLIC])
def test_a_public_file_is_explained_right(row, tmp_path):
    path = tmp_path / f"config{row['suffix']}"
    path.write_text(json.dumps(row["values"]) if row["suffix"] == ".json" else yaml_text(row["values"]))
    source = Source.of(str(path))
    setup = recognised(source).read(source)
    expected = Strategy.of(row["strategy"])
    world = math.prod(size for method in expected for _, size in getattr(method, "slices", ()))
    assert setup.tool == row["tool"]
    assert setup.world_size == row.get("world", world)
    assert setup.strategy(setup.world_size or (8 if row["tool"] == "accelerate" else world)) == expected
    assert [entry.key for entry in setup.entries if entry.kind == "unknown"] == row["unknown"]
    told = {entry.key.split(".")[0] for entry in setup.entries}
    assert set(row["values"]) - {key for key, value in row["values"].items() if value == {}} <= told


def test_public_files_are_of_every_kind():
    for tool in ("accelerate", "deepspeed"):
        assert sum(row["tool"] == tool for row in PUBLIC) >= 5


COMMANDS = {
    "torchrun --nproc-per-node 8 train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 True "
    "--deepspeed ds.json --lr_scheduler_type cosine": [HALF, "fsdp", ["micro_batch", {"size": 2, "reduce": "each"}]],
    "deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config own.json --mine 3": [HALF, "zero1"],
    "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
    "--mixed_precision bf16 train.py --per_device_train_batch_size 1 --gradient_checkpointing": [
        HALF, "checkpoint", "fsdp",
    ],
    "torchrun --nproc_per_node=8 train.py --per_device_train_batch_size 1 --fp16 --fsdp 'full_shard offload'": [
        ["half", {"dtype": "fp16"}], "fsdp", ["offload", {"parameters": 1.0}],
    ],
    "accelerate launch --num_processes 8 --multi_gpu train.py --per_device_train_batch_size 1 --bf16 true "
    "--torch_dtype bfloat16": ["ddp"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_explained_right(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zero3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    own = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    Path("ds.json").write_text(json.dumps(zero3))
    Path("own.json").write_text(json.dumps(own))
    source = Source.of(command)
    setup = recognised(source).read(source)
    mesh = ["parallel_mode", {"slices": [["data", 8]]}]
    assert setup.strategy(8) == Strategy.of([mesh, *COMMANDS[command]])
    assert setup.world_size == 8
    assert setup.knobs.get("dtype") == ("bf16" if "torch_dtype" in command else None)
    unknown = [entry.key for entry in setup.entries if entry.kind == "unknown"]
    assert unknown == (["--mine"] if "--mine" in command else [])
