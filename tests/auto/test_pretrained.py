"""Hugging Face's files loaded into divided models, and such models exported: values equal bit for bit."""

import json
import random
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from typer.testing import CliRunner

import atorch
from atorch.checkpoint.pretrained import export_model, open_pretrained
from atorch.cli import app
from atorch.errors import ArgumentError, CheckpointError
from tests.auto.checkpointing import MODELS, STRATEGIES, in_file, job, losses, small_job
from tests.checkpoint.jobs import small_blocks
from tests.language_models import gpt2
from tests.pool import Pool, on_ranks


def pretrained(model: str, folder: Path) -> nn.Module:
    """A model with other values than those of `job`, and its files."""
    torch.manual_seed(5)
    made = MODELS[model]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    made.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return made


def in_and_out(rank: int, size: int, folder: str, model: str, strategy: str) -> float:
    """Load, save before and after a step that changes nothing, and export; the loss of that step."""
    result = job(model, strategy)
    atorch.load_pretrained(result, f"{folder}/in")
    atorch.save_checkpoint(f"{folder}/run", result, 0)
    for group in result.optim.param_groups:
        group["lr"] = 0.0
    loss = losses(result, 1)[0]
    atorch.save_checkpoint(f"{folder}/run", result, 1)
    with mock.patch("atorch.checkpoint.pretrained.MAX_FILE_BYTES", 20_000):
        atorch.export(result, f"{folder}/out")
    atorch.export(result, f"{folder}/bf16", dtype=torch.bfloat16)
    atorch.load_pretrained(result.model, f"{folder}/bf16")
    atorch.save_checkpoint(f"{folder}/rounded", result, 0)
    return loss


def check(pool: Pool, tmp_path: Path, model: str, strategy: str) -> None:
    expected = pretrained(model, tmp_path / "in")
    found = pool.run(in_and_out, str(tmp_path), model, strategy, ranks=STRATEGIES[strategy][0])
    state = expected.state_dict()
    for folder in (tmp_path / "run" / "step-000000000", tmp_path / "run"):
        with open_pretrained(folder) as checkpoint:
            for name in checkpoint.names:
                if name.startswith("model."):
                    assert torch.equal(checkpoint.read(name), state[name.removeprefix("model.")]), name
    for name, value in in_file(tmp_path / "rounded").items():
        if name.startswith("model."):
            assert torch.equal(value.bfloat16(), state[name.removeprefix("model.")].bfloat16()), name
    for folder, dtype in ((tmp_path / "out", torch.float32), (tmp_path / "bf16", torch.bfloat16)):
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert {name: value.dtype for name, value in again.state_dict().items()} == dict.fromkeys(state, dtype)
        for name, value in again.state_dict().items():
            assert torch.equal(value, state[name].to(dtype)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(expected).__name__]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == set(index["weight_map"].values())
    assert {path.name for path in (tmp_path / "bf16").iterdir()} == {
        "model.safetensors", "config.json", "generation_config.json"
    }  # fmt: skip
    assert not list(tmp_path.glob(".*"))
    plain = job(model, "plain")
    plain.model.load_state_dict(state)
    assert sum(found) / len(found) == pytest.approx(losses(plain, 1)[0], rel=2e-2 if "half" in strategy else 1e-5)


@pytest.mark.parametrize("strategy", ["tensor x fsdp", "pipeline", "chunk 2", "half x zero1", "offload"])
def test_sample_of_strategies(pool: Pool, tmp_path: Path, strategy: str) -> None:
    check(pool, tmp_path, "gpt2", strategy)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(pool: Pool, tmp_path: Path, model: str, strategy: str) -> None:
    check(pool, tmp_path, model, strategy)


def test_names_of_base_models_ties_and_masks(tmp_path: Path) -> None:
    """Old files have names of the base model, masks among them, and each of two tied tensors."""
    source, target = gpt2(), gpt2()
    state = {name: value.clone() for name, value in source.transformer.state_dict().items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
    save_file({**state, **masks}, tmp_path / "model.safetensors")
    atorch.load_pretrained(target, tmp_path)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())
    save_file({f"transformer.{name}": value for name, value in state.items()}, tmp_path / "other")
    atorch.load_pretrained(base := gpt2().transformer, tmp_path / "other")
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in state.items())


WEIGHT = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({**WEIGHT, "more": torch.ones(1)}, r"has more, other than the model Linear"),
        ({"weight": WEIGHT["weight"]}, r"lacks bias, other than the model Linear"),
        ({**WEIGHT, "weight": torch.ones(3, 2)}, r"weight of shape \(3, 2\), and the whole model's weight is \(2, 3\)"),
        ({**WEIGHT, "weight": torch.ones(2, 3, dtype=torch.int8)}, r"weight as torch.int8, .* not quantized"),
    ],
)
def test_other_models_are_refused_before_anything_is_written(tmp_path: Path, state: Any, told: str) -> None:
    save_file(state, tmp_path / "model.safetensors")
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=told):
        atorch.load_pretrained(model, tmp_path)
    assert torch.equal(model.weight, before)
    if "quantized" not in told and "shape" not in told:
        atorch.load_pretrained(model, tmp_path, strict=False)
        assert torch.equal(model.weight, WEIGHT["weight"])


