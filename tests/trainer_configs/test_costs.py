"""Costs in which a trainer differs from atorch, against its source."""

import json

import pytest

from atorch.cli import main
from atorch.cost import peak_memory, plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.trainer_configs import Source, recognised

SHAPE = TransformerShape(layers=4, hidden=1024, heads=16, ffn=4096, vocab=1000, seq_len=128)
PROFILE = transformer_profile(SHAPE, 1, Implementation(itemsize=4.0))
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {%s}"
ZERO = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config: {%s}"


def read(text, path):
    path.write_text(text)
    source = Source.of(str(path))
    return recognised(source).read(source)


def cost_of(setup, batch=64):
    return setup.strategy(8).cost(plain_cost(PROFILE, batch).replace(**setup.traits.cost))


def stage_2(path, micro=8, **zero):
    batches = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": micro}
    values = batches | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, **zero}}
    return cost_of(read(json.dumps(values), path))


def test_deepspeeds_stage_2_has_whole_parameters_alone(tmp_path):
    """The 16-bit parameters are whole, without shards beside: 2 + 14 / N bytes of each, and gradients apart."""
    path = tmp_path / "zero.json"
    memory, num_params = peak_memory(stage_2(path, reduce_bucket_size=0)), PROFILE.num_params
    assert memory.parameters == 2 * num_params
    assert memory.masters + memory.optimizer == 12 * num_params / 8
    assert memory.transient == 0
    cost = stage_2(path, micro=1)
    sent = {comm.kind: (comm.per_micro_batch, comm.overlap) for comm in cost.comm}
    assert sent == {"all_reduce": (True, 0.0), "all_gather": (False, 0.0)}
    assert any(comm.overlap for comm in stage_2(path, overlap_comm=True).comm)


def test_gradients_follow_deepspeeds_optimizer_to_the_host(tmp_path):
    there = peak_memory(stage_2(tmp_path / "zero.json", micro=1, offload_optimizer={"device": "cpu"}))
    here = peak_memory(stage_2(tmp_path / "zero.json", micro=1))
    assert (there.gradients, there.optimizer) == (0, 0)
    assert here.gradients > 0


def test_fsdp_itself_casts_shards_of_fp32(tmp_path):
    """FSDP2's parameters, and gradients of theirs, have the type that they were loaded in."""
    cost = cost_of(read(FSDP % "fsdp_version: 2", tmp_path / "a.yaml"), batch=8)
    assert (cost.param_itemsize, cost.grad_itemsize, cost.master_itemsize) == (4.0, 4.0, 0.0)


def test_products_of_transformers_cast_the_norms_output_under_autocast():
    """torch saves 66.1 bytes a token and hidden element of Llama's blocks, of fp32 weights under autocast in bf16."""
    keep = Implementation(itemsize=4.0, fused_norm=False, fused_activation=False, fused_projections=False)
    (_, block, _) = transformer_profile(SHAPE, 1, keep).in_autocast
    assert block.saved_bytes / 128 / 1024 == pytest.approx(66.1, rel=0.02)


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        (FSDP % "fsdp_version: 2, fsdp_cpu_ram_efficient_loading: false", True),
        (FSDP % "fsdp_version: 2, fsdp_cpu_ram_efficient_loading: true", False),
        (ZERO % "zero_stage: 3, zero3_init_flag: false", True),
        (ZERO % "zero_stage: 2, zero3_init_flag: false", False),
    ],
)
def test_loading_the_whole_model_on_every_process_is_told(text, tells, tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    shape = "--layers 4 --hidden 256 --heads 4 --ffn 512 --vocab 1000 --seq 128 --batch 8 --gpu A100-80GB"
    assert main(["plan", "--explain", str(path), *shape.split()]) == 0
    assert ("every process loads" in " ".join(capsys.readouterr().out.split())) == tells
