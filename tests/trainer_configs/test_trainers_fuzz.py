"""Random commands and files: an answer or an AtorchError, never another exception, a hang or code that runs."""

import random
import shlex
from contextlib import suppress

import pytest

from atorch.errors import AtorchError
from atorch.trainer_configs import Source, target
from atorch.trainer_configs.keys import Keys
from atorch.trainer_configs.shell import read_script
from tests.trainer_configs.test_trainers_public import ROWS

VALUES = [None, True, False, 0, -1, 1, 2, 3, 7.5, 10**18, "", "auto", "none", "8", "-1", "x" * 300, "$X", "bf16", "é\0",
          [], {}, [1, [2]], {"a": 1}, "1F1B", "full", "float8", "fsdp2", ["float8"], "interleaved1f1b"]  # fmt: skip
PIECES = ["${", "$((", '"', "'", "(", ")", "if ", "then\n", "fi\n", "case ", "esac", ";;", "\\\n", "A=$A$A\n", "}",
          "$(", "`", "<<E\n", "\n", "#", "[ a = b ]", "&&", "((", "for x in ", "do\n", "done\n", "+=(", "=(", "[[ -n",
          "9" * 50, "\0", "\ud800", "{", "!", "${#A}", "${A[9]}", "--micro-batch-size", "--", "="]  # fmt: skip


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
    return made


def fuzz(seeds):
    """Read that many mutated public files; the number that were read without an error."""
    known = {
        tool: sorted(key for key in Keys.of(tool).names) for tool in ("torchtitan", "megatron", "automodel", "axolotl")
    }
    count = 0
    for seed in seeds:
        rng = random.Random(seed)
        row = ROWS[seed % len(ROWS)]
        tool = row["tool"]
        if "data" in row:
            source = Source("a file", data=mutated(row["data"], rng, [key.rpartition(".")[2] for key in known[tool]]))
        else:
            words = shlex.split(row["words"])
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(words))
                words[at : at + rng.randrange(2)] = [rng.choice([*map(str, VALUES), *rng.sample(known[tool], 2)])]
            source = Source("a command", words=tuple(words))
        try:
            target(tool).recognises(source)
            setup = target(tool).read(source)
            setup.strategy(rng.choice((1, 8, 24, 128)))
            count += 1
        except AtorchError:
            pass
        text = "\n".join(shlex.split(row["words"])) if "words" in row else "A=1"
        for _ in range(rng.randrange(1, 12)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(PIECES) * rng.choice((1, 1, 1, 40)) + text[at:]
        with suppress(AtorchError):
            read_script(text)
    return count


@pytest.mark.timeout(300)
def test_mutated_files_are_read_or_refused():
    assert fuzz(range(2_000)) > 200


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_a_hundred_thousand_mutated_files_are_read_or_refused():
    assert fuzz(range(2_000, 102_000)) > 10_000
