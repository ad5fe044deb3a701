"""Rows of tables as the planner's state: layouts, shapes, what frameworks do, and why a row is refused."""

import csv
from dataclasses import replace

import pytest

from atorch.cost import StepTimes, peak_memory, step_time
from atorch.cost.uncertainty import Uncertainty
from atorch.errors import ArgumentError
from atorch.units import GiB
from benchmarks.known_jobs import TABLE
from benchmarks.published.evaluate import Case
from benchmarks.published.layout import layout_of
from benchmarks.published.memory import comparable_bytes, fits, memory_of, metric_of
from benchmarks.published.models import known_dimensions
from benchmarks.published.rows import cluster_of, cost_of, profile_of
from benchmarks.published.shapes import shape_of
from benchmarks.published.table import GIVEN, MEASURED, Row, read_rows

RUN = dict.fromkeys(GIVEN, "") | {
    "row_id": "a-0001", "model": "my-llama", "layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "8",
    "ffn": "8192", "vocab": "128256", "seq_len": "4096", "arch": "llama swiglu rmsnorm", "hardware": "H100-80GB SXM",
    "gpu_mem_gb": "80", "gpus_per_node": "8", "n_gpus": "16", "dp": "4", "tp": "2", "pp": "2", "sp": "True",
    "micro_batch": "2", "global_batch": "64", "precision": "bf16", "ckpt": "none", "attn": "flash-attn2", "zero": "1",
    "framework": "Megatron-LM",
}  # fmt: skip
BLANK = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "arch"), "")


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

    layout = layout_of(row(pp="1", dp="", global_batch=""))
    assert (layout.micro_batch, layout.num_micro_batches) == (2, 1)

    whole, hybrid = (cost_of(row(fsdp=name, tp="", pp="", sp="", dp="")) for name in ("FULL_SHARD", "HYBRID_SHARD"))
    assert (whole.param_shards, hybrid.param_shards) == (16, 8)
    assert dict(hybrid.axes) == {"zero": 8, "data": 2}
    assert {comm.axis for comm in hybrid.comm} >= {("data",)}


@pytest.mark.parametrize(
    ("fsdp", "zero", "level", "keeps"),
    [
        ("FULL_SHARD", "", 3, False), ("SHARD_GRAD_OP", "3", 3, True), ("none", "1.0", 1, False), ("", "", 0, False),
        ("zero2", "", 2, False), ("zero2_fsdp", "2", 3, True), ("zero1", "", 1, False), ("none", "2", 2, False),
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
        ({"micro_batch": "", "global_batch": "", "pp": "1", "dp": ""}, "two are needed"),
        ({"global_batch": "2"}, "less than dp 4 micro-batches of 2"),
        ({"hidden": "wide"}, "hidden is 'wide'; it is a number"),
        ({"heads": "-8"}, "at least 0"),
        ({"layers": "999999999"}, "no more than 4096 is believed"),
        ({"layers": "0.5"}, "a whole number"),
        ({"zero": "7"}, "a level from 0 to 3"),
        ({"micro_batch": "0.5", "global_batch": ""}, "two are needed"),
        ({"micro_batch": "0.5"}, "at least one sequence"),
        ({"kv_heads": "64"}, "heads is 32, which is less than kv_heads"),
        ({"ep": "8"}, "how many experts"),
        ({"arch": "8 experts top-2", "ep": "3"}, "ep 3 does not divide 8 experts"),
        ({"arch": "8 experts top-2", "ep": "2", "tp": "4", "dp": "2"}, "ep 2 with tp 4: how tensor ranks divide"),
        ({"arch": "8 experts top-9"}, "9 of 8 experts"),
        ({"tp": "16", "pp": "1", "dp": "1", "hidden": "8", "heads": "8"}, "tp 16 leaves nothing of 8"),
        ({"hidden": "16"}, "less than heads"),
        ({"n_gpus": "", "dp": ""}, "neither n_gpus nor dp"),
        ({"micro_batch": ""}, "of a pipeline's micro_batch and grad_accum one is needed"),
        ({"hardware": "abacus"}, "hardware is 'abacus'"),
        ({"fsdp": "cleverly"}, "fsdp is 'cleverly'"),
        ({"attn": "hyena"}, "attn is 'hyena'"),
        ({"ckpt": "selective [moe_act]"}, "ckpt is 'selective .moe_act.'"),
        ({"precision": "nvfp4"}, "of nvfp4 nothing is known"),
        ({"adapters": "prefix tuning"}, "'prefix tuning' trains a part of the model"),
        ({"model": "Llama 2 7B frozen"}, "'frozen' trains a part"),
        ({"model": "Qwen9 300B-A30B"}, "how many experts"),
    ],
)
def test_a_row_that_cannot_be_understood_says_why(given, reason):
    with pytest.raises(ArgumentError, match=reason):
        cost_of(row(**given)), cluster_of(row(**given))


