"""A plan as another trainer's files: loaded by the trainer's own code, and explained again to the same strategy."""

import json

import pytest

from atorch.auto.strategy import Strategy
from atorch.trainer_configs import Source, TrainingSetup, recognised, target
from atorch.trainer_configs.launch import LAUNCHERS, launch_file

HALF = ["half", {"dtype": "bf16"}]
AMP = ["amp_native", {"dtype": "bf16"}]


def mesh(**sizes):
    return ["parallel_mode", {"slices": [[name, size] for name, size in sizes.items()]}]


def cut(size, **more):
    return ["micro_batch", {"size": size, **more}]


BOTH = {
    "replicas": [mesh(data=8), AMP, "ddp"],
    "shards": [mesh(data=8), HALF, "fsdp"],
    "kept": [mesh(data=8), HALF, "checkpoint", "zero2"],
    "plain": [AMP, "checkpoint"],
    "host": [mesh(data=8), HALF, "fsdp", ["offload", {"parameters": 1.0}]],
    "chunked loss": [mesh(data=8), HALF, "cross_entropy", "fsdp"],
}
ACCELERATE = {
    **BOTH,
    "parts": [mesh(data=8), HALF, "fsdp", cut(2)],
    "copies": [mesh(zero=4, data=2), HALF, ["checkpoint", {"offload_to_cpu": True}], "fsdp"],
    "tensors": [mesh(tensor=2, data=4), HALF, "tensor_parallel", "fsdp", cut(4)],
    "context": [mesh(context=4, data=2), HALF, "context_parallel", "checkpoint", "zero2"],
    "compiled": [mesh(data=8), AMP, "compile", "ddp", cut(1)],
}
DEEPSPEED = {
    **{name: methods for name, methods in BOTH.items() if name != "replicas"},
    "replicas": [mesh(data=8), HALF, "ddp", cut(2)],
    "states": [mesh(data=8), HALF, "zero1", cut(1)],
    "parts": [mesh(data=8), HALF, "fsdp", cut(2, reduce="each")],
    "gradients": [mesh(data=8), AMP, "zero2", cut(4, reduce="each")],
    "states on the host": [mesh(data=8), HALF, "zero2", ["offload", {"optimizer": 0.5}]],
    "tensors": [mesh(tensor=4, data=2), HALF, "tensor_parallel", "zero1"],
    "sequence": [mesh(sequence=2, data=4), HALF, "sequence_parallel", "checkpoint", "fsdp"],
}
CASES = [("accelerate", name) for name in ACCELERATE] + [("deepspeed", name) for name in DEEPSPEED]
CASES += [("transformers", name) for name in BOTH]
OF = {"accelerate": ACCELERATE, "deepspeed": DEEPSPEED, "transformers": BOTH}


def exported(tool, methods, folder, **more):
    """The setup of a strategy, whose files lie in the folder."""
    strategy = Strategy.of(methods)
    world = 1 if strategy.names()[0] != "parallel_mode" else 8
    setup = TrainingSetup.of_strategy(strategy, tool, 1, world, 64, model="Qwen/Qwen3-8B", seq=2048, **more)
    assert target(tool).lacks(strategy) == ()
    name, text = launch_file("sh", setup, target(tool).command(setup))
    for filename, content in {**target(tool).write(setup), name: text}.items():
        (folder / filename).write_text(content)
    return setup, strategy


@pytest.mark.parametrize(("tool", "name"), CASES)
def test_an_exported_plan_is_explained_to_the_same_strategy(tool, name, tmp_path):
    setup, strategy = exported(tool, OF[tool][name], tmp_path, knobs={"optimizer": "lion"})
    path = tmp_path / ("launch.sh" if tool != "transformers" else "training_arguments.json")
    source = Source.of(str(path))
    again = recognised(source).read(source)
    assert again.tool == tool
    assert again.strategy(setup.world_size) == strategy
    assert again.batches(setup.world_size) == setup.batches(setup.world_size)
    assert (again.model, again.seq, again.knobs) == (setup.model, setup.seq, setup.knobs)
    assert [entry.key for entry in again.entries if entry.kind == "unknown"] == []
    if tool != "transformers":
        assert again.world_size == setup.world_size


