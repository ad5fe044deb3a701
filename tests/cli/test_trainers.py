"""`atorch plan --explain`, `--for` and `--export`."""

import json
from dataclasses import replace

import pytest

import atorch
from atorch.auto.planner.request import EXPERTS
from atorch.auto.strategy import Strategy
from atorch.cli import main
from atorch.cost import plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.trainer_configs import Source, recognised, target

SMALL = "--layers 4 --hidden 256 --heads 4 --kv-heads 2 --ffn 512 --vocab 1000 --seq 128"
SHAPE = SMALL.split()
LARGE = "--layers 126 --hidden 16384 --heads 128 --ffn 53248 --vocab 128256 --seq 8192"
HUGE = LARGE.split()
LLAMA = "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --seq 4096"
FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_colour: red}
"""


@pytest.fixture
def fsdp(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(FSDP)
    return str(path)


GPUS = ("--gpu", "A100-80GB", "--batch", "64")


def explained(path, *more, tmp_path, status=0, cluster=GPUS):
    """The data of an explanation on eight GPUs."""
    out = tmp_path / "explained.json"
    given = ["plan", "--explain", path, *cluster, "--json", str(out), *more]
    assert main(given) == status
    return json.loads(out.read_text())


def test_a_configuration_is_explained(fsdp, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    data = explained(fsdp, *SHAPE, "--micro-batch", "2", tmp_path=tmp_path)
    assert Strategy.of(data["load_strategy"]) == Strategy.of([
        ["parallel_mode", {"slices": [["data", 8]]}], ["half", {"dtype": "bf16"}], "fsdp", ["micro_batch", {"size": 2}],
    ])  # fmt: skip
    assert data["fits"]
    assert not data["short"]
    kinds = {entry["key"]: entry["kind"] for entry in data["entries"]}
    assert kinds["fsdp_config.fsdp_version"] == "used"
    assert kinds["fsdp_config.fsdp_colour"] == "unknown"
    assert data["cluster"]["devices_per_node"] == 8
    gains = [change["saves_s"] for change in data["changes"]]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0
    for change in data["changes"]:  # each is configuration, of which one change leads back
        changed, mine = Strategy.of(change["load_strategy"]), Strategy.of(data["load_strategy"])
        assert changed != mine
    assert data["best"]["estimate"]["step_s"] <= data["estimate"]["step_s"]
    shown = capsys.readouterr().out
    assert "fsdp_colour" in shown
    assert "What one change gains" in shown


def test_what_does_not_fit_has_status_2_and_changes_that_fit(fsdp, tmp_path):
    data = explained(fsdp, *HUGE, tmp_path=tmp_path, status=2)
    assert not data["fits"]
    assert "short" in data["short"]
    assert data["best"]  # the best plan, or why there is none


def test_what_atorch_would_refuse_is_estimated_and_told(tmp_path):
    """fp8 on a device without it, of the same work."""
    path = tmp_path / "fp8.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: fp8\nfp8_config: {backend: AO}")
    data = explained(str(path), *SHAPE, tmp_path=tmp_path)
    assert any("fp8" in reason for reason in data["refusals"])
    assert data["estimate"]["step_s"] > 0


def test_a_file_of_transformers_has_its_own_model_and_batch(tmp_path):
    """Its defaults give way to options; adapters have frozen weights in 16 bits, without copies."""
    path, out = tmp_path / "sft.yaml", tmp_path / "explained.json"
    path.write_text(
        "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 2\nbf16: true\nuse_peft: true\nlora_r: 32\n"
        "lora_target_modules: [q_proj, v_proj]\ngradient_checkpointing: true\nmax_length: 2048\noptim: adamw_8bit\n"
    )
    assert main(["plan", "--explain", str(path), "--gpu", "rtx3090", "--batch", "8", "--json", str(out)]) in (0, 2, 3)
    data = json.loads(out.read_text())
    assert Strategy.of(data["load_strategy"]) == Strategy.of(["checkpoint", ["micro_batch", {"size": 2}]])
    assert data["setup"]["knobs"] == {"lora": "32:q_proj,v_proj", "optimizer": "adamw8bit"}
    assert data["num_params"] > 8e9


def test_what_is_missing_is_asked_for_by_name(fsdp, capsys):
    assert main(["plan", "--explain", fsdp]) == 1
    told = capsys.readouterr().err
    assert "MODEL" in told
    assert "--gpu NAME, 1 × 8 of which it has" in told
    assert "--batch" in told


CONTRADICTIONS = {
    "batches": ('{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,'
                ' "zero_optimization": {"stage": 2}}', "the global batch is 100"),
    "tensors": ('{"train_batch_size": 64, "zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}}',
                "stages 0 to 2"),
    "precision": ('{"train_batch_size": 64, "bf16": {"enabled": true}, "fp16": {"enabled": true}}', "one of them"),
    "stage": ('{"train_batch_size": 64, "zero_optimization": {"stage": 4}}', "stages are 0 to 3"),
    "offload": ('{"train_batch_size": 64, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}', "stage 0"),
    "mesh": ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
             "parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2}",
             "= 4 processes"),
    "version": ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 3}", "it is 1 or 2"),
    "machines": ("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 3", "3 machines"),
    "word": ("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf17", "fp16, bf16"),
    "size": ('{"train_batch_size": 1e300, "zero_optimization": {"stage": 2}}', "at most 1,099,511,627,776"),
    "tpu": ("distributed_type: XLA\nnum_processes: 8", "TPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_told(name, tmp_path, capsys):
    text, told = CONTRADICTIONS[name]
    path = tmp_path / ("ds.json" if text[0] == "{" else "accelerate.yaml")
    path.write_text(text)
    given = ["plan", "--explain", str(path), "--cluster", "8xA100-80GB", *SHAPE]
    assert main(given if "batch_size" in text else [*given, "--batch", "64"]) == 1
    assert told in capsys.readouterr().err


def read(text, tmp_path):
    path = tmp_path / ("ds.json" if text[0] == "{" else "accelerate.yaml")
    path.write_text(text)
    source = Source.of(str(path))
    return recognised(source).read(source)


def note_of(setup, key):
    return next((entry.kind, entry.note) for entry in setup.entries if entry.key == key)


def test_what_a_trainer_silently_does_is_told(tmp_path):
    """FSDP1's version, its whole model as one unit, its two names for a strategy, and an unquoted no."""
    setup = read(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: no\n"
        "fsdp_config: {reshard_after_forward: SHARD_GRAD_OP}",
        tmp_path,
    )
    assert note_of(setup, "fsdp_config.fsdp_version") == ("assumed", "1, the default")
    alone = read("distributed_type: 'NO'\nnum_processes: 8", tmp_path)
    assert (alone.world_size, note_of(alone, "num_processes")[0]) == (1, "no effect")
    assert note_of(setup, "fsdp_config.fsdp_reshard_after_forward")[0] == "no effect"
    assert "one unit" in note_of(setup, "fsdp_config.fsdp_auto_wrap_policy")[1]
    assert "quote it" in note_of(setup, "mixed_precision")[1]
    assert setup.methods == ("zero2",)