def test_without_strict_a_model_with_no_name_in_common_is_refused(tmp_path: Path) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    result = small_job([])
    for load in (atorch.load_pretrained, atorch.load_whole_state):
        with pytest.raises(CheckpointError, match=r"lacks .* and has other, .*; give the same model's$"):
            load(result.model, tmp_path, strict=False)
    with pytest.raises(CheckpointError, match="has other"):
        atorch.load_whole_state(result.model, {"other": torch.ones(1)}, strict=False)


def test_what_is_no_model(tmp_path: Path) -> None:
    save_file(WEIGHT, tmp_path / "a.safetensors")
    save_file(WEIGHT, tmp_path / "b.safetensors")
    for path, told in ((tmp_path, "in two files"), (tmp_path / "none", "is no safetensors file, nor a folder")):
        with pytest.raises(CheckpointError, match=told):
            atorch.load_pretrained(nn.Linear(3, 2), path)
    for files, told in (
        ({"weight": "../a.safetensors"}, "no name of a .safetensors file"),
        ({"w": "a.safetensors"}, "no 'w'"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        with pytest.raises(CheckpointError, match=told):
            atorch.load_pretrained(nn.Linear(3, 2), tmp_path)
    with pytest.raises(ArgumentError, match="give what auto_accelerate returned"):
        atorch.load_pretrained({}, tmp_path)  # type: ignore[arg-type]
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="on the meta device"):
        atorch.load_pretrained(nn.Linear(3, 2, device="meta"), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="there already"), open_pretrained(tmp_path / "a.safetensors") as model:
        export_model(model, tmp_path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "trials", [500, pytest.param(20_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.nightly)]
)
def test_fuzzed_headers(tmp_path: Path, trials: int) -> None:
    """Whatever a file of another program holds, it is read, or refused."""
    path = tmp_path / "model.safetensors"
    save_file({**WEIGHT, "half": torch.ones(3, dtype=torch.bfloat16)}, path)
    data, draw, refused = path.read_bytes(), random.Random(trials), 0
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    odd = [-1, 0, 1, 2**63, None, "F32", "I8", [], {}, [0, 24], [24, 0], [-8, 16], [2**40, 2**40 + 8], 1.5, "x"]
    for trial in range(trials):
        if trial % 2:
            changed = bytearray(data)
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        else:
            entries = json.loads(json.dumps(header))
            entry = entries[draw.choice(list(entries))]
            entry[draw.choice(["shape", "dtype", "data_offsets"])] = draw.choice(odd)
            text = json.dumps(entries).encode()
            changed = bytearray(struct.pack("<Q", len(text)) + text + data[-30:])
        path.write_bytes(changed)
        try:
            with open_pretrained(path) as checkpoint:
                values = {name: checkpoint.read(name) for name in checkpoint.names}
            assert sum(value.nbytes for value in values.values()) <= 38
        except CheckpointError:
            refused += 1
    assert refused > trials / 3


def test_exported_files_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """In blocks smaller than tensors, with other dtypes than floating-point ones left alone."""
    state = {"a": torch.randn(7, 9), "n": torch.arange(5), "e": torch.ones(0, 3), "s": torch.tensor(2.0)}
    save_file(state, tmp_path / "in.safetensors")
    with small_blocks(16), open_pretrained(tmp_path / "in.safetensors") as checkpoint:
        export_model(checkpoint, tmp_path / "out", torch.float16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(
        torch.equal(found[name], value.half() if value.is_floating_point() else value) for name, value in state.items()
    )


def test_a_tokenizer_comes_along(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"yes": 0, "no": 1, "?": 2}, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    result = small_job([])
    atorch.export(result, tmp_path / "out", tokenizer=tokenizer)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert again.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ArgumentError, match="which has save_pretrained"):
        atorch.export(result, tmp_path / "other", tokenizer="gpt2")
    assert not (tmp_path / "other").exists()


@on_ranks(2)
def test_an_adapter_is_written_as_peft_reads_it(rank: int, size: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    result = atorch.auto_accelerate(
        model, torch.optim.AdamW, [torch.zeros(4, dtype=torch.int64)] * 8, lambda batch, output: output.logits.sum(),
        dataloader_args={"batch_size": 4}, load_strategy=["fsdp"],
    )[1]  # fmt: skip
    atorch.export(result, tmp_path / "out", tokenizer=None)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "out")
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_the_command_line_exports_a_checkpoint(tmp_path: Path) -> None:
    result = small_job([])
    atorch.save_checkpoint(tmp_path / "run", result, 3)
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 0, run.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == result.model.state_dict().keys()
    for name, value in result.model.state_dict().items():
        assert torch.equal(found[name], value.bfloat16() if value.is_floating_point() else value)
