"""Public models by their names on the Hub, and how they are trained, in closed form."""

import json
import re

import pytest
from torch import nn

import atorch
from atorch.auto.plan_for_cluster import plan_for
from atorch.auto.planner.request import RECIPE, PlanRequest
from atorch.auto.sources import shapes, source_of
from atorch.cluster.spec import ClusterSpec
from atorch.cost import peak_memory, plain_cost
from atorch.cost.adapted_profile import ALL_LINEAR, NF4_ITEMSIZE
from atorch.cost.transformer import TransformerShape, transformer_profile
from atorch.errors import ArgumentError, StrategyError

GPU = ClusterSpec.load("1xH100-80GB")
QWEN = "Qwen/Qwen3-8B"
CONFIG = {
    **{"model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
    "tie_word_embeddings": False,
}
SMALL = {**CONFIG, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100}


def profile(named: str = QWEN, **knobs):
    request = PlanRequest(**knobs)
    return source_of(named, None, {}, request).subject(4096, GPU).profile


@pytest.mark.parametrize(
    ("named", "published"),  # parameters of the files on the Hub
    [
        (QWEN, 8_190_735_360), ("Qwen/Qwen3-4B", 4_022_468_096), ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512), ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248), ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824), ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096), ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("google/gemma-2-2b", 2_614_341_888), ("HuggingFaceTB/SmolLM2-135M", 134_515_008),
        ("microsoft/phi-4", 14_659_507_200), ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384),
        ("EleutherAI/pythia-1b", 1_011_781_632), ("microsoft/phi-2", 2_779_683_840),
        ("facebook/opt-1.3b", 1_315_758_080), ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224),
        ("deepseek-ai/DeepSeek-V3", 671_026_419_200), ("openai/gpt-oss-20b", 20_914_757_184),
    ],
)  # fmt: skip
def test_shapes_have_as_many_parameters_as_were_published(named, published):
    shape = shapes.shape_of(shapes.known(named), 2048)
    assert transformer_profile(shape).num_params == pytest.approx(published, rel=1.2e-3)


@pytest.mark.parametrize(
    ("named", "billions"),  # as publishers write it
    [
        ("zai-org/GLM-4.5", 355), ("zai-org/GLM-4.5-Air", 106), ("zai-org/GLM-4.7-Flash", 30),
        ("moonshotai/Moonlight-16B-A3B", 16), ("mistralai/Mistral-Small-4-119B-2603", 119),
        ("mistralai/Mixtral-8x22B-v0.1", 141), ("ByteDance-Seed/Seed-OSS-36B-Base", 36),
        ("nvidia/Nemotron-4-340B-Base", 340), ("internlm/internlm-7b", 7.3), ("huggyllama/llama-65b", 65.2),
        ("huggyllama/llama-30b", 32.5), ("swiss-ai/Apertus-8B-2509", 8.053), ("EleutherAI/gpt-j-6b", 6),
    ],
)  # fmt: skip
def test_shapes_have_about_as_many_parameters_as_their_publishers_say(named, billions):
    shape = shapes.shape_of(shapes.known(named), 2048)
    assert transformer_profile(shape).num_params == pytest.approx(1e9 * billions, rel=0.01)


def test_every_shape_is_one_and_about_as_large_as_its_name_says():
    rows = json.loads((shapes.Path(shapes.__file__).parent / "shapes.json").read_text())
    names = [name for row in rows for name in row["ids"]]
    assert len(names) == len(set(map(str.lower, names))) > 200
    assert len(rows) >= 150
    for name in names:
        count = transformer_profile(shapes.shape_of(shapes.known(name.upper()), 2048)).num_params
        said = re.search(r"[-_](\d+(?:\.\d+)?)([bm])\b", re.sub(r"(\d)_(\d)", r"\1.\2", name.lower()))
        if said and not any(word in name.lower() for word in ("/olmoe", "/phi-3-", "/llama-4-")):
            assert 0.75 < count / (float(said[1]) * {"b": 1e9, "m": 1e6}[said[2]]) < 1.7, name


