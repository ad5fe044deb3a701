"""Strategy files: what is written reads back, and whatever a file may hold, the fault is named with its place."""

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atorch.auto.strategy import Strategy, codec
from atorch.errors import StrategyError
from atorch.files.strict_json import MAX_INTEGER
from tests.auto.strategy.toys import ToyAmp, ToyMesh, ToyShard

pytestmark = pytest.mark.usefixtures("toys")

BOTH = Strategy(
    (ToyMesh(slices=(("data", 4), ("tensor", 2))), ToyAmp(dtype="bf16")), {"world_size": 8, "b": {"a": [1.5]}}
)

VERSION_1 = """\
{
  "atorch_strategy": 1,
  "methods": [
    {"name": "toy_mesh", "config": {"slices": [["data", 4], ["tensor", 2]]}},
    {"name": "toy_amp", "config": {"dtype": "bf16"}}
  ],
  "metadata": {"b": {"a": [1.5]}, "world_size": 8}
}
"""


def refused(source: Any) -> str:
    with pytest.raises(StrategyError) as caught:
        Strategy.of(source)
    return str(caught.value)


def test_a_file_reads_as_it_was_written_within_exact_limits() -> None:
    assert BOTH.to_json() == VERSION_1
    read = Strategy.of(VERSION_1)
    assert read == BOTH
    assert read.metadata == BOTH.metadata

    assert Strategy.of(Strategy().to_json()) == Strategy()

    read = Strategy.of(Strategy((ToyAmp(dtype="fp16"),)).to_json()).get(ToyAmp)
    assert read.model_fields_set == {"dtype"}

    class Kind(str):
        """A string of a class of its own."""

    assert Strategy.of(Strategy((), {"x": (1, Kind("a"))}).to_json()).metadata == {"x": [1, "a"]}

    assert codec.read('["toy_mesh"]') == codec.read(b'["toy_mesh"]') == Strategy.of(["toy_mesh"])

    assert Strategy.of(b'\xef\xbb\xbf["toy_mesh"]').names() == ("toy_mesh",)

    longest = json.dumps([["toy_shard", {"extra": {"x": "a" * codec.FORMAT.max_string, "y": -MAX_INTEGER}}]])
    assert Strategy.of(longest).names() == ("toy_shard",)


scalars = (
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
json_data = st.recursive(scalars | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(texts, st.integers(-(2**62), 2**62)), max_size=4),
    share=st.floats(0.0, 1.0, exclude_min=True),
    extra=st.dictionaries(texts, json_data, max_size=4),
    metadata=st.dictionaries(texts, json_data, max_size=4),
)
def test_what_is_written_reads_back(sizes: Any, share: float, extra: Any, metadata: Any) -> None:
    written = Strategy((ToyMesh(slices=tuple(sizes)), ToyShard(share=share, extra=extra)), metadata)
    read = Strategy.of(written.to_json())
    assert read == written
    assert read.metadata == metadata
    assert read.to_json() == written.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "line 1 column 2: Expecting value (the text was cut short)"),
        (VERSION_1.split(', "config"')[0], "line 4 column 24: Expecting ',' delimiter (the text was cut short)"),
        ('{"atorch_strategy": 1,\n "meth', "line 2 column 2: Unterminated string starting at (the text was cut short)"),
        ("{}", '$: no "atorch_strategy": 1, so this is not a strategy file'),
        ('{"methods": []}', "$: no \"atorch_strategy\": 1, so this is not a strategy file; it has ['methods']"),
        ('{"atorch_strategy": "1"}', "$.atorch_strategy: '1' is not a version; write 1"),
        ('{"atorch_strategy": true}', "$.atorch_strategy: True is not a version; write 1"),
        ('{"atorch_strategy": 0}', "$.atorch_strategy: 0 is not a version; write 1"),
        ('{"atorch_strategy": 1.0}', "$.atorch_strategy: 1.0 is not a version; write 1"),
        ('{"atorch_strategy": 2, "x": 1}', "$.atorch_strategy: the file has version 2, and this atorch reads up to 1"),
        ('{"atorch_strategy": 1, "methods": [], "metdata": {}}', "$.metdata: a strategy file has no such field"),
        ('{"atorch_strategy": 1}', "$.methods: None is not a list of methods"),
        ('{"atorch_strategy": 1, "methods": {}}', "$.methods: {} is not a list of methods"),
        ('{"atorch_strategy": 1, "methods": [], "metadata": []}', "$.metadata: [] is not an object"),
        ('{"atorch_strategy": 1, "methods": [], "methods": []}', "$.methods: the key is there twice"),
        ('["toy_msh"]', "$[0]: there is no method named 'toy_msh'; did you mean 'toy_mesh'?"),
        ('{"atorch_strategy": 1, "methods": [{"name": "toy_am"}]}', "$.methods[0].name: there is no method named"),
        (
            '{"atorch_strategy": 1, "methods": [{"name": "toy_amp", "config": {"dtype": 1}}]}',
            "[0].config.dtype: toy_amp",
        ),
        (
            '{"atorch_strategy": 1, "methods": ["toy_half", "toy_amp"]}',
            "$.methods[1]: toy_half and toy_amp exclude each",
        ),
        (b"", "line 1 column 1: Expecting value (the text was cut short)"),
        (b"null", "$: None is not a strategy; a method is written"),
        (b'"toy_mesh"', "$: 'toy_mesh' is not a strategy; a method is written"),
    ],
    ids=lambda given: repr(given[:40]),
)
def test_the_place_of_the_fault(text: str | bytes, message: str) -> None:
    assert message in refused(text)


