"""Words of recipes and of hardware: what each is read as, and what is refused."""

from dataclasses import replace

import pytest

from atorch.cost.adapted_profile import ALL_LINEAR
from atorch.errors import ArgumentError
from atorch.units import GiB
from benchmarks.published.adapters import adapters_of
from benchmarks.published.frameworks import Framework
from benchmarks.published.hardware import cluster_described, network_of
from benchmarks.published.layout import framework_for, layout_of
from benchmarks.published.rows import cost_of
from benchmarks.published.words import Recomputation, adapter_of, attention_of, precision_of, recomputation_of
from tests.benchmarks.test_rows import row


def test_nanotron_copies_the_pieces_of_every_rank_under_zero():
    def copied(**given):
        given = {"framework": "nanotron", "global_batch": "4096", "pp": "1", "tp": "1", "dp": "", **given}
        return cost_of(replace(row(**given), knows_runs=False)).extra_s

    # 16 blocks of 4 weights and 2 norms each, a last norm, a head and a table; two buckets of 50 MiB a block, as
    # attention fits into that of the next feed-forward layer, and the head, and the table
    assert copied() == pytest.approx(16 * (99 + 34 + 1) * 5e-6)
    assert copied(n_gpus="8") == pytest.approx(copied() / 2)
    assert copied(zero="0") == 0
    with_stages = copied(n_gpus="32", pp="2")
    assert 0.5 * copied() < with_stages < 0.6 * copied()


@pytest.mark.parametrize(("group", "shared"), [("", 8), ("4", 4), ("all", 16), ("64", 16)])
def test_over_how_many_neighbours_zero_shares_out(group, shared):
    given = {"framework": "InternEvo", "tp": "1", "pp": "1", "dp": "16"}
    assert layout_of(row(zero_group=group, **given)).shared_by == shared
    assert layout_of(row(zero_group=group, **{**given, "zero": "0"})).shared_by == 16


@pytest.mark.parametrize(
    ("words", "hardware", "kernel"),
    [
        ("FlashAttention-3", "H100", "flash3"), ("FA3", "H100", "flash3"), ("flash-attn2", "H100", "flash2"),
        ("flash_attention_2", "A100", "flash2"), ("flash-attn", "A100", "flash2"), ("flash v1", "A100", "flash1"),
        ("SDPA (flash)", "H100", "flash2"), ("sdpa", "A100", "flash2"), ("sdpa (math)", "A100", "eager"),
        ("sdpa (cudnn)", "H100", "cudnn"), ("sdpa (efficient)", "A100", "efficient"), ("xformers", "A100", "efficient"),
        ("flash/triton (yaml attn_impl: flash)", "A100", "triton"), ("flex_attention", "H100", "triton"),
        ("TE", "B200", "cudnn"), ("Transformer Engine", "A100", "flash2"), ("module_replace", "A100", "flash2"),
        ("unfused (Megatron fused softmax)", "A100", "fused_softmax"), ("unfused/Megatron", "A100", "fused_softmax"),
        ("fused mha/softmax", "V100", "fused_softmax"), ("eager", "A100", "eager"), ("unfused", "A100", "eager"),
        ("NotChosen", "A100", "eager"), ("", "V100-SXM2", "eager"), ("", "H100", "flash2"), ("none", "H100", "flash2"),
    ],
)  # fmt: skip
def test_kernels_of_attention(words, hardware, kernel):
    assert attention_of(row(attn=words, hardware=hardware)) == kernel


@pytest.mark.parametrize(
    ("words", "framework", "found"),
    [
        ("", "", Recomputation()), ("none", "", Recomputation()), ("False", "", Recomputation()),
        ("full", "", Recomputation("blocks")), ("True", "", Recomputation("blocks")),
        ("full (HFU reported)", "", Recomputation("blocks")),
        ("every 4 layers", "", Recomputation("blocks", 0.25)), ("selective (2)", "", Recomputation("blocks", 0.5)),
        ("1 of 3 blocks", "", Recomputation("blocks", 1 / 3)), ("selective layer", "", Recomputation("blocks", 0.5)),
        ("selective (op)", "", Recomputation("products")), ("selective op", "", Recomputation("products")),
        ("per-op SAC", "", Recomputation("products")), ("selective", "torchtitan", Recomputation("products")),
        ("selective", "Megatron-LM", Recomputation("attention")), ("core attention", "", Recomputation("attention")),
        ("selective (core_attn)", "", Recomputation("attention")),
    ],
)  # fmt: skip
def test_what_is_recomputed(words, framework, found):
    assert recomputation_of(row(ckpt=words, framework=framework)) == found