@pytest.mark.parametrize("words", ["--config {}", "{}"])
def test_a_file_of_arguments_beside_a_script_is_read(words, tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 4, "max_length": 512, "bf16": True}))
    given = f"{words.format(path)} --max_length 1024 --fsdp true --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer"
    source = Source.of(f"torchrun --nproc_per_node 8 train.py {given} --data_path d.json")
    setup = recognised(source).read(source)
    assert (setup.micro_batch, setup.seq, setup.methods) == (4, 1024, ("fsdp", ["half", {"dtype": "bf16"}]))
    unknown = {entry.key: entry.note for entry in setup.entries if entry.kind == "unknown"}
    assert unknown == {"--data_path": "an argument of the script itself, which may change anything"}


def test_adapters_of_llama_factory_are_read(tmp_path):
    more = "\nlora_target: q_proj, v_proj\nquantization_bit: 4"
    setup = read(f"per_device_train_batch_size: 1\nfinetuning_type: lora{more}", tmp_path)
    assert setup.knobs == {"lora": "8:q_proj,v_proj", "qlora": True}
    assert read("per_device_train_batch_size: 1\nfinetuning_type: full\nlora_rank: 8", tmp_path).knobs == {}


def test_a_script_that_configures_deepspeed_itself_is_told():
    source = Source.of("deepspeed --num_gpus 8 main.py --per_device_train_batch_size 8 --zero_stage 3 --deepspeed")
    setup = recognised(source).read(source)
    assert note_of(setup, "--deepspeed")[0] == "assumed"
    assert note_of(setup, "--zero_stage")[0] == "unknown"


