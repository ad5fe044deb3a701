"""Whatever a strategy file holds, reading it gives a strategy or a StrategyError with a place, and runs nothing.

The ordinary run reads the first 5,000 of the 100,000 files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.strategy import METHODS, Strategy
from atorch.errors import StrategyError
from tests.auto.strategy.fuzzing import Fuzzer

PLACE = re.compile(r"(\$|a key of \$|line \d+ column \d+|byte \d+|this is a pickle|more than|nested deeper)")


def is_json(data: bytes) -> bool:
    try:
        json.loads(data.decode())
    except (ValueError, RecursionError):
        return False
    return True


def read(data: bytes, number: int, folder: Path) -> Strategy | None:
    """The strategy, by one of the three ways to give it, or None where it is refused as it should be."""
    try:
        if number % 50 == 0:
            file = folder / "strategy.json"
            file.write_bytes(data)
            return Strategy.of(file)
        return Strategy.of(data)
    except StrategyError as error:
        message = str(error).removeprefix(f"{str(folder / 'strategy.json')!r}: ")
        assert PLACE.match(message), message
        assert len(message) < 20_000
        return None


def fuzz(count: int, folder: Path) -> None:
    marker = folder / "marker"
    fuzzer = Fuzzer(20_240_229, marker)
    num_json = num_valid = 0
    for number, data in enumerate(fuzzer.files(count)):
        strategy = read(data, number, folder)
        num_json += is_json(data)
        if strategy is not None:
            num_valid += 1
            again = Strategy.of(strategy.to_json())
            assert again == strategy
            assert again.metadata == strategy.metadata
    assert not marker.exists()
    assert num_json >= count * 0.5
    assert count * 0.1 <= num_valid <= count * 0.6
    in_files = {
        (name, knob) for name in METHODS for knob, field in METHODS[name].model_fields.items() if not field.exclude
    }
    assert fuzzer.knobs_seen == in_files


def test_5_000_files(tmp_path: Path) -> None:
    fuzz(5_000, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1_800)
def test_100_000_files(tmp_path: Path) -> None:
    fuzz(100_000, tmp_path)