@pytest.mark.parametrize("words", ["selective [moe_act]", "block 5", "clever", "full but norms"])
def test_recomputation_that_is_not_known_is_refused_by_its_words(words):
    with pytest.raises(ArgumentError, match="ckpt is '" + words.split("[")[0].strip()):
        recomputation_of(row(ckpt=words))


@pytest.mark.parametrize(
    ("words", "dtype", "scaling"),
    [
        ("BF16", "bfloat16", ""), ("bf16-mixed", "bfloat16", ""), ("fp16 amp O2", "float16", ""),
        ("amp_bf16", "bfloat16", ""),
        ("TF32", "tfloat32", ""), ("fp32", "float32", ""), ("", "bfloat16", ""), ("mixed", "bfloat16", ""),
        ("16-bit", "float16", ""), ("fp8 hybrid", "float8", "tensorwise"), ("bf16 + float8", "float8", "tensorwise"),
        ("bf16 + float8 rowwise", "float8", "rowwise"), ("bf16 + mxfp8_cublas_rceil", "float8", "mx"),
        ("fp8 blockwise", "float8", "blockwise"), ("bf16 + rowwise_with_gw_hp", "float8", "rowwise_gw_hp"),
        ("FP8-CS", "float8", "tensorwise"), ("FP8-MX", "float8", "mx"), ("FP8-DS", "float8", "delayed"),
        ("fp8 (delayed scaling)", "float8", "delayed"), ("FP8-SC", "float8", "blockwise"),
        ("bf16 (BF16Optimizer, fp32 grads)", "bfloat16", ""), ("see scripts (bf16/fp16 amp)", "bfloat16", ""),
    ],
)  # fmt: skip
def test_precisions_by_their_many_names(words, dtype, scaling):
    found = precision_of(row(precision=words))
    assert (found.dtype, found.scaling) == (dtype, scaling)


@pytest.mark.parametrize("words", ["nvfp4", "bf16 + mxfp4", "int8", "fp6", "4-bit", "nf4", "posits"])
def test_numbers_that_are_not_known_are_refused_by_their_name(words):
    with pytest.raises(ArgumentError, match="precision is"):
        precision_of(row(precision=words))


def test_adapters_by_name_and_what_is_sent_in_fewer_bits():
    assert adapter_of(row()) == adapter_of(row(adapters="none")) == ""
    assert adapter_of(row(adapters="QLoRA")) == adapter_of(row(model="Llama 2 7B (QLoRA)")) == "qlora"

    found = adapters_of(row(adapters="DoRA rank=4 all-linear"), Framework())
    assert (found.magnitudes, found.rank, found.targets) == (True, 4, ALL_LINEAR)
    assert adapters_of(row(), Framework()) is None

    assert precision_of(row(precision="bf16 + tensorwise with float8 all-gather")).gathers_float8
    assert precision_of(row(precision="bf16 + float8", fsdp="FSDP2 (float8 all-gather)")).gathers_float8
    assert not precision_of(row(precision="bf16 + rowwise with bfloat16 all-gather")).gathers_float8
    assert precision_of(row(precision="bf16; FSDP mixed_precision=PURE")).reduces_16_bits
    assert not precision_of(row(precision="amp_bf16; FSDP mixed_precision=DEFAULT")).reduces_16_bits


