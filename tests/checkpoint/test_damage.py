"""Damaged, foreign and forged checkpoints: each is refused by name, and never ends in a crash."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atorch.checkpoint.boxes import Box
from atorch.checkpoint.files import save
from atorch.checkpoint.manifest import MANIFEST
from atorch.checkpoint.reading import Checkpoint
from atorch.errors import CheckpointError
from tests.checkpoint.jobs import Ranks, in_boxes, small_blocks, whole


def saved(folder: Path, number: float = 1.0) -> Path:
    """A checkpoint of two ranks with tensors of several kinds."""
    values = torch.full((6, 4), number)

    def work(rank: int) -> Path:
        tensors = {
            "w": in_boxes(values, [Box((3 * rank, 0), (3, 2)), Box((3 * rank, 2), (3, 2))]),
            "bias": whole(torch.full((5,), number, dtype=torch.bfloat16)),
            "empty": whole(torch.ones(0, 3, dtype=torch.bool)),
        }
        plain = {"lr": 0.1, "inf": float("inf"), "t": (1, torch.ones(2)), 3: {"$x": [None, "text"]}}
        return save(folder, 5, tensors, plain, {"rng": torch.full((4,), rank)})

    path = Ranks(2).run(work)[0]
    assert isinstance(path, Path), path
    return path


def read_all(folder: Path) -> Any:
    """Everything in the newest checkpoint."""
    with Checkpoint.open(folder) as checkpoint:
        values = {name: checkpoint.read(name) for name in checkpoint.names}
        return values, checkpoint.plain, [checkpoint.by_rank(rank) for rank in range(checkpoint.world_size)]


FILE = "rank-00001.safetensors"


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def folder_of_its_name(path: Path) -> None:
    path.unlink()
    path.mkdir()


def zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flipped(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)

    return flip


def other_save(path: Path) -> None:
    """The same file of a later save."""
    other = saved(path.parent.parent / "other", 2.0)
    shutil.copy(other / path.name, path)


def other_rank(path: Path) -> None:
    shutil.copy(path.with_name("rank-00000.safetensors"), path)


DAMAGE = [
    (FILE, Path.unlink, rf"{FILE} is missing; bring it back"),
    (FILE, pipe, rf"{FILE} is no ordinary file"),
    (FILE, link, rf"{FILE} cannot be read as an ordinary file"),
    (FILE, zeros, rf"{FILE} cannot be read as an ordinary file"),
    (FILE, folder_of_its_name, rf"{FILE} is no ordinary file"),
    (FILE, cut_short, rf"{FILE} has \d+ bytes, and was written with \d+"),
    (FILE, longer, rf"{FILE} has \d+ bytes, and was written with \d+"),
    (FILE, flipped(12), rf"{FILE} is not the file of this checkpoint: its header"),
    (FILE, flipped(-1), rf"{FILE}: '.*' \[.*\] has changed since it was written"),
    (FILE, other_save, rf"{FILE}: '.*' \[.*\] has changed since it was written"),
    (FILE, other_rank, rf"{FILE} (has|is not the file)"),
    (MANIFEST, flipped(200), r"manifest.json has changed since it was written"),
    (MANIFEST, flipped(10), r"manifest.json has changed since it was written"),
    (MANIFEST, cut_short, r"manifest.json has changed since it was written, or is cut short"),
    (MANIFEST, pipe, r"manifest.json is no ordinary file"),
    (MANIFEST, zeros, r"manifest.json cannot be read as an ordinary file"),
    (MANIFEST, Path.unlink, r"holds no checkpoint; there is no complete one"),
    (".", lambda path: path.rename(path.with_name("step-000000006")), r"manifest.json: it is of step 5, not 6"),
]


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGE)
def test_damage_is_refused_by_name(tmp_path: Path, name: str, damage: Callable[[Path], Any], told: str) -> None:
    damage(saved(tmp_path) / name)
    with pytest.raises(CheckpointError, match=told):
        read_all(tmp_path)


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest, with a checksum that is right."""
    content = json.loads(path.read_bytes())
    del content["crc32"]
    change(content)
    rest = json.dumps(content).encode()[1:]
    path.write_bytes(b'{"crc32":%d,' % zlib.crc32(rest) + rest)


def piece(content: dict[str, Any], name: str = "w") -> list[Any]:
    return next(item for shard in content["shards"] for item in shard[2] if item[0] == name)