def test_a_config_in_the_cache_is_taken_before_the_catalogue(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert shapes.cached_config(QWEN) is None
    folder = tmp_path / "models--Qwen--Qwen3-8B"
    (folder / "snapshots" / "a1").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a1")
    (folder / "snapshots" / "a1" / "config.json").write_text(json.dumps(SMALL))
    assert profile(lora=8).num_params < 1e7
    assert source_of(QWEN, None, {}, PlanRequest()).subject(16, GPU).ctx is not None  # traced, as the file


def test_a_config_has_the_facts_of_the_catalogue(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert shapes.facts_of_config(path) == {"tied": False, **shapes.known(QWEN)}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    path.write_text(json.dumps({**CONFIG, "model_type": "qwen3_moe", **experts}))
    assert shapes.facts_of_config(path)["experts"] == shapes.known("Qwen/Qwen3-30B-A3B")["experts"]
    whisper = "model_type 'whisper', and how .* is trained can be given for llama"
    for wrong, told in (({"model_type": "whisper"}, whisper), ({"vocab_size": None}, "no usable")):
        path.write_text(json.dumps({**CONFIG, **wrong}))
        with pytest.raises(ArgumentError, match=told):
            source_of(str(path), None, {}, PlanRequest(lora=8))


def test_a_shape_has_heads_of_its_own_size_and_may_be_tied():
    sizes = {"layers": 36, "hidden": 2560, "heads": 32, "kv-heads": 8, "head-dim": 128, "ffn": 9728, "vocab": 151936}
    rest = {"tied": True, "experts": None, "top-k": None}
    given = source_of(None, None, {**sizes, **rest}, PlanRequest()).subject(4096, GPU).profile
    assert given == profile("Qwen/Qwen3-4B")


def test_adapters_train_what_peft_says():
    assert profile(lora=16).num_trainable == 43_646_976  # as peft prints for Qwen3 8B
    few = profile("meta-llama/Meta-Llama-3-8B", lora="8:q_proj, v")
    assert few.num_trainable == 3_407_872
    assert PlanRequest(qlora=True).adapters == (16, ALL_LINEAR)
    whole, frozen, in_4_bits = (profile(**knobs) for knobs in ({}, {"lora": 16}, {"lora": 16, "qlora": True}))
    assert whole.param_bytes == pytest.approx(4 * 8.19e9, rel=0.01)
    assert frozen.param_bytes == pytest.approx(2 * 8.19e9, rel=0.01)
    in_blocks = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    assert frozen.param_bytes - in_4_bits.param_bytes == pytest.approx((2 - NF4_ITEMSIZE) * in_blocks, rel=1e-3)
    assert profile(lora=16, dtype="fp32").param_bytes == pytest.approx(2 * frozen.param_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [("adamw", 8.0), ("adamw8bit", 2.03125), ("adamw_bf16", 4.0), ("lion", 4.0), ("sgd", 0.0), ("adafactor", 0.001192),
     ("muon", 4.0 * (1 + 0.1520))],
)  # fmt: skip
def test_an_optimizer_keeps_its_bytes_a_parameter(optimizer, state_bytes):
    found = profile(optimizer=optimizer)
    assert peak_memory(plain_cost(found)).optimizer / found.num_params == pytest.approx(state_bytes, rel=2e-3)
    assert found.optim_is_elementwise == (optimizer not in ("adafactor", "muon"))


def test_steps_of_optimizers_take_their_time():
    times = {
        name: plan_for(source_of(QWEN, None, {}, PlanRequest(optimizer=name, dtype="bf16")).subject(4096, GPU),
                       ClusterSpec.load("1xB300"), verify=0, optimizer=name, reserve=0.0).estimate.time["optimizer"]
        for name in ("adamw", "adamw8bit", "sgd", "muon")
    }  # fmt: skip
    assert times["sgd"] < times["adamw8bit"] < times["adamw"] < times["muon"]
    products = 36 * 5 * sum(4 * 4096**2 * n + 2 * 4096**3 for n in (6144, 4096, 24576, 12288))
    device = ClusterSpec.load("B300").device
    assert times["muon"] > products / (device.peak_flops["bfloat16"] * device.efficiency.matmul)


def test_attention_and_dtype_are_those_of_the_profile():
    assert all(block.writes_scores for block in profile(attention="eager").blocks)
    assert not any(block.writes_scores for block in profile(attention="sdpa").blocks)
    assert profile(dtype="bf16").param_bytes == 2 * profile(dtype="bf16").num_params
    assert profile().in_half, "precision methods take fp32 weights"


def test_a_device_without_bf16_trains_in_fp16():
    with pytest.raises(ArgumentError, match="Tesla T4 does not compute in bf16; give the dtype fp16"):
        atorch.plan("Qwen/Qwen3-0.6B", cluster="1xT4", seq=512, lora=8, verify=0)
    knobs = {"cluster": "1xT4", "seq": 512, "dtype": "fp16", "verify": 0}
    step_s = atorch.plan("Qwen/Qwen3-0.6B", lora=8, **knobs).estimate.step_s
    device = ClusterSpec.load("T4").device
    assert step_s < 6 * 0.6e9 * 512 / device.peak_flops["float32"]


def test_the_command_and_the_function_agree():
    knobs = {"lora": 16, "optimizer": "adamw8bit", "cross_entropy": "chunked", "verify": 0}
    found = atorch.plan(QWEN, cluster="1x3090", seq=4096, **knobs)
    assert "cross_entropy" in found.strategy.names()
    assert 15.3 * 2**30 < found.estimate.peak_bytes < 24 * 2**30
    assert found.estimate.memory["optimizer"] == pytest.approx(2.03125 * 43_646_976)


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"lora": 0}, "lora is 0; it is a rank of at least 1"), ({"lora": "16:qq"}, "'qq' is no target of an adapter"),
        ({"optimizer": "adam8"}, "optimizer is 'adam8'; did you mean"), ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"qlora": True, "dtype": "fp32"}, "qlora computes in 16 bits"), ({"attention": "ring"}, "attention is 'ring'"),
        ({"optimizer": "muon", "included": ["chunk"]}, "chunk is both excluded and included"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(knobs, told):
    with pytest.raises((ArgumentError, StrategyError), match=told):
        atorch.plan(QWEN, cluster="1x3090", seq=512, verify=0, **knobs)


def test_models_that_have_weights_and_optimizers_of_their_own_take_none():
    with pytest.raises(ArgumentError, match="lora and optimizer cannot be given for a model of your own"):
        atorch.plan(nn.Linear(2, 2), None, cluster="1x3090", lora=8, optimizer="sgd")
    with pytest.raises(ArgumentError, match="dtype cannot be given for a job"):
        source_of("jobs.py:job", None, {}, PlanRequest(dtype="bf16"))
    with pytest.raises(ArgumentError, match="latent attention"):
        profile("deepseek-ai/DeepSeek-V2-Lite", lora=8)
    assert set(RECIPE) <= set(PlanRequest.__dataclass_fields__)


def test_an_unknown_name_is_told_near_ones():
    with pytest.raises(ArgumentError, match=r"did you mean .*Qwen/Qwen3-8B.* Else give a config.json, .* --layers"):
        source_of("unsloth/Qwen3-8b-bnb", None, {}, PlanRequest())


def test_a_copy_under_another_owner_has_the_shape_of_its_namesake(caplog):
    assert shapes.known("unsloth/Qwen3-8B") == shapes.known("Qwen/Qwen3-8B")
    assert "is taken for a copy of Qwen/Qwen3-8B" in caplog.text
    assert shapes.known("Qwen3-8B") is None


def test_a_shape_of_ones_own_is_planned_as_that_of_the_catalogue(tmp_path):
    own = TransformerShape(**shapes.known(QWEN), seq_len=512)
    mine = atorch.plan(own, cluster="1x3090", verify=0, lora=8)
    assert mine.estimate == atorch.plan(QWEN, cluster="1x3090", verify=0, lora=8, seq=512).estimate
    assert atorch.plan(own, cluster="1x3090", verify=0, lora=8, seq=1024).estimate.step_s > mine.estimate.step_s
    assert re.fullmatch(r"<ClusterPlan .+, [\d.]+ m?s a step, [\d.]+ GiB a device>", repr(mine))
    assert mine._repr_html_().startswith("<table>")
    mine.save_html(tmp_path / "plan.html", "mine")
    assert "<h1>mine</h1>" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0; it is a whole number from 1 to 10,000"),
        ({"hidden": 64.0}, "hidden is 64.0"),
        ({"kv_heads": 3}, "each divides the one before it"),
        ({"heads": 7}, "each divides the one before it"),
    ],
)
def test_an_impossible_shape_is_refused(changes, message):
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 100, "seq_len": 16}
    assert TransformerShape(**sizes).head_dim == 16
    with pytest.raises(ArgumentError, match=message):
        TransformerShape(**{**sizes, **changes})