@pytest.mark.parametrize(
    ("given", "rank", "quantized", "apart", "base"),
    [
        ({"adapters": "LoRA"}, 8, False, 0.0, 2.0),
        ({"adapters": "LoRA r=32", "framework": "peft"}, 32, False, 4.0, 2.0),
        ({"adapters": "QLoRA"}, 64, True, 0.0, 2.0),
        ({"adapters": "LoRA rank 16", "precision": "nf4 + bf16"}, 16, True, 0.0, 2.0),
        ({"adapters": "LoRA", "framework": "ATorch", "tp": "1", "pp": "1", "dp": "16"}, 8, False, 4.0, 4.0),
    ],
)
def test_adapters_by_their_words(given, rank, quantized, apart, base):
    found = adapters_of(row(**given), framework_for(row(**given)))
    assert (found.rank, bool(found.quantized_itemsize), found.apart_itemsize) == (rank, quantized, apart)
    assert found.base_itemsize == base
    assert found.targets == (ALL_LINEAR if quantized else {"query", "value"})
    assert precision_of(row(**given)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "per_node"),
    [
        ("A100-80GB (8/node NVSwitch; multi: 800 Gbps IB/node)", 1e11), ("A100-80GB-SXM4 (4x100Gb RoCE/node)", 5e10),
        ("V100-SXM2-16GB (8/node NVLink, 100Gb EDR IB)", 1.25e10), ("A100-80GB (NVLink, 800 Gb/s RDMA/node)", 1e11),
        ("A100-80GB (NVLink, 4x100Gb Omni-Path/node)", 5e10), ("A100-80GB-SXM (8/node, 4x Omni-Path 100)", 5e10),
        ("H100-96GB (NVLink, 400Gb/s RDMA per GPU)", 4e11), ("H200-141GB (NVLink, 400Gb/s CX-7 per GPU)", 4e11),
        ("H100-80GB-SXM", None), ("B200-SXM 8x", None),
    ],
)  # fmt: skip
def test_a_network_is_shared_by_the_devices_of_a_node(text, per_node):
    expected = {} if per_node is None else {"inter_node.bandwidth": per_node / 8}
    assert network_of(text.lower(), 8) == expected


@pytest.mark.parametrize(
    ("text", "memory_gb", "name"),
    [
        ("H100-80GB-SXM (EFA)", 80, "NVIDIA H100 80GB HBM3"), ("A100-40GB PCIe", 40, "NVIDIA A100-PCIE-40GB"),
        ("A100 PCIe", 80, "NVIDIA A100 80GB PCIe"), ("A800-80GB", 80, "NVIDIA A800-SXM4-80GB"),
        ("H100-96GB HBM2e 500W Grand Teton", 96, "NVIDIA H100 96GB HBM2e (500 W)"),
        ("MI300X", 192, "AMD Instinct MI300X"), ("DGX-GB300", None, "NVIDIA GB300"),
        ("Tesla V100-SXM2", 32, "Tesla V100-SXM2-32GB"), ("L4, 8/node", 24, "NVIDIA L4"),
        ("H100 PCIe", 80, "NVIDIA H100 PCIe"), ("Tesla P100", 16, "Tesla V100-SXM2-16GB"),
        ("", 40, "NVIDIA A100-SXM4-40GB"), ("", None, "NVIDIA A100-SXM4-80GB"),
    ],
)  # fmt: skip
def test_the_nearest_known_device(text, memory_gb, name):
    assert cluster_described(text, memory_gb, 16, None).device.name == name


def test_devices_by_their_data_sheets():
    device = cluster_described("8x A10G", 24, 8, 8).device
    assert (device.peak_flops["bfloat16"], device.memory_bandwidth) == (7e13, 6e11)
    assert cluster_described("", 64, 8, 8).device.memory_bytes == pytest.approx(0.95 * 64 * GiB)

    clusters = {name: cluster_described(name, None, 144, None) for name in ("B200", "GB200 NVL72", "B300", "GB300")}
    assert len({each.device.name for each in clusters.values()}) == 4
    assert len({each.device.peak_flops["bfloat16"] for each in clusters.values()}) == 2
    assert {name: each.devices_per_node for name, each in clusters.items() if "G" in name} == {
        "GB200 NVL72": 72,
        "GB300": 72,
    }

    assert cluster_described("A100-40GB PCIe", 40, 8, 8).intra_node.bandwidth == 3.15e10
    assert cluster_described("A100 PCIe with NVLink", 40, 8, 8).intra_node.bandwidth == 3e11

    clusters = [cluster_described("H100", 80, *counts) for counts in ((64, 8), (64, 4), (2, 8), (9, None))]
    assert [(each.num_nodes, each.devices_per_node) for each in clusters] == [(8, 8), (16, 4), (1, 2), (2, 8)]


@pytest.mark.parametrize("text", ["abacus", "B400", "MI300A", "MI455X", "something new"])
def test_a_device_that_is_not_known_is_refused_by_its_name(text):
    with pytest.raises(ArgumentError, match=text):
        cluster_described(text, 80, 8, 8)