def test_what_is_blank_is_filled_in():
    assert "H100" in cluster_of(row()).device.name
    assert (cluster_of(row()).num_nodes, cluster_of(row()).devices_per_node) == (2, 8)
    assert cluster_of(row(hardware="", gpu_mem_gb="40")).device.name == "NVIDIA A100-SXM4-40GB"

    shape = shape_of(row(model="Llama-2 7B", **BLANK))
    assert (shape.layers, shape.hidden, shape.ffn, shape.vocab, shape.seq_len) == (32, 4096, 11008, 32000, 4096)
    reduced = shape_of(row(model="deepseek-v3 (reduced to 4 layers)", **{**BLANK, "layers": "4"}))
    assert (reduced.layers, reduced.experts.dense_layers, reduced.latent.kv_rank) == (4, 1, 512)
    assert profile_of(row(model="Mixtral 8x7B", **BLANK)).num_params / 1e9 == pytest.approx(46.7, rel=1e-3)
    assert known_dimensions("nobody's model") == {}

    whole = profile_of(row()).num_params / 1e9
    assert shape_of(row(vocab="", params_b=str(whole))).vocab == 128256

    assert shape_of(row(heads="", kv_heads="", hidden="14400")).heads == 120
    assert shape_of(row(heads="", kv_heads="", hidden="13824")).heads == 108


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama 2 (13B)", 13.0), ("meta-llama/Meta-Llama-3-8B", 8.03), ("Llama-3.1-405B", 405.9), ("GPT-3 175B", 174.6),
        ("gpt2", 0.124), ("OPT-66b", 65.7), ("BLOOM-176B", 176.2), ("MPT-760m", 0.76), ("DeepSeek-V3", 671.0),
        ("GPT-NeoX-20B", 20.6), ("MT-NLG 530B", 529.6), ("GPT 39.1B", 39.1), ("TinyLlama 1.1B", 1.1), ("Yi-34B", 34.4),
    ],
)  # fmt: skip
def test_public_models_have_the_parameters_that_their_authors_say(name, billions):
    assert profile_of(row(model=name, **BLANK)).num_params / 1e9 == pytest.approx(billions, rel=5e-3)


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


def test_outputs_hold_what_blocks_cached_where_examples_leave_caches_on():
    """Keys and values of two passes, whatever is recomputed. A search's own example has its own tokens."""
    model = {**BLANK, "model": "Llama-2-7B", "n_gpus": "8", "dp": "8", "fsdp": "FULL_SHARD", "micro_batch": "4"}
    model |= {"tp": "1", "pp": "1", "sp": "", "ckpt": "full", "precision": "bf16 amp", "global_batch": "32"}
    held = [peak_memory(cost_of(row(**model, framework=name))).total for name in ("ATorch", "transformers")]
    bytes_of_a_token = 2 * 32 * 2 * 4096 * 2
    assert held[0] - held[1] == pytest.approx(4 * 4096 * bytes_of_a_token, rel=0.05)
    assert shape_of(row(**model, framework="ATorch")).seq_len == 4096
    assert shape_of(row(**{**model, "precision": "amp_native"}, framework="ATorch")).seq_len == 2048
    assert shape_of(row(**{**model, "precision": "amp_native", "seq_len": "1024"}, framework="ATorch")).seq_len == 1024
    assert shape_of(row(**{**model, "precision": "amp_native"}, framework="transformers")).seq_len == 4096


