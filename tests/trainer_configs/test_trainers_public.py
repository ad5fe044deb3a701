"""Public configurations of torchtitan, Megatron-LM, AutoModel and Axolotl are explained as they were read by hand.

`public_trainers.json` has values alone, each with its repository, path and commit, and what they mean.
"""

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest

from atorch.auto.strategy import Strategy
from atorch.errors import ArgumentError, AtorchError
from atorch.trainer_configs import Source, recognised, target

ROWS = json.loads(Path(__file__).with_name("public_trainers.json").read_text())


def source_of(row):
    return Source(row["source"], data=row.get("data", {}), words=tuple(shlex.split(row.get("words", ""))))


def command(text):
    return Source("a command", words=tuple(shlex.split(text)))


@pytest.mark.parametrize("row", ROWS, ids=[row["source"].partition("@")[0].replace(" ", ":") for row in ROWS])
def test_a_public_file_is_explained_right(row):
    source = source_of(row)
    assert recognised(source).name == row["tool"]
    setup = target(row["tool"]).read(source)
    assert setup.strategy(row["world"]) == Strategy.of(row["strategy"])
    micro, _, total = setup.batches(row["world"])
    assert (micro, total, setup.seq) == (row["micro"], row["batch"], row["seq"])
    assert (setup.model, dict(setup.shape)) == (row.get("model"), row.get("shape", {}))
    assert dict(setup.knobs) == row.get("knobs", {})
    kinds = {
        kind: {entry.key for entry in setup.entries if entry.kind == kind} for kind in ("unknown", "not expressed")
    }
    assert kinds["unknown"] == set(row.get("unknown", ()))
    assert kinds["not expressed"] == set(row.get("inexpressible", ()))


def test_there_are_five_files_of_each_trainer():
    assert min(Counter(row["tool"] for row in ROWS).values()) >= 5


