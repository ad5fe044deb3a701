"""Plain data as JSON, there and back; what is none is refused with its path."""

import json
import math
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atorch.checkpoint.manifest import decoded, encoded
from atorch.errors import CheckpointError
from atorch.files.weights import is_same

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
KEYS = TEXT | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.tuples(TEXT, st.integers())
LEAVES = KEYS | st.floats() | st.integers(-(2**200), 2**200) | st.just(torch.arange(3))
DATA = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def there_and_back(value):
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encoded(value, "plain", "$plain.", tensors), allow_nan=False)
    return decoded(json.loads(text), tensors.__getitem__)


@given(DATA)
def test_plain_data_comes_back(value):
    found = there_and_back(value)
    assert is_same(found, value)
    assert shape(found) == shape(value)


def shape(value):
    """The types of a value and what it contains; `==` takes 1 for True."""
    if isinstance(value, dict):
        return [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape(item) for item in value]
    return type(value)


@pytest.mark.parametrize(
    "value",
    [
        {"milestones": Counter({3: 1, 7: 2})},
        {"$float": "inf", "$tensor": 1},
        {"$tuple": [1]},
        {"": {}, "a": {"$x": ()}},
        [math.inf, -math.inf, -0.0],
    ],
)
def test_values_that_json_does_not_have(value):
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)


def test_subclasses_become_plain():
    found = there_and_back({"state": OrderedDict(a=torch.Size([2]))})
    assert found == {"state": {"a": (2,)}}
    assert type(found["state"]) is dict


def looped():
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"scheduler": {"fn": max}}, r"^plain\.scheduler\.fn is <built-in function max>, a builtin_function_or"),
        ({"a": [1, {2: {3}}]}, r"^plain\.a\[1\]\[2\] is \{3\}, a set; a checkpoint holds numbers, texts"),
        ({"path": Path("x")}, r"^plain\.path is PosixPath\('x'\), a PosixPath"),
        ({"a": {max: 1}}, r"^a key of plain\.a is <built-in function max>"),
        ({"a": b"x"}, r"^plain\.a is b'x', a bytes"),
        ({"a": 1 << 9000}, r"^plain\.a: an integer of 9,001 bits"),
        ({"a": "\ud800"}, r"^plain\.a: '\\ud800' has no form in UTF-8"),
        ({"a": looped()}, r"^plain\.a\[0\].*: nested deeper than 64 levels"),
    ],
)
def test_what_is_no_plain_data_is_refused_with_its_path(value, told):
    with pytest.raises(CheckpointError, match=told):
        encoded(value, "plain", "$plain.", {})


@pytest.mark.parametrize(
    "value",
    [
        {"$float": "1"},
        {"$float": [1]},
        {"$tuple": 1},
        {"$tensor": 1},
        {"$dict": [[[], 1]]},
        {"$dict": [1]},
        {"$dict": None},
        {"$counter": "ab"},
        {"$": 1},
        [{"$other": 1}],
    ],
)
def test_what_nothing_encodes_to_is_refused(value):
    with pytest.raises(CheckpointError, match="no plain data of a checkpoint"):
        decoded(value, {}.__getitem__)