class Sentinel:
    """A pickle of this writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "code ran")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", [list, dict, tuple, str])
def test_a_pickle_is_recognised_and_not_loaded(tmp_path: Path, protocol: int, kind: type) -> None:
    marker = tmp_path / "marker"
    payload: dict[type, Any] = {
        list: ["ddp", Sentinel(marker)],
        dict: {"a": Sentinel(marker)},
        tuple: ("ddp", Sentinel(marker)),
        str: "toy_mesh",
    }
    data = pickle.dumps(payload[kind], protocol)
    file = tmp_path / "strategy.pkl"
    file.write_bytes(data)
    assert refused(data).startswith("this is a pickle")
    assert "strategy.pkl': this is a pickle" in refused(file)
    assert not marker.exists()


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is a directory" in refused(str(tmp_path))
    assert "there is no strategy file" in refused(tmp_path / "none.json")
    assert refused("toy_amp").endswith("to name a method, give a list: ['toy_amp']")
    assert "there is no strategy file ''" in refused("")
    assert "is not a file name" in refused("a\0b")
    assert "is not a file name" in refused("a\ud800")
    assert "cannot be read" in refused("a" * 100_000)
    assert len(refused("a" * 100_000)) < 400
    monkeypatch.chdir(tmp_path)
    Path("[.json").write_text('["toy_mesh"]')
    assert Strategy.of(Path("[.json")).names() == ("toy_mesh",)

    file = tmp_path / "strategy.json"
    file.write_text('["toy_amp", ["toy_shard", {"share": 2}]]')
    assert refused(str(file)).startswith(f"'{file}': $[1][1].share: toy_shard.share was given 2")

    buffer = io.BytesIO()
    torch.save({"methods": ["toy_mesh"]}, buffer)
    assert refused(buffer.getvalue()).startswith("this is a pickle")


def test_save_and_read(tmp_path: Path) -> None:
    file = tmp_path / "strategy.json"
    BOTH.save(file)
    BOTH.save(str(file))
    assert Strategy.of(str(file)) == Strategy.of(file) == BOTH
    assert file.read_text() == VERSION_1
    assert list(tmp_path.iterdir()) == [file]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "strategy.json"
    BOTH.save(file)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StrategyError, match=r"strategy.json' cannot be written: No space left"):
        Strategy().save(file)
    assert file.read_text() == VERSION_1
    assert list(tmp_path.iterdir()) == [file]


def itself() -> dict[str, Any]:
    held: dict[str, Any] = {}
    held["again"] = held
    return held


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy((), {"x": float("nan")}), "$.metadata.x: nan is not a JSON number"),
        (Strategy((), {"x": [object]}), "$.metadata.x[0]: <class 'object'> is a type, which JSON does not hold"),
        (Strategy((), {"x": {1: 2}}), "$.metadata.x: the key 1 is not a string"),
        (Strategy((), {"x": 2**70}), "$.metadata.x: an integer beyond"),
        (Strategy((), itself()), "nested deeper than 32 levels"),
        (Strategy((), {"x": ["a" * 8000] * 200}), "more than 1,048,576 bytes"),
        (Strategy((ToyShard(extra={"x": object()}),)), "$.methods[0]: toy_shard has a knob that no file can hold"),
        (Strategy((ToyShard(extra=itself()),)), "$.methods[0]: toy_shard has a knob that no file can hold"),
        (Strategy((ToyShard(extra={"x": 2**70}),)), "$.methods[0].config.extra.x: an integer beyond"),
    ],
)
def test_what_no_file_can_hold_is_refused_when_it_is_written(strategy: Strategy, message: str) -> None:
    with pytest.raises(StrategyError) as caught:
        strategy.to_json()
    assert message in str(caught.value)