def test_a_known_key_without_a_value_is_not_unknown(tmp_path):
    more = "\nmax_length: null\nmax_seq_length: 512\nblock_size: 1024"
    setup = read(f"per_device_train_batch_size: 1{more}", tmp_path)
    assert (setup.seq, note_of(setup, "block_size")[0]) == (512, "not expressed")
    assert note_of(setup, "max_length") == ("assumed", "the value says nothing here")


def test_an_option_in_place_of_the_files_value_is_told(tmp_path):
    path = tmp_path / "recipe.json"
    held = {"model_name_or_path": "Qwen/Qwen3-8B", "max_length": 512, "optim": "lion", "lora_r": 8}
    path.write_text(json.dumps({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, **held}))
    more = ["Qwen/Qwen3-0.6B", "--seq", "128", "--optimizer", "adamw8bit", "--lora", "8"]
    data = explained(str(path), *more, tmp_path=tmp_path)
    notes = {entry["key"]: entry["note"] for entry in data["entries"] if "of the option" in entry["note"]}
    assert notes == {
        "model": "the configuration has Qwen/Qwen3-8B; this is for Qwen/Qwen3-0.6B of the option",
        "seq": "the configuration has 512; this is for 128 of the option",
        "optimizer": "the configuration has lion; this is for adamw8bit of the option",
    }


def test_a_key_without_its_prefix_is_named_with_it(tmp_path):
    """Accelerate's launcher takes it, and no plugin reads it."""
    setup = read("distributed_type: FSDP\nnum_processes: 8\nparallelism_config: {tp_size: 2}", tmp_path)
    kind, note = note_of(setup, "parallelism_config.tp_size")
    assert kind == "unknown"
    assert "parallelism_config_tp_size" in note
    assert not setup.axes


def test_offloaded_parameters_take_their_states_along(tmp_path):
    text = '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}'
    setup = read(text, tmp_path)
    assert ["offload", {"optimizer": 1.0, "parameters": 1.0}] in setup.methods
    assert note_of(setup, "zero_optimization.offload_optimizer.device")[0] == "assumed"


@pytest.mark.parametrize("tool", ["accelerate", "deepspeed"])
def test_a_plan_for_a_trainer_is_one_that_it_can_express(tool, tmp_path, capsys):
    folder, out = tmp_path / tool, tmp_path / "plan.json"
    given = ["plan", *LLAMA.split(), "--cluster", "2x8xA100-80GB", "--batch", "64", "--verify", "0", "--json", str(out)]
    assert main([*given, "--export", tool, str(folder), "--launch", "slurm"]) in (0, 3)
    plan = json.loads(out.read_text())
    strategy = Strategy.of(plan["load_strategy"])
    assert target(tool).lacks(strategy) == ()
    source = Source.of(str(folder / "launch.slurm"))
    again = recognised(source).read(source)
    assert again.strategy(16) == strategy
    assert again.batches(16)[2] == 64
    assert "sbatch launch.slurm" in capsys.readouterr().out


def test_a_trainer_that_is_only_read_is_refused_at_once(capsys):
    assert main(["plan", *SHAPE, "--cluster", "8xA100-80GB", "--for", "axolotl"]) == 1
    assert "atorch reads Axolotl's files and writes none" in capsys.readouterr().err