FORGED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: m["shards"][0].__setitem__(0, "../x"), r"'\.\./x' is no name of a file; one is rank-00000"),
    (lambda m: m["shards"][0].__setitem__(0, "/etc/passwd"), "'/etc/passwd' is no name of a file"),
    (lambda m: m["shards"][0].__setitem__(0, FILE), "it lists a file twice"),
    (lambda m: m["shards"][0].__setitem__(1, 10**15), "has [0-9,]+ bytes, and was written with 1,000,000,000,000,000"),
    (lambda m: m["shards"].pop(), "'w': 12 of its 24 elements are in no box"),
    (lambda m: m["shards"][0][2].reverse(), "is not the file of this checkpoint"),
    (lambda m: piece(m)[1].__setitem__(0, [3, 0]), r"'w': its boxes \[3:6, 0:2\] and \[3:6, 0:2\] overlap"),
    (lambda m: piece(m)[1].__setitem__(0, [4, 0]), r"a piece of 'w' is \[\[4, 0\], \[3, 2\]\], no part of its shape"),
    (lambda m: piece(m)[1].__setitem__(0, [-1, 0]), "a piece of 'w' is .*; it has at most 64 integers from 0"),
    (lambda m: piece(m)[1].__setitem__(1, [10**12, 2]), "no part of its shape"),
    (lambda m: piece(m)[2].append(1), "a piece of 'w' has 2 checksums for 1 blocks"),
    (lambda m: piece(m).__setitem__(0, "v"), "a piece is of 'v', which is none of its tensors"),
    (lambda m: m["tensors"].__setitem__("w", [[10**18, 4], "F32"]), "'w' has the shape .*, more than any tensor"),
    (lambda m: m["tensors"].__setitem__("w", [[6, 4], "F33"]), "'w' is of dtype 'F33'; known: BF16"),
    (lambda m: m["tensors"].__setitem__("w", [[6, 4], "F64"]), "is not the file of this checkpoint: its header"),
    (lambda m: m["tensors"].__setitem__("w", [[True, 4], "F32"]), "the shape of 'w' is"),
    (lambda m: m["tensors"].__setitem__("", [[], "F32"]), "'' is no name of a tensor"),
    (lambda m: m.__setitem__("format", 2), "its format is 2, not 1: install another atorch"),
    (lambda m: m.__setitem__("world_size", 3), "its world_size is 3, with 2 by_rank"),
    (lambda m: m.__setitem__("by_rank", []), "its world_size is 2, with 0 by_rank"),
    (lambda m: m.__setitem__("plain", [1]), "its plain data is no dict"),
    (lambda m: m.__setitem__("plain", {"$dict": [[[], 1]]}), "is no plain data of a checkpoint"),
    (lambda m: m.__setitem__("plain", {"a": {"$tensor": "none"}}), "'none' is not in"),
]


@pytest.mark.parametrize(("change", "told"), FORGED)
def test_a_forged_manifest_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any], told: str) -> None:
    forge(saved(tmp_path) / MANIFEST, change)
    with pytest.raises(CheckpointError, match=told):
        read_all(tmp_path)


def test_nested_without_end(tmp_path: Path) -> None:
    path = saved(tmp_path) / MANIFEST
    for depth in (100_000, 900):
        rest = b'"format":1,"plain":' + b"[" * depth + b"]" * depth + b"}"
        path.write_bytes(b'{"crc32":%d,' % zlib.crc32(rest) + rest)
        with pytest.raises(CheckpointError, match="manifest.json"):
            read_all(tmp_path)
    forge(path := saved(tmp_path / "deep") / MANIFEST, lambda m: m.__setitem__("plain", nested(400)))
    with pytest.raises(CheckpointError, match="no dict"):
        read_all(path.parent.parent)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value]
    return value


ODD = [None, True, -1, 0, 1, 2**63, 10**40, 0.5, "", "w", "$tensor", "../x", [], [[]], {}, {"$tensor": "w"}, "\ud800"]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container of parsed JSON with each of its keys."""
    found, waiting = [], [value]
    for item in waiting:
        keys = list(item) if isinstance(item, dict) else range(len(item))
        found += [(item, key) for key in keys]
        waiting += [item[key] for key in keys if isinstance(item[key], (dict, list))]
    return found


def mutate(draw: random.Random, value: Any) -> None:
    """Change parsed JSON in place: replace, remove, repeat or swap what is anywhere in it."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        found = places(value)
        container, key = draw.choice(found)
        match draw.randrange(4):
            case 0:
                container[key] = copy.deepcopy(draw.choice(ODD))
            case 1:
                del container[key]
            case 2:
                other, at = draw.choice(found)
                container[key] = copy.deepcopy(other[at])
            case 3:
                old = container[key]
                container[key] = old + draw.choice([-1, 1, 7]) if type(old) is int else [old, old]
        if not value:
            return


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "trials",
    [2_000, pytest.param(5_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.nightly)],
)
def test_fuzzed_files(tmp_path: Path, trials: int) -> None:
    """Whatever is in its files, a checkpoint is read as it was written, or refused."""
    draw = random.Random(trials)
    with small_blocks(16):
        path = saved(tmp_path)
        names = sorted(file.name for file in path.iterdir())
        written = {name: (path / name).read_bytes() for name in names}
        content = json.loads(written[MANIFEST])
        del content["crc32"]
        refused = 0
        for trial in range(trials):
            name = draw.choice(names)
            if trial % 2:
                name, changed = MANIFEST, copy.deepcopy(content)
                mutate(draw, changed)
                rest = json.dumps(changed).encode()[1:]
                data = b'{"crc32":%d,' % zlib.crc32(rest) + rest
            else:
                data = scrambled(draw, written[name])
            (path / name).write_bytes(data)
            try:
                read_all(tmp_path)
            except CheckpointError:
                refused += 1
            else:
                assert name == MANIFEST or data == written[name]
            (path / name).write_bytes(written[name])
        read_all(tmp_path)
    assert refused > trials / 2


def scrambled(draw: random.Random, data: bytes) -> bytes:
    """Bytes with some changed, removed, repeated or put in."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 3])):
        at, length = draw.randrange(len(changed) + 1), draw.choice([1, 2, 8, 40])
        changed[at : at + draw.choice([0, length])] = draw.randbytes(draw.choice([0, length]))
    return bytes(changed)
