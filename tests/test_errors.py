"""The error tree, and the ends of messages."""

import inspect
import pickle
import re

import pytest

from atorch import errors
from atorch.errors import MAX_LISTED, AtorchError, StrategyError, near_miss, shown

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AtorchError)]


def test_the_drawn_tree_is_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__ or "")
    for kind in set(KINDS) - {AtorchError}:
        assert (kind.__name__, "ValueError" if issubclass(kind, ValueError) else "") in drawn
    assert len(drawn) == len(KINDS) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_made_of_a_message_and_travels_between_processes(kind: type[AtorchError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what holds")))  # noqa: S301
    assert type(error) is kind
    assert str(error) == "what holds"


def test_a_strategy_error_keeps_its_place() -> None:
    assert StrategyError("x").place == ()
    error = pickle.loads(pickle.dumps(StrategyError("x", ("slices", 0))))  # noqa: S301
    assert error.place == ("slices", 0)
    assert str(error) == "x"


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("paralle_mode", ["parallel_mode", "pipeline_parallel"], "did you mean 'parallel_mode'?"),
        ("xyz", ["fsdp", "ddp"], "known: ddp, fsdp"),
        ("xyz", [], "nothing is known here"),
        ("xyz", [f"{n:03}" for n in range(100)], "known: " + ", ".join(f"{n:03}" for n in range(MAX_LISTED)) + ", …"),
    ],
)
def test_near_miss(name: str, known: list[str], end: str) -> None:
    assert near_miss(name, known) == end


def test_shown_is_cut_at_the_limit() -> None:
    assert shown("abc") == "'abc'"
    assert shown("a" * 10, 12) == repr("a" * 10)
    assert shown("a" * 11, 12) == "'" + "a" * 10 + "…"