def test_an_unknown_trainer_is_named(capsys):
    assert main(["plan", *SHAPE, "--cluster", "1xA100-80GB", "--for", "acelerate"]) == 1
    assert "did you mean 'accelerate'" in capsys.readouterr().err


ZERO = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
STAGE3 = ZERO | {"zero_optimization": {"stage": 3}}
REDUCED = {
    "accelerate": (FSDP, 2, 2),
    "deepspeed": (json.dumps(STAGE3), 2, 2),
    "fp32": (json.dumps(STAGE3 | {"communication_data_type": "fp32"}), 4, 2),
    "accumulated": (json.dumps(STAGE3 | {"data_types": {"grad_accum_dtype": "fp32"}}), 2, 4),
}


@pytest.mark.parametrize("name", REDUCED)
def test_sharded_gradients_are_reduced_in_the_trainers_type(name, tmp_path):
    text, sent, held = REDUCED[name]
    setup = read(text, tmp_path)
    setup = setup if setup.global_batch else replace(setup, micro_batch=1, global_batch=64)
    shape = TransformerShape(layers=4, hidden=256, heads=4, ffn=512, vocab=1000, seq_len=128)
    profile = transformer_profile(shape, 1, Implementation(itemsize=4.0))
    cost = setup.strategy(8).cost(plain_cost(profile, 64).replace(**setup.traits.cost))
    (reduced,) = (comm for comm in cost.comm if comm.kind == "reduce_scatter")
    assert reduced.num_bytes == sent * profile.num_params
    assert cost.grad_bytes * (1 if cost.whole_grads else 8) == held * profile.num_params
    assert setup.strategy(8).cost(plain_cost(profile, 64)).grad_bytes >= cost.grad_bytes or name == "accumulated"


def test_deepspeeds_buffers_are_counted(tmp_path):
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 2e8}
    assert read(json.dumps(ZERO | {"zero_optimization": zero}), tmp_path).traits.cost["bucket_bytes"] == 8e8
    assert read(json.dumps(STAGE3), tmp_path).traits.cost["bucket_bytes"] == 1e9
    auto = read(json.dumps(ZERO | {"zero_optimization": zero | {"reduce_bucket_size": "auto"}}), tmp_path)
    assert note_of(auto, "zero_optimization.reduce_bucket_size")[0] == "assumed"
    assert "bucket_bytes" not in auto.traits.cost


MEASURED = {  # GiB allocated on 8 B200s: MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md at 4dcaae513ba7
    "--num-layers 12 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 --num-query-groups 8": {
        "--pipeline-model-parallel-size 2 --global-batch-size 16": 66.55,
        "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 16": 60.68,
        "--tensor-model-parallel-size 4 --sequence-parallel --global-batch-size 8": 39.07,
        "--tensor-model-parallel-size 8 --sequence-parallel --global-batch-size 4": 28.29,
    },
    "--num-layers 4 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248 --num-query-groups 8": {
        "--pipeline-model-parallel-size 2 --global-batch-size 16": 87.08,
        "--tensor-model-parallel-size 4 --sequence-parallel --global-batch-size 8": 52.89,
    },
}


@pytest.mark.parametrize(
    ("shape", "split", "measured"),
    [(shape, split, gib) for shape, splits in MEASURED.items() for split, gib in splits.items()],
)
def test_megatrons_memory_is_as_measured(shape, split, measured, tmp_path):
    command = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --group-query-attention --padded-vocab-size 128256 --swiglu "
        "--bf16 --untie-embeddings-and-output-weights --seq-length 4096 --micro-batch-size 1 --hidden-dropout 0 "
        f"--use-distributed-optimizer {shape} {split}"
    )
    data = explained(command, tmp_path=tmp_path, cluster=("--gpu", "B200"))
    assert data["estimate"]["peak_bytes"] / 2**30 == pytest.approx(measured, rel=0.05)


