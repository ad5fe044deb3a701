"""A registry is a closed table: names are taken once, and a miss says what was near."""

import sys
from pathlib import Path
from typing import Any

import pytest

from atorch.errors import StrategyError
from atorch.registry import Registry


@pytest.fixture
def fruits() -> Registry[int]:
    registry: Registry[int] = Registry("fruit")
    registry.add("pear", 2)
    registry.add("apple", 1)
    return registry


def test_names_are_found_and_sorted(fruits: Registry[int]) -> None:
    assert fruits["apple"] == 1
    assert list(fruits) == ["apple", "pear"]
    assert len(fruits) == 2
    assert "pear" in fruits


def test_a_name_is_taken_once(fruits: Registry[int]) -> None:
    with pytest.raises(ValueError, match="fruit 'apple' is registered already; choose another name"):
        fruits.add("apple", 3)
    assert fruits["apple"] == 1


def test_a_miss_says_what_was_near(fruits: Registry[int]) -> None:
    with pytest.raises(StrategyError, match=r"there is no fruit named 'aple'; did you mean 'apple'\?"):
        fruits["aple"]
    with pytest.raises(StrategyError, match="there is no fruit named 'x'; known: apple, pear"):
        fruits["x"]


def test_removing(fruits: Registry[int]) -> None:
    fruits.remove("pear")
    assert list(fruits) == ["apple"]
    with pytest.raises(StrategyError, match="no fruit named 'pear'"):
        fruits.remove("pear")


@pytest.mark.parametrize("name", [[], {}, 3, None])
def test_what_is_no_name_is_in_no_registry(fruits: Registry[int], name: Any) -> None:
    assert name not in fruits
    with pytest.raises(StrategyError, match="there is no fruit named"):
        fruits[name]


def test_what_comes_along_is_imported_when_the_table_is_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orchard.py").write_text("from tests import test_registry as t\nt.LATE.add('quince', 3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "orchard" not in sys.modules
    with pytest.raises(ValueError, match="'quince' is registered already"):
        LATE.add("quince", 4)
    assert "orchard" in sys.modules
    assert list(LATE) == ["quince"]


LATE: Registry[int] = Registry("fruit", home="orchard")