def keys_of(values, before=""):
    for key, value in values.items():
        if isinstance(value, dict) and value and before.count(".") < 4:
            yield from keys_of(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


@pytest.mark.parametrize("row", [row for row in ROWS if "data" in row], ids=lambda row: row["source"].partition("@")[0])
def test_every_key_of_a_file_has_an_entry(row):
    told = {entry.key for entry in target(row["tool"]).read(source_of(row)).entries}
    for key in keys_of(row["data"]):
        assert any(key == name or key.startswith(f"{name}.") for name in told), key


WRONG = {
    "megatron": [
        ("--tensor-model-parallel-size two --num-layers 4", "--tensor-model-parallel-size"),
        ("--bf16 --fp16 --num-layers 4 --micro-batch-size 1", "--bf16"),
        ("--num-layers 30 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4", "30 blocks"),
        ("--num-layers 4 --micro-batch-size 1 --recompute-granularity all", "full or selective"),
        ("--num-layers 4 --hidden-size 8 --batch-size 3", "--micro-batch-size in its place"),
        ("--num-layers 4 --hidden-size 8 --optimizer-cpu-offload --optimizer-offload-fraction 7", "from 0 to 1"),
    ],
    "torchtitan": [
        ("--parallelism.tensor_parallel_degree 0 --training.seq_len 8", "at least 1"),
        ("--parallelism.data_parallel_shard_degree 0 --training.seq_len 8", "-1"),
        ("--parallelism.data_parallel_shard_degree -2 --training.seq_len 8", "at least -1"),
        ("--training.seq_len 8 --training.max_context_length 8", "took its place"),
        ("--training.dtype float8 --training.seq_len 8", "training.dtype"),
        ("--activation_checkpoint.mode some --training.seq_len 8", "activation_checkpoint.mode"),
        ("--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 2F2B", "1f1b"),
        ("--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatch_size 3", "do not divide"),
    ],
}


@pytest.mark.parametrize(("tool", "words", "named"), [(tool, *case) for tool, cases in WRONG.items() for case in cases])
def test_values_that_contradict_or_are_of_a_wrong_type_are_named(tool, words, named):
    program = "pretrain_gpt.py" if tool == "megatron" else "-m torchtitan.train"
    with pytest.raises(ArgumentError, match=named):
        target(tool).read(command(f"torchrun --nproc-per-node 8 {program} {words}"))


FILES = [
    ("automodel", {"distributed": {"strategy": "ddp", "tp_size": 2}}, "fsdp2"),
    ("automodel", {"distributed": {"pp_size": 2}}, "distributed.pipeline"),
    ("automodel", {"distributed": {"dp_size": 6, "dp_replicate_size": 4}}, "does not divide"),
    ("automodel", {"distributed": [1]}, "mapping"),
    ("automodel", {"distributed": {"tp_size": "x"}}, "tp_size"),
    ("automodel", {"model": {"torch_dtype": "int3"}}, "torch_dtype"),
    ("axolotl", {"micro_batch_size": 0}, "micro_batch_size"),
    ("axolotl", {"fsdp_config": ["a"]}, "fsdp_config"),
    ("axolotl", {"bf16": True, "fp16": True}, "takes one of them"),
    ("axolotl", {"deepspeed": "nothing.json"}, "no such file"),
    ("axolotl", {"deepspeed": "zero3.json", "fsdp_config": {"offload_params": True}}, "takes one of them"),
]


@pytest.mark.parametrize(("tool", "values", "named"), FILES)
def test_files_that_contradict_or_are_of_a_wrong_type_are_named(tool, values, named):
    basis = {"automodel": {"step_scheduler": {"local_batch_size": 1}}, "axolotl": {"base_model": "x", "lora_r": 8}}
    with pytest.raises(AtorchError, match=named):
        target(tool).read(Source("file", data={**basis[tool], **values}))


def test_degrees_that_do_not_multiply_are_named():
    words = "NGPU=8 ./run_train.sh --parallelism.data_parallel_shard_degree 3 --parallelism.tensor_parallel_degree 2"
    setup = target("torchtitan").read(command(words))
    with pytest.raises(AtorchError, match="tensor 2 × data 3 = 6 processes"):
        setup.strategy(setup.world_size)
    with pytest.raises(ArgumentError, match="8 processes do not divide"):
        target("torchtitan").read(command("NGPU=8 ./run_train.sh --parallelism.context_parallel_degree 3"))


def test_shards_of_minus_one_take_the_processes_that_are_left():
    words = "NGPU=8 ./run_train.sh --parallelism.data_parallel_replicate_degree 2 --training.global_batch_size 32"
    setup = target("torchtitan").read(command(words))
    assert setup.axes == {"zero": 4, "data": 2}
    with pytest.raises(ArgumentError, match="does not divide 32"):
        setup.strategy(8)  # 8 samples a process, by default


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("torchrun x.py --num-layers 4 --hidden-size 8 --tensor-model-paralel-size 2", "--tensor-model-parallel-size"),
        ("./run_train.sh --training.seq_len 8 --parallelism.tensor_degree 2", "parallelism.tensor_parallel_degree"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(words, near):
    source = command(words)
    (unknown,) = [entry for entry in recognised(source).read(source).entries if entry.kind == "unknown"]
    assert near in unknown.note


def test_options_of_a_command_override_axolotls_file(tmp_path):
    path = tmp_path / "lora.yaml"
    path.write_text(json.dumps({"base_model": "a", "micro_batch_size": 2, "gradient_checkpointing": True}))
    source = Source.of(f"axolotl train {path} --micro-batch-size 3 --no-gradient-checkpointing -- --nproc_per_node=2")
    setup = recognised(source).read(source)
    assert (setup.micro_batch, setup.devices_per_node, "checkpoint" in setup.methods) == (3, 2, False)
    source = Source.of(f"accelerate launch --num_processes 8 --num_machines 2 -m axolotl.cli.train {path}")
    setup = recognised(source).read(source)
    assert (setup.num_nodes, setup.devices_per_node, "checkpoint" in setup.methods) == (2, 4, True)


def test_a_script_with_a_recipe_of_automodel_is_recognised(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"step_scheduler": {"local_batch_size": 8}, "distributed": {"strategy": "fsdp2"}}))
    source = Source.of(f"torchrun --nproc-per-node=8 finetune.py -c {path} --step_scheduler.local_batch_size=2")
    setup = recognised(source).read(source)
    assert (setup.tool, setup.micro_batch, setup.devices_per_node) == ("automodel", 2, 8)


def test_what_only_a_run_tells_is_assumed():
    words = "torchrun --nproc_per_node $GPUS p.py --num-layers $N --micro-batch-size 1 --tensor-model-parallel-size $TP"
    setup = target("megatron").read(command(words))
    told = {entry.key for entry in setup.entries if entry.kind == "assumed"}
    assert {"--nproc_per_node", "--num-layers", "--tensor-model-parallel-size"} <= told
    assert setup.world_size is None


def test_arguments_that_automodel_passes_on_are_unknown():
    values = {
        "model": {"pretrained_model_name_or_path": "Qwen/Qwen3-8B", "bogus": 1, "trust_remote_code": True},
        "optimizer": {"_target_": "torch.optim.AdamW", "lrr": 1e-4},
        "step_scheduler": {"local_batch_size": 1, "global_batch": 8},
    }
    setup = target("automodel").read(Source("recipe.yaml", data=values))
    unknown = {entry.key for entry in setup.entries if entry.kind == "unknown"}
    assert unknown == {"model.bogus", "optimizer.lrr", "step_scheduler.global_batch"}
