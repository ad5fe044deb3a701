"""Random files: an answer or an AtorchError, never another exception, a hang or code that runs."""

import json
import random
import string

import pytest

from atorch.errors import AtorchError
from atorch.trainer_configs import Source, recognised
from tests.trainer_configs.test_public import PUBLIC

JUNK = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 1e30, -0.5, 2**62, 12.0, [], {}, [1, [2]], {"a": {"b": None}}),
    *("", "auto", "no", "cpu", "nvme", "FSDP", "1", "é", "x" * 99, "$X", "none", "bf16", "FULL_SHARD"),
    {"enabled": "auto"},
]
KEYS = sorted({key for row in PUBLIC for key in row["values"]} | {
    key for row in PUBLIC for value in row["values"].values() if isinstance(value, dict) for key in value
})  # fmt: skip
EXTRA = ["per_device_train_batch_size", "gradient_accumulation_steps", "fsdp", "fsdp_config", "deepspeed", "lora_r",
         "lora_target_modules", "model_name_or_path", "torch_dtype", "optim", "mixed_precision", "distributed_type",
         "deepspeed_config_file", "megatron_lm_config", "pipeline", "compile", "accelerator_config"]  # fmt: skip


def mutated(value, rng, depth=0):
    """A value with some of its parts in other places, of other types, or gone."""
    if rng.random() < 0.15:
        return rng.choice(JUNK)
    if isinstance(value, dict) and depth < 6:
        items = [(key, mutated(inner, rng, depth + 1)) for key, inner in value.items() if rng.random() < 0.9]
        for _ in range(rng.choice([0, 0, 1, 2])):
            items.append((rng.choice([*KEYS, *EXTRA, "".join(rng.choices(string.printable, k=4))]), rng.choice(JUNK)))
        rng.shuffle(items)
        return dict(items)
    return value


def command(rng):
    words = [
        *("accelerate launch", "torchrun", "deepspeed", "--nproc-per-node", "8", "train.py", "--deepspeed", "ds.json"),
        *("--per_device_train_batch_size", "2", "--bf16", "True", "--config_file", "a.yaml", "'", "$X", "--fsdp", "("),
        *("--lora_r", "-m", "--use_fsdp", "--fsdp_version=2", "--num_processes", "x", ";", chr(92)),
    ]
    return " ".join(rng.choices(words, k=rng.randrange(2, 14)))


def read_any(seed):
    rng = random.Random(seed)
    try:
        if seed % 10 == 0:
            source = Source.of(command(rng))
        else:
            row = rng.choice(PUBLIC)
            values = mutated(row["values"], rng)
            source = Source("fuzzed", data=values if isinstance(values, dict) else row["values"])
        recognised(source).read(source).strategy(rng.choice([1, 2, 8, 24]))
    except AtorchError:
        return False
    return True


def test_no_mutated_file_raises_another_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 100 < sum(map(read_any, range(2_000))) < 1_900  # else the mutations are too many or too few


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_mutated_file_of_very_many_raises_another_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sum(map(read_any, range(2_000, 100_000)))


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".sh"])
def test_no_text_raises_another_error(suffix, tmp_path):
    rng = random.Random(suffix)
    path = tmp_path / f"config{suffix}"
    for number in range(300):
        text = json.dumps(rng.choice(PUBLIC)["values"], indent=rng.choice([None, 2]))
        characters = list(text)
        for _ in range(rng.randrange(1, 30)):
            characters[rng.randrange(len(characters))] = rng.choice(string.printable + "\0é&*!|>%@`")
        content = "".join(characters) if number % 5 else bytes(rng.randrange(256) for _ in range(200))
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        try:
            source = Source.of(str(path))
            recognised(source).read(source)
        except AtorchError:
            pass