def test_what_a_trainer_cannot_train_is_refused_before_the_search(capsys):
    for trainer in ("megatron", "torchtitan"):
        assert main(["plan", "Qwen/Qwen3-8B", "--lora", "16", "--gpu", "A100-80GB", "--for", trainer]) == 1
        assert "leave lora" in capsys.readouterr().err


def test_files_that_are_there_are_replaced_only_with_force(tmp_path, capsys):
    given = ["plan", *SHAPE, "--gpu", "A100-80GB", "--verify", "0", "--export", "deepspeed", str(tmp_path)]
    assert main(given) == 0
    (tmp_path / "ds_config.json").write_text("mine")
    (tmp_path / "launch.sh").unlink()
    capsys.readouterr()
    assert main(given) == 1
    told = capsys.readouterr()
    assert "ds_config.json, training_arguments.json already" in told.err
    assert not told.out  # nothing was searched
    assert (tmp_path / "ds_config.json").read_text() == "mine"
    assert main([*given, "--force"]) == 0
    assert (tmp_path / "ds_config.json").read_text() != "mine"


def test_a_plan_is_exported_from_python(tmp_path):
    plan = atorch.plan("Qwen/Qwen3-8B", cluster="8xA100-80GB", global_batch=64, seq=2048, target="deepspeed")
    files = plan.export("deepspeed", tmp_path / "new", launcher="slurm")
    assert [path.name for path in files] == ["ds_config.json", "training_arguments.json", "launch.slurm"]
    held = json.loads(files[1].read_text())
    assert held["model_name_or_path"] == "Qwen/Qwen3-8B"
    assert "8 × NVIDIA A100-SXM4-80GB, 64 samples a step" in plan.explain()
    assert len(plan.explain()) < len(plan.explain(verbose=True))
    with pytest.raises(atorch.errors.ArgumentError, match="force=True"):
        plan.export("deepspeed", tmp_path / "new")


MIXTURE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--num-experts 8 --seq-length 128 --swiglu --micro-batch-size 1 --global-batch-size 8 --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size "
)


@pytest.mark.parametrize(("split", "size"), [("4", 8), ("4 --expert-tensor-parallel-size 1", 4), ("8", None)])
def test_experts_are_shared_as_the_configuration_says(split, size, tmp_path):
    data = explained(MIXTURE + split, tmp_path=tmp_path, cluster=("--gpu", "A100-80GB"))
    entry = next(entry for entry in data["entries"] if entry["key"] == "--expert-model-parallel-size")
    assert entry["kind"] == ("used" if size else "not expressed")
    assert (f"expert_parallel(size={size})" in data["strategy"]) == bool(size)
    assert ("expert_parallel" in " ".join(data["best"]["strategy"])) == bool(size)  # both have the same methods
    assert not data["refusals"]


def test_an_option_does_not_say_how_experts_are_shared(fsdp, capsys):
    given = ["plan", "mistralai/Mixtral-8x7B-v0.1", "--explain", fsdp, "--gpu", "H100-80GB", "--batch", "64"]
    assert main([*given, "--include", "expert_parallel"]) == 1
    assert "does not say over how many processes; the configuration does" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["megatron", "torchtitan", "automodel"])
def test_a_plan_with_shared_experts_is_for_trainers_that_have_them(tool, tmp_path, capsys):
    given = f"plan Qwen/Qwen3-30B-A3B --cluster 2x8xH100-80GB --batch 64 --seq 4096 --include {EXPERTS}".split()
    out = tmp_path / "plan.json"
    assert main([*given, "--export", tool, str(tmp_path), "--json", str(out)]) in (0, 3)
    path = tmp_path / (f"{tool}.yaml" if tool == "automodel" else f"{tool}.sh")
    source = Source.of(str(path))
    strategy = Strategy.of(json.loads(out.read_text())["load_strategy"])
    assert EXPERTS in strategy.names()
    assert recognised(source).read(source).strategy(16) == strategy
    assert main([*given, "--for", "accelerate"]) == 1
    assert "the trainer's files have nothing like it" in capsys.readouterr().err
