"""Equal values are described alike on two processes, different ones are not, and what has no value by its class."""

import functools
import os
import random
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atorch.distributed.fingerprints import digest, facts_of, facts_of_dataset, facts_of_model, structure


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    depth: int
    name: str = "a"
    cache: object = field(default_factory=object, compare=False)


class Callable:
    def __init__(self, weight: float = 0.0) -> None:
        self.weight = weight

    def __call__(self) -> None: ...

    def method(self) -> None: ...


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise RuntimeError("not counted yet")


def scale(value: float) -> Any:
    return lambda x: x * value


def within() -> list[Any]:
    held: list[Any] = [1]
    held.append(held)
    return held


EQUAL: list[tuple[Any, Any]] = [
    (0.1, np.float64(0.1)), (1, 1.0), (1, np.int32(1)), (float("nan"), float("nan")), (Fraction(1, 2), 0.5), ("a", "a"),
    (Path("a/b"), "a/b"), ([1, 2], (1, 2)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({"x", "y", "z"}, {"z", "y", "x"}),
    (torch.float16, torch.float16), (torch.device("cuda", 0), torch.device("cuda", 1)),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])), (torch.arange(100), torch.arange(100)),
    (torch.tensor(1 + 2j), torch.tensor(1 + 2j)), (torch.ones(3).to_sparse(), torch.zeros(3).to_sparse()),
    (np.arange(10), np.arange(10)), (Colour.RED, Colour.RED), (Settings(1), Settings(1)), (object(), object()),
    (Callable(1.0), Callable(2.0)), (Callable().method, Callable().method), (random.Random(1), random.Random(2)),
    (torch.Generator(), torch.Generator().manual_seed(3)), (scale(1.0), scale(2.0)), (nn.Linear(2, 2), nn.Linear(2, 2)),
    (functools.partial(scale, value=1.0), functools.partial(scale, value=1.0)), (within(), within()),
]  # fmt: skip
DIFFERENT: list[tuple[Any, Any]] = [
    (0.1, 0.2), (1, True), (1, "1"), (None, 0), ("a" * 500 + "b", "a" * 500 + "c"), ([1, 2], [2, 1]),
    ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({"a", "b"}, {"a", "c"}), (torch.float16, torch.bfloat16),
    (torch.device("cuda"), torch.device("cpu")), (torch.arange(100), torch.arange(1, 101)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)), (np.zeros(10), np.ones(10)), (Colour.RED, Colour.BLUE),
    (Settings(1), Settings(2)), (torch.optim.SGD, torch.optim.Adam), (lambda x: x, lambda x: x + 1),
    (functools.partial(scale, value=1.0), functools.partial(scale, value=2.0)),
    (functools.partial(scale, 1.0), functools.partial(within, 1.0)), (len, max), (range(3), range(4)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "is_equal"), [*((pair, True) for pair in EQUAL), *((pair, False) for pair in DIFFERENT)]
)
def test_equal_values_and_what_has_none_are_described_alike(pair: tuple[Any, Any], is_equal: bool) -> None:
    one, other = (facts_of("x", value) for value in pair)
    assert (one == other) is (digest(one) == digest(other)) is is_equal


def test_what_partials_hold_can_be_left_out() -> None:
    one, other = (functools.partial(scale, value=value) for value in (1.0, 2.0))
    assert facts_of("x", one, bound=False) == facts_of("x", other, bound=False)
    assert facts_of("x", one, bound=False) != facts_of("x", functools.partial(within), bound=False)


def test_a_structure_has_no_sizes() -> None:
    one, other = ({"tokens": torch.zeros(2, length), "name": "a"} for length in (3, 4))
    assert structure("x", one) == structure("x", other)
    assert structure("x", one) != structure("x", {"tokens": torch.zeros(3), "name": "a"})


@pytest.mark.parametrize("dataset", [None, [1, 2], iter([1]), Unsized()])
def test_any_dataset_is_described(dataset: Any) -> None:
    assert facts_of_dataset(dataset) == facts_of_dataset(dataset)
    assert facts_of_dataset([1, 2]) != facts_of_dataset([1, 2, 3])


def test_models_are_told_apart_by_order_shape_dtype_mode_and_ties() -> None:
    def pair(first: str = "a", **more: Any) -> nn.Module:
        made = nn.Module()
        made.add_module(first, nn.Linear(2, 2, **more))
        made.add_module("b" if first == "a" else "a", nn.Linear(2, 2, **more))
        return made

    tied, frozen, buffered = pair(), pair(), pair()
    tied.b.weight = tied.a.weight
    frozen.a.weight.requires_grad_(False)
    buffered.register_buffer("count", torch.zeros(3))
    models = [pair(), pair("b"), pair(dtype=torch.float16), pair().eval(), tied, frozen, buffered, nn.Linear(2, 2)]
    known = [{name: digest(facts) for name, facts in facts_of_model(model).items()} for model in models]
    assert len(set(map(str, known))) == len(models)
    assert facts_of_model(pair()) == facts_of_model(pair())


SCRIPT = """
from atorch.distributed.fingerprints import facts_of, digest
def choose(x):
    return x in {"one", "two", "three", "four"}
print(digest(facts_of("x", [choose, {"one", "two", "three"}, lambda y: (y, object)])))
"""


@pytest.mark.slow
def test_a_description_does_not_depend_on_hash_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another than here
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    told = subprocess.run([sys.executable, script], env=environment, check=True, capture_output=True, text=True)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == told.stdout
