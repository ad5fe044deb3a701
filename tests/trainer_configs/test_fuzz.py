"""Random files, commands and scripts: an answer or an AtorchError, never another exception or a hang."""

import json
import random
import shlex
import string
from contextlib import suppress

import pytest

from atorch.errors import AtorchError
from atorch.trainer_configs import Source, recognised, target
from atorch.trainer_configs.keys import Keys
from atorch.trainer_configs.shell import read_script
from tests.trainer_configs.test_public import PUBLIC
from tests.trainer_configs.test_trainers_public import ROWS

VALUES = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 7.5, 1e30, -0.5, 2**62, 12.0, [], {}, [1, [2]], {"a": {"b": None}}),
    *("", "auto", "no", "none", "cpu", "nvme", "FSDP", "1", "8", "-1", "é\0", "x" * 300, "$X", "bf16", "FULL_SHARD"),
    *("1F1B", "full", "float8", ["float8"], "fsdp2", "interleaved1f1b", {"enabled": "auto"}),
]
MORE = ["per_device_train_batch_size", "gradient_accumulation_steps", "fsdp", "fsdp_config", "deepspeed", "lora_r",
        "lora_target_modules", "model_name_or_path", "torch_dtype", "optim", "mixed_precision", "distributed_type",
        "deepspeed_config_file", "megatron_lm_config", "pipeline", "compile", "accelerator_config", "é"]  # fmt: skip
WORDS = [
    *("accelerate launch", "torchrun", "deepspeed", "--nproc-per-node", "8", "train.py", "--deepspeed", "ds.json"),
    *("--per_device_train_batch_size", "2", "--bf16", "True", "--config_file", "a.yaml", "'", "$X", "--fsdp", "("),
    *("--lora_r", "-m", "--use_fsdp", "--fsdp_version=2", "--num_processes", "x", ";", chr(92)),
]
PIECES = ["${", "$((", '"', "'", "(", ")", "if ", "then\n", "fi\n", "case ", "esac", ";;", "\\\n", "A=$A$A\n", "}",
          "$(", "`", "<<E\n", "\n", "#", "[ a = b ]", "&&", "((", "for x in ", "do\n", "done\n", "+=(", "=(", "[[ -n",
          "9" * 50, "\0", "\ud800", "{", "!", "${#A}", "${A[9]}", "--micro-batch-size", "--", "="]  # fmt: skip


def keys_of(values):
    """The keys of nested mappings, those at the end of a path."""
    for key, value in values.items():
        yield key
        yield from keys_of(value) if isinstance(value, dict) else ()


def mutated(values, rng, keys):
    """A copy of nested values with a few that are others, are gone, or are new."""
    made = {}
    for key, value in values.items():
        if rng.random() < 0.06:
            continue
        if isinstance(value, dict) and value and rng.random() < 0.95:
            made[key] = mutated(value, rng, keys)
        else:
            made[key] = rng.choice(VALUES) if rng.random() < 0.12 else value
    for _ in range(rng.randrange(3)):
        made[rng.choice(keys) if rng.random() < 0.8 else "no_such_key"] = rng.choice(VALUES)
    return dict(rng.sample(list(made.items()), len(made)))


def mutated_source(row, rng, known):
    if "words" not in row:
        return Source("a file", data=mutated(row.get("data", row.get("values")), rng, known))
    words = shlex.split(row["words"])
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(words))
        words[at : at + rng.randrange(2)] = [rng.choice([*map(str, VALUES), *rng.sample(known, 2)])]
    return Source("a command", words=tuple(words))


def fuzz(seeds):
    """Read that many mutated public files; the number that were read without an error."""
    rows, count = [*PUBLIC, *ROWS], 0
    known = {tool: sorted(Keys.of(tool).names) for tool in {row["tool"] for row in ROWS}}
    of_files = sorted({*MORE, *(key for row in PUBLIC for key in keys_of(row["values"]))})
    for seed in seeds:
        rng = random.Random(seed)
        row = rows[seed % len(rows)]
        names = known.get(row["tool"], of_files)
        if "words" not in row:
            names = [name.rpartition(".")[2] for name in names]
        with suppress(AtorchError):
            source = mutated_source(row, rng, names)
            if seed % 10 == 0:
                source = Source.of(" ".join(rng.choices(WORDS, k=rng.randrange(2, 14))))
            found = recognised(source) if seed % 2 else target(row["tool"])
            found.read(source).strategy(rng.choice((1, 2, 8, 24, 128)))
            count += 1
        text = "\n".join(shlex.split(row.get("words", "A=1")))
        for _ in range(rng.randrange(1, 12)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(PIECES) * rng.choice((1, 1, 1, 40)) + text[at:]
        with suppress(AtorchError):
            read_script(text)
    return count


@pytest.mark.timeout(300)
def test_mutated_files_are_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 300 < fuzz(range(3_000)) < 2_800  # else the mutations are too many or too few


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_very_many_mutated_files_are_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fuzz(range(3_000, 200_000)) > 20_000


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
        with suppress(AtorchError):
            source = Source.of(str(path))
            recognised(source).read(source)
