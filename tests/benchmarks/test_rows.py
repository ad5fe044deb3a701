"""Rows of tables as the planner's state: layouts, shapes, what frameworks do, and why a row is refused."""

import csv
from dataclasses import replace

import pytest

from atorch.cost import peak_memory
from atorch.errors import ArgumentError
from atorch.units import GiB
from benchmarks.published.memory import comparable_bytes, fits, memory_of, metric_of
from benchmarks.published.models import known_dimensions
from benchmarks.published.rows import GIVEN, Row, cluster_of, cost_of, layout_of, profile_of, read_rows, shape_of

RUN = dict.fromkeys(GIVEN, "") | {
    "row_id": "a-0001", "model": "my-llama", "layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "8",
    "ffn": "8192", "vocab": "128256", "seq_len": "4096", "arch": "llama swiglu rmsnorm", "hardware": "H100-80GB SXM",
    "gpu_mem_gb": "80", "gpus_per_node": "8", "n_gpus": "16", "dp": "4", "tp": "2", "pp": "2", "sp": "True",
    "micro_batch": "2", "global_batch": "64", "precision": "bf16", "ckpt": "none", "attn": "flash-attn2", "zero": "1",
    "framework": "Megatron-LM",
}  # fmt: skip


def row(metric="torch max allocated", **given):
    return Row({**RUN, **given}, {"mem_metric": metric, "peak_mem_gib": "", "status": "ok"})


def test_a_layout_from_what_is_given():
    layout = layout_of(row())
    assert (layout.devices, layout.data, layout.tensor, layout.pipeline, layout.zero) == (16, 4, 2, 2, 1)
    assert (layout.micro_batch, layout.num_micro_batches, layout.global_batch) == (2, 8, 64)
    assert layout.splits_norms
    assert layout_of(row(dp="", tp="")).data == 8
    assert layout_of(row(n_gpus="")).devices == 16
    assert layout_of(row(global_batch="", grad_accum="3")).global_batch == 4 * 2 * 3
    assert layout_of(row(micro_batch="", grad_accum="4")).micro_batch == 4


@pytest.mark.parametrize(
    ("fsdp", "zero", "level", "keeps"),
    [
        ("FULL_SHARD", "", 3, False), ("SHARD_GRAD_OP", "3", 3, True), ("none", "1.0", 1, False), ("", "", 0, False),
        ("zero2", "", 2, False), ("zero2_fsdp", "2", 3, True), ("zero1", "", 1, False), ("none", "2", 2, True),
        ("DDP", "", 0, False), ("HYBRID_SHARD", "", 3, False),
    ],
)  # fmt: skip
def test_sharding_by_its_many_names(fsdp, zero, level, keeps):
    layout = layout_of(row(fsdp=fsdp, zero=zero))
    assert (layout.zero, layout.keeps_gathered) == (level, keeps)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"layers": ""}, "layers of model 'my-llama' not given"),
        ({"vocab": ""}, "nor are params_b"),
        ({"tp": "3"}, "do not divide 16 devices"),
        ({"micro_batch": "", "global_batch": ""}, "two are needed"),
        ({"global_batch": "2"}, "less than dp 4 micro-batches of 2"),
        ({"hidden": "wide"}, "hidden is 'wide'; it is a number"),
        ({"heads": "-8"}, "at least 0"),
        ({"hidden": "16"}, "less than heads"),
        ({"n_gpus": "", "dp": ""}, "neither n_gpus nor dp"),
    ],
)
def test_a_row_that_cannot_be_understood_says_why(given, reason):
    with pytest.raises(ArgumentError, match=reason):
        cost_of(row(**given))


def test_hardware_that_is_not_known_is_the_nearest():
    assert "H100" in cluster_of(row()).device.name
    assert (cluster_of(row()).num_nodes, cluster_of(row()).devices_per_node) == (2, 8)
    assert cluster_of(row(hardware="abacus", gpu_mem_gb="40")).device.name == "NVIDIA A100-SXM4-40GB"