def test_what_runs_beside_products_is_as_frameworks_do_it():
    def traits(**given):
        cost = cost_of(row(**given))
        return cost.tensor_beside, cost.adds_in_products, cost.fp8_once, cost.sends_beside

    assert traits() == ("weights", True, True, False)
    assert traits(vpp="2") == ("weights", True, True, True)
    assert traits(framework="Megatron-Core (NeMo)") == ("both", True, True, False)
    assert traits(framework="Megatron-LM (2022)") == ("weights", False, False, False)
    assert traits(framework="Megatron-DeepSpeed", vpp="2") == ("nothing", False, False, False)
    assert traits(framework="torchtitan", tp_overlap="yes") == ("chunks", False, False, False)


def test_a_figure_is_compared_with_what_it_is_of_and_fits_beside_a_reserve():
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

    cost = cost_of(row())
    memory = peak_memory(cost)
    assert fits(cost, 2 * memory.reserved)
    assert not fits(cost, memory.total)
    assert not fits(replace(cost, batch_size=1e4 * cost.batch_size), 80 * GiB)


def written(path, *rows):
    """The rows of a table with these rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for given in rows for name in given)))
        writer.writeheader()
        writer.writerows(rows)
    return read_rows(path)


def test_notes_are_not_read(tmp_path):
    (found,) = written(tmp_path / "table.csv", {**RUN, "step_time_s": "1.5", "status": "ok", "notes": "the answer"})
    assert found.result("step_time_s") == 1.5
    assert "notes" not in {**found.given, **found.measured}
    assert found.row_id == "a-0001"


def test_notes_tell_of_adapters_asynchronous_tensor_parallelism_and_versions_alone(tmp_path):
    named = ("Table 4; AsyncTP", "1F1B; asynchronous tensor parallelism", "Table 4; vanilla TP", "async tpu")
    first, second, third, fourth, *others = written(
        tmp_path / "table.csv",
        {"row_id": "a", "notes": "LoRA=Yes; method FSDP", "source_file": "me/mine:runs.md"},
        {"row_id": "b", "notes": "LoRA=No; method FSDP"},
        {"row_id": "c", "notes": "A | torchtitan version: `0.0.2` ", "framework": "torchtitan+torchao"},
        {"row_id": "d", "notes": "torchtitan version: `0.0.2` | #### B", "framework": "torchtitan"},
        *({"row_id": notes, "notes": notes} for notes in named),
    )
    assert third.text("framework") == "torchtitan+torchao (torchtitan 0.0.2)"
    assert fourth.text("framework") == "torchtitan"
    assert (first.text("adapters"), second.text("adapters")) == ("lora", "")
    assert [each.text("tp_overlap") for each in (first, *others)] == ["", "yes", "yes", "", ""]
    assert (first.publisher, second.publisher) == ("me/mine", "table")


@pytest.mark.parametrize(
    ("given", "level", "shared_by"),
    [
        ({"zero": "ZeRO-3", "pp": "", "tp": ""}, 3, 16), ({"zero": "stage 2"}, 2, 4), ({"zero": "True"}, 1, 4),
        ({"fsdp": "HSDP", "tp": "2", "pp": "", "dp": ""}, 3, 4), ({"fsdp": "FSDP2"}, 3, 4), ({"fsdp": "2"}, 3, 2),
        ({"fsdp": "1", "zero": ""}, 0, 4), ({"zero": "distributed optimizer"}, 1, 4),
    ],
)  # fmt: skip
def test_shards_over_all_or_over_neighbours(given, level, shared_by):
    layout = layout_of(row(**given))
    assert (layout.zero, layout.shared_by) == (level, shared_by)


@pytest.mark.parametrize(
    ("words", "share", "keeps"),
    [
        ("none", 0, "inputs"), ("full", 1, "inputs"), ("every 4 layers", 0.25, "inputs"),
        ("core attention", 1, "scores"), ("selective op", 1, "every second"),
    ],
)  # fmt: skip
def test_recomputation_of_what_was_read(words, share, keeps):
    cost = cost_of(row(ckpt=words))
    assert (cost.recompute, cost.recompute_keeps) == (share, keeps)


@pytest.mark.parametrize(
    ("attention", "hardware", "flash"),
    [("FlashAttention-3", "H100", True), ("", "V100-SXM2", False), ("torch math", "H100", False)],
)
def test_scores_are_written_where_no_flash_attention_is(attention, hardware, flash):
    blocks = [each for each in profile_of(row(attn=attention, hardware=hardware)).segments if each.is_block]
    scores = 4096 * 4096 * 32 * 2
    assert (blocks[0].inside.saved_bytes < scores) == flash


def test_experts_in_words():
    for given in ({"arch": "moe 8 experts top-2"}, {"model": "my 8x1B"}):
        shape = shape_of(row(**given))
        assert (shape.experts.count, shape.experts.top_k, shape.experts.ffn) == (8, 2, 8192)
    whole, spread = (peak_memory(cost_of(row(arch="moe, 8 experts", ep=ep, zero=""))) for ep in ("1", "4"))
    assert spread.parameters < whole.parameters
    with pytest.raises(ArgumentError, match="how many experts"):
        shape_of(row(arch="moe"))

    assert cost_of(row(arch="8 experts top-2", ep="2")).expert_capacity == 0
    assert cost_of(row(arch="8 experts top-2, capacity factor 1.25", ep="2")).expert_capacity == 1.25


def test_published_runs_with_experts_are_estimated_as_well_as_the_documents_say():
    """docs/known_jobs.md, "Expert parallelism": 11 of 24 runs in their bands, 25 % off in the mean."""
    errors, held = [], 0
    for run in read_rows(TABLE):
        if run.number("ep"):
            case = Case.of(run)
            times = StepTimes(case.cluster)
            doubt, step_s = Uncertainty(case.cluster, times), times.of(case.cost).total_s
            low, high = doubt.band(step_s, doubt.shares(case.cost))
            held += low <= case.measured_s <= high
            errors.append(abs(step_s / case.measured_s - 1))
    assert (len(errors), held) == (24, 11)
    assert sum(errors) / len(errors) < 0.26


def test_what_compilers_and_recomputation_save():
    plain, fused = (row(framework="transformers", compile=value) for value in ("False", "True"))
    assert cost_of(fused).ops_scale < cost_of(plain).ops_scale
    assert peak_memory(cost_of(fused)).total < peak_memory(cost_of(plain)).total

    cluster = cluster_of(row())
    ways = ("none", "core attention", "selective op", "full")
    none, attention, second, full = (step_time(cost_of(row(ckpt=ckpt)), cluster).matmul_s for ckpt in ways)
    assert none < attention < second < full


def test_torchtitan():
    layout = layout_of(row(framework="torchtitan", micro_batch="", pp="4", tp="1", sp=""))
    assert (layout.micro_batch, layout.num_micro_batches) == (4, 4)

    in_pipeline, by_itself = (row(framework="torchtitan", fsdp="FSDP2", **more) for more in ({}, {"pp": "1", "dp": ""}))
    kept = [layout_of(each).keeps_gathered for each in (in_pipeline, by_itself, row(fsdp="FSDP2"))]
    assert kept == [True, False, False]
    piped, alone = cost_of(in_pipeline), cost_of(by_itself)
    assert (piped.whole_grads, piped.grad_shards, alone.whole_grads) == (True, 1, False)
    assert not any(each.per_micro_batch for each in piped.comm)
    assert all(each.per_micro_batch for each in alone.comm)

    def of_loss(**given):
        usual = {"tp": "1", "pp": "1", "dp": "16", "framework": "torchtitan"}
        head = profile_of(row(**{**usual, **given})).segments[-1]
        logits = head.matmuls[0].rows * head.matmuls[0].columns
        return (head.inside.saved_bytes / logits, head.working_bytes / logits)

    assert of_loss() == (4, 8)
    assert of_loss(compile="True") == (2, 2)
    assert of_loss(compile="True", framework="torchtitan 9dec370 / torch 2.6 nightly") == (4, 8)
    assert of_loss(compile="True", tp="8", dp="2") == (4, 12)


@pytest.mark.parametrize("column", [name for name in GIVEN if name != "row_id"])
def test_no_blank_column_but_those_of_the_shape_and_the_batch_is_needed(column):
    given = row(**{column: ""})
    if column in ("layers", "hidden", "seq_len", "vocab", "global_batch", "micro_batch"):
        with pytest.raises(ArgumentError, match=column):
            cost_of(given)
    else:
        assert peak_memory(cost_of(given)).total > 0


def test_what_was_measured_may_be_missing_or_no_number():
    def measured(**figures):
        return Row(RUN, dict.fromkeys(MEASURED, "") | figures)

    assert measured(step_time_s="OOM").result("step_time_s") is None
    assert measured(step_time_s="0").result("step_time_s") is None
    assert measured(step_time_s="1,234.5").result("step_time_s") == 1234.5
    assert [measured(status=words).status for words in ("OK", "Success", "Out of memory", "timeout", "")] == [
        "ok", "ok", "oom", "timeout", "",
    ]  # fmt: skip
    assert measured(step_time_s="2.0").status == "ok"


@pytest.mark.parametrize(("words", "value"), [("8k", 8192), ("1,024", 1024), ("4096 tokens", 4096), ("~2048.0", 2048)])
def test_numbers_as_people_write_them(words, value):
    assert row(seq_len=words).number("seq_len") == value


def test_numbers_are_kept_and_reduced_in_as_many_bits_as_frameworks_do():
    def of(name, **given):
        return cost_of(row(framework=name, tp="1", pp="1", sp="", dp="16", ckpt="full", **given))

    replicas, plain = of("ATorch", fsdp="no_shard", zero="0"), of("Composer", fsdp="no_shard", zero="0")
    assert replicas.boundary_bytes == 2 * plain.boundary_bytes
    sharded = of("ATorch", fsdp="FULL_SHARD")
    assert sharded.boundary_bytes == plain.boundary_bytes
    assert (sharded.param_itemsize, sharded.gathered_itemsize) == (4, 2)

    def reduced(name):
        sends = cost_of(row(framework=name, tp="1", pp="1", sp="", dp="16", fsdp="FULL_SHARD")).comm
        return sum(each.num_bytes for each in sends if each.kind == "reduce_scatter")

    assert reduced("Composer") == pytest.approx(2 * reduced("ATorch"))

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


@pytest.mark.parametrize(
    ("words", "framework", "scaling"),
    [
        ("bf16", "torchtitan", None), ("bf16 + float8", "torchtitan", "tensorwise"),
        ("fp8 hybrid", "Megatron-LM", "delayed"), ("bf16 + mxfp8_cublas", "torchtitan", "blockwise"),
    ],
)  # fmt: skip
def test_fp8_is_of_products_alone_and_scaled_as_the_recipe_says(words, framework, scaling):
    cost = cost_of(row(precision=words, framework=framework))
    assert (cost.dtype, cost.fp8, cost.fp8_outside) == ("bfloat16", scaling, False)


def test_megatron_and_nemo():
    head = profile_of(row(framework="Megatron-LM", vocab="50257", tp="2")).segments[-1]
    assert head.matmuls[0].columns == 50432

    layout = layout_of(row(framework="Megatron Bridge (NeMo)", sp="", zero=""))
    assert (layout.splits_norms, layout.zero) == (True, 1)
    assert not layout_of(row(framework="NeMo", sp="False")).splits_norms
    assert not layout_of(row(sp="")).splits_norms
    assert layout_of(row(framework="NeMo AutoModel", sp="", zero="")).zero == 0