@pytest.mark.parametrize("name", [name for name in ACCELERATE if name != "plain"])
def test_accelerates_own_launcher_loads_what_is_written_for_it(name, tmp_path, monkeypatch):
    """Its file goes through `accelerate launch`'s own checks to the environment that its plugins read."""
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils import launch as environment

    setup, strategy = exported("accelerate", ACCELERATE[name], tmp_path)
    parser = launch.launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(tmp_path / "accelerate.yaml"), "train.py"])
    arguments, _, _ = launch._validate_launch_command(arguments)
    variables = environment.prepare_multi_gpu_env(arguments)
    names = strategy.names()
    assert arguments.num_processes == 8
    assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert (variables["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR") == ("compile" in names)
    is_sharded = not {"fsdp", "zero2"}.isdisjoint(names)
    assert (variables.get("ACCELERATE_USE_FSDP") == "true") == is_sharded
    if is_sharded:
        for variable, value in variables.items():
            if variable.startswith(("FSDP_", "PARALLELISM_CONFIG_")):
                monkeypatch.setenv(variable, value)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward == ("fsdp" in names)
        assert plugin.activation_checkpointing == ("checkpoint" in names)
        assert type(plugin.cpu_offload).__name__ == ("CPUOffloadPolicy" if "offload" in names else "OffloadPolicy")
        assert plugin.auto_wrap_policy is not None
        parallel = ParallelismConfig()
        assert parallel.total_size == (8 if setup.axes else 1)
        assert (parallel.tp_size, parallel.cp_size) == (setup.axes.get("tensor", 1), setup.axes.get("context", 1))


@pytest.mark.parametrize("name", DEEPSPEED)
def test_accelerates_plugin_loads_what_is_written_for_deepspeed(name, tmp_path):
    """DeepSpeed's own rule of batches holds (`_batch_assertion`), and Accelerate's plugin takes the file."""
    accelerate = pytest.importorskip("accelerate.utils")
    setup, strategy = exported("deepspeed", DEEPSPEED[name], tmp_path)
    path = tmp_path / "ds_config.json"
    values = json.loads(path.read_text())
    shares = setup.shares(setup.world_size)
    parts = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
    assert values["train_batch_size"] == 64 == parts * shares
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=str(path))
    stages = {"zero1": 1, "zero2": 2, "fsdp": 3}
    assert plugin.zero_stage == next((stages[name] for name in strategy.names() if name in stages), 0)
    assert plugin.gradient_accumulation_steps == values["gradient_accumulation_steps"]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", BOTH)
def test_transformers_own_parser_loads_its_arguments(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    setup, strategy = exported("transformers", BOTH[name], tmp_path)
    path = tmp_path / "training_arguments.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_cpu": True, "output_dir": str(tmp_path)}))
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (arguments,) = parser.parse_json_file(str(path), allow_extra_keys=True)
    micro, count, _ = setup.batches(setup.world_size)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (micro, count)
    assert arguments.bf16
    sharded = not {"fsdp", "zero2"}.isdisjoint(strategy.names())
    assert bool(arguments.fsdp) == sharded
    if sharded:
        assert arguments.fsdp_plugin_args["reshard_after_forward"] == ("fsdp" in strategy.names())


LACKING = {
    "accelerate": {
        "zero1": [mesh(data=8), HALF, "zero1"],
        "pipeline_parallel": [mesh(pipeline=2, data=4), HALF, "pipeline_parallel", "fsdp"],
        "selective": [mesh(data=8), HALF, ["checkpoint", {"selective": True}], "fsdp"],
        "reduce": [mesh(data=8), HALF, "fsdp", cut(1, reduce="each")],
        "tensors": [mesh(tensor=2, data=4), AMP, "tensor_parallel", "ddp"],
        "amp_native with FSDP": [mesh(data=8), AMP, "fsdp"],
    },
    "deepspeed": {
        "context_parallel": [mesh(context=2, data=4), HALF, "context_parallel", "fsdp"],
        "fsdp with micro_batch": [mesh(data=8), HALF, "fsdp", cut(1)],
        "fsdp or sequence_parallel": [mesh(tensor=2, data=4), HALF, "tensor_parallel", "fsdp"],
        "copies": [mesh(zero=4, data=2), HALF, "fsdp"],
    },
    "torchtitan": {
        **{name: [mesh(data=8), name] for name in ("zero1", "chunk", "amp_native")},
        "fp16": [mesh(data=8), ["half", "fp16"]],
        "with each micro-batch": [mesh(data=8), "fsdp", cut(1)],
    },
    "megatron": {
        **{name: [mesh(data=8), name] for name in ("amp_native", "compile", "cross_entropy")},
        "selective": [mesh(data=8), ["checkpoint", {"selective": True}]],
    },
    "automodel": {
        **{name: [mesh(data=8), name] for name in ("zero1", "chunk")},
        "half with ddp": [mesh(data=8), HALF, "ddp"],
    },
    "axolotl": {"writes none": [mesh(data=8), "fsdp"]},
}


@pytest.mark.parametrize(("tool", "name"), [(tool, name) for tool, names in LACKING.items() for name in names])
def test_what_a_trainer_lacks_is_named(tool, name):
    assert name in "; ".join(target(tool).lacks(Strategy.of(LACKING[tool][name])))


def test_transformers_file_compiles_and_has_no_fp8(tmp_path):
    methods = [mesh(data=8), HALF, "compile", "fsdp"]
    exported("transformers", methods, tmp_path)
    assert json.loads((tmp_path / "training_arguments.json").read_text())["torch_compile"]
    assert "fp8" in "; ".join(target("transformers").lacks(Strategy.of([*methods, "fp8"])))


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_every_launcher_starts_the_command_on_every_node(kind):
    setup = TrainingSetup(tool="accelerate", num_nodes=4, devices_per_node=8, micro_batch=1, accumulation=2)
    _, text = launch_file(kind, setup, target("accelerate").command(setup), "H100")
    assert "accelerate launch --config_file accelerate.yaml" in text
    for variable in ("NNODES", "NODE_RANK", "MASTER_ADDR", "GPUS"):
        assert variable in text
    assert "4" in text
    if kind in ("kubernetes", "skypilot"):
        yaml = pytest.importorskip("yaml")
        assert yaml.safe_load(text)
