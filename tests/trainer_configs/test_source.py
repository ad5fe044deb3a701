"""Files and commands are read under limits, and nothing in them is run."""

import time

import pytest

from atorch.errors import ArgumentError
from atorch.trainer_configs import Fields, Source, recognised
from atorch.trainer_configs.shell import read_script
from atorch.trainer_configs.source import options_of, parse_yaml, yaml_text

SCRIPT = r"""
#!/bin/bash
# don't stop at this apostrophe
GPUS=8
export NNODES=2 WORLD_SIZE=$(($GPUS*2))
ARGS="
    --layers 4 \
    --hidden 64
"
MORE=(
    --lr 1e-4 # "a comment"
    --name "a b"
)
OMP_NUM_THREADS=1 torchrun --nproc-per-node $GPUS --nnodes=${NNODES:-1} train.py $ARGS ${MORE[@]} --world $WORLD_SIZE \
    --rank $SLURM_PROCID
echo done
"""


def test_a_script_is_read_with_its_variables():
    words = read_script(SCRIPT).main_command.words
    assert words[:5] == ("torchrun", "--nproc-per-node", "8", "--nnodes=2", "train.py")
    options, rest = options_of(words[5:])
    assert options == {
        **{"--layers": "4", "--hidden": "64", "--lr": "1e-4", "--name": ["a", "b"]},
        **{"--world": "16", "--rank": "$SLURM_PROCID"},
    }
    assert not rest


def test_a_command_inside_another_is_found():
    words = read_script("srun bash -c 'export A=1; torchrun train.py --a b --c d'").main_command.words
    assert words[-2:] == ("--c", "d")


@pytest.mark.parametrize(
    "text",
    [
        b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (i, i, b", ".join([b"*%c" % (i - 1)] * 9)) for i in range(98, 110)
        ),
        b"a0: &a0 {k: 1}\n" + b"".join(
            b"a%d: &a%d {%s}\n" % (i, i, b", ".join([b"<<: *a%d, k%d%d: 1" % (i - 1, i, n) for n in range(9)]))
            for i in range(1, 30)
        ),
        b"a: &a {b: *a}",
        b"[" * 50_000,
        b"a: !!python/object/apply:os.system [touch /tmp/run]",
        b"a: !!int x",
        b"a: !!bool maybe",
        b"a: 1\na: 2",
        b"1: 2",
        b"a: .nan",
        b"\xff\xfe\x00",
        b"a: 2024-13-45: x",
        b"x" * 200_000,
    ],
    ids=str,
)  # fmt: skip
def test_hostile_yaml_is_refused_at_once(text):
    began = time.monotonic()
    with pytest.raises(ArgumentError):
        parse_yaml(text)
    assert time.monotonic() - began < 5


def test_yaml_is_read_as_a_trainer_reads_it():
    text = b"a: no\nb: 'no'\nc: 2024-01-02\nd: &x {e: 1}\nf: {<<: *x, g: 2}\n"
    assert parse_yaml(text) == {"a": False, "b": "no", "c": "2024-01-02", "d": {"e": 1}, "f": {"e": 1, "g": 2}}


def test_what_is_written_as_yaml_is_read_back():
    values = {"a": "no", "b": {"c": True, "d": [1, "x: y"], "e": {"f": None}}, "g": "é'\"", "h": {}}
    assert parse_yaml(yaml_text(values).encode()) == values


def test_no_key_is_dropped():
    fields = Fields("f", {"used": 1, "section": {"inner": 2, "odd": 3}, "usd": 4})
    fields.tell("used", "used", "")
    fields.within("section").tell("inner", "used", "")
    entries = {entry.key: entry for entry in fields.finish()}
    assert entries["section.odd"].kind == entries["usd"].kind == "unknown"
    assert "did you mean 'used'" in entries["usd"].note


@pytest.mark.parametrize("given", ["config.toml", "no such file.yaml", "missing.yaml", "", "x" * 5000, "'open", "a\0b"])
def test_what_is_no_configuration_is_an_error(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError):
        recognised(Source.of(given))