def test_named_models_fill_in_what_is_blank():
    blank = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "arch"), "")
    shape = shape_of(row(model="Llama-2 7B", **blank))
    assert (shape.layers, shape.hidden, shape.ffn, shape.vocab, shape.seq_len) == (32, 4096, 11008, 32000, 4096)
    reduced = shape_of(row(model="deepseek-v3 (reduced to 4 layers)", **{**blank, "layers": "4"}))
    assert (reduced.layers, reduced.experts.dense_layers, reduced.latent.kv_rank) == (4, 1, 512)
    assert profile_of(row(model="Mixtral 8x7B", **blank)).num_params / 1e9 == pytest.approx(46.7, rel=1e-3)
    assert known_dimensions("nobody's model") == {}


def test_a_vocabulary_follows_from_the_number_of_parameters():
    whole = profile_of(row()).num_params / 1e9
    assert shape_of(row(vocab="", params_b=str(whole))).vocab == 128256


@pytest.mark.parametrize(
    ("arch", "gated", "tied", "bias", "learned"),
    [
        ("llama swiglu rmsnorm tie_emb=True", True, True, False, False),
        ("llama swiglu rmsnorm tie_emb=False", True, False, False, False),
        ("MPT GPT-style gelu, learned pos, tied emb, no bias", False, True, False, True),
        ("GPT (Megatron) gelu", False, True, True, True),
    ],
)
def test_architectures_in_words(arch, gated, tied, bias, learned):
    shape = shape_of(row(arch=arch))
    assert (shape.gated, shape.tied, shape.bias, shape.learned_positions) == (gated, tied, bias, learned)


def test_precisions_are_mixed_as_frameworks_mix_them():
    def itemsizes(**given):
        cost = cost_of(row(**given))
        return cost.param_itemsize, cost.grad_itemsize, cost.master_itemsize, cost.optim_itemsize

    assert itemsizes() == (2, 4, 4, 8)  # 18 bytes a parameter
    assert itemsizes(framework="Composer/llm-foundry") == (4, 4, 0, 8)
    assert itemsizes(framework="InternEvo") == (2, 2, 4, 8)
    assert itemsizes(precision="fp32") == (4, 4, 0, 8)
    assert itemsizes(framework="something new") == (2, 4, 4, 8)
    # One that leaves splits to another is that other where the model is split.
    assert itemsizes(framework="ATorch") == (2, 2, 4, 8)
    assert itemsizes(framework="ATorch", tp="1", pp="1", dp="16") == (4, 4, 0, 8)


def test_a_figure_is_compared_with_what_it_is_of():
    assert metric_of(row()) == "allocated"
    assert metric_of(row("torch max_memory_allocated or reserved")) == "reserved"
    assert metric_of(row("")) == "reserved"
    assert metric_of(row("nvidia-smi memory.used")) == "driver"
    cost = cost_of(row())
    memory = peak_memory(cost)
    assert comparable_bytes(row(), cost) == memory.total
    assert comparable_bytes(row(""), cost) == memory.reserved
    assert comparable_bytes(row("nvidia-smi"), cost) > memory.reserved
    # A framework that logs its first device's memory: no logits there.
    first = row(framework="nanotron", tp="1", sp="", dp="8", pp="2", micro_batch="8")
    assert memory_of(first, cost_of(first)).stage == 0


def test_what_fits_leaves_a_reserve():
    cost = cost_of(row())
    memory = peak_memory(cost)
    assert fits(cost, 2 * memory.reserved)
    assert not fits(cost, memory.total)
    assert not fits(replace(cost, batch_size=1e4 * cost.batch_size), 80 * GiB)


def test_notes_are_not_read(tmp_path):
    path = tmp_path / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*RUN, "step_time_s", "status", "notes"])
        writer.writeheader()
        writer.writerow({**RUN, "step_time_s": "1.5", "status": "ok", "notes": "the answer"})
    (found,) = read_rows(path)
    assert found.result("step_time_s") == 1.5
    assert "notes" not in {**found.given, **found.measured}
    assert found.row_id == "a-0001"
