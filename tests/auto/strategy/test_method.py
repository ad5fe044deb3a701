"""Building a method is what checks it, and its errors say what was meant."""

from __future__ import annotations

from typing import Any

import pytest

from atorch.auto.strategy import METHODS, Method, Phase, Recipe, method
from atorch.errors import StrategyError
from tests.auto.strategy.toys import ToyAmp, ToyHalf, ToyMesh, ToyShard

pytestmark = pytest.mark.usefixtures("toys")


def test_a_config_has_forms_and_makes_a_frozen_method() -> None:
    assert ToyAmp.of() == ToyAmp.of(None) == ToyAmp.of({}) == ToyAmp(dtype="fp16")

    amp = ToyAmp(dtype="bf16")
    assert ToyAmp.of(amp) is amp

    assert ToyAmp.of("bf16") == ToyAmp(dtype="bf16")

    amp = ToyAmp()
    with pytest.raises(ValueError, match="frozen"):
        amp.dtype = "bf16"
    assert len({ToyAmp(), ToyAmp(dtype="fp16"), ToyAmp(dtype="bf16")}) == 2

    config = {"dtype": "bf16"}
    ToyAmp.of(config)
    assert config == {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        (ToyAmp, {"dtyp": "bf16"}, r"toy_amp has no knob 'dtyp'; did you mean 'dtype'\?"),
        (ToyAmp, {1: 2}, "toy_amp has no knob 1; known: dtype, skip"),
        (ToyHalf, {"x": 1}, "toy_half has no knob 'x'; it has none"),
        (ToyAmp, 5, "toy_amp was given 5; it takes a dict of dtype, skip"),
        (ToyHalf, ToyAmp(), "toy_half was given ToyAmp(.*); it takes a dict of nothing"),
        (ToyAmp, "fp8", "toy_amp.dtype was given 'fp8': Input should be 'fp16' or 'bf16'"),
        (ToyShard, {"share": 0.0}, "toy_shard.share was given 0.0: Input should be greater than 0"),
        (ToyShard, {"share": float("nan")}, "toy_shard.share was given nan"),
        (ToyMesh, {"slices": [["data", "x"]]}, "toy_mesh.slices.0.1 was given 'x'"),
        (ToyShard, {"use_ds_zero", True}, "was given the set .*; write the dict {'use_ds_zero': True}"),
        (ToyAmp, {"dtype", "bf16"}, "was given the set .*; write the dict {'dtype': 'bf16'}"),
        (ToyAmp, {"skip"}, "was given the set {'skip'}; write a dict of dtype, skip"),
        (ToyAmp, frozenset(("a", "b")), "was given the set .*; write a dict of dtype, skip"),
    ],
)
def test_what_does_not_hold_is_refused(kind: type[Method], config: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        kind.of(config)


def test_an_error_knows_the_place_and_quotes_in_part() -> None:
    with pytest.raises(StrategyError) as caught:
        ToyMesh.of({"slices": [["data", 2], ["tensor", None]]})
    assert caught.value.place == ("slices", 1, 1)

    with pytest.raises(StrategyError) as caught:
        ToyAmp.of({"dtype": "x" * 10_000})
    assert len(str(caught.value)) < 300


def test_registering_gives_name_phase_and_slot_once() -> None:
    @method("toy_new", phase=Phase.STEP)
    class New(Method):
        """A method in a slot of its own."""

    try:
        assert METHODS["toy_new"] is New
        assert (New.name, New.phase, New.slot) == ("toy_new", Phase.STEP, "toy_new")
    finally:
        METHODS.remove("toy_new")

    with pytest.raises(ValueError, match="'toy_amp' is registered already"):

        @method("toy_amp", phase=Phase.STEP)
        class Second(Method):
            """Comes too late."""

    assert METHODS["toy_amp"] is ToyAmp


def test_what_a_method_need_not_say_and_a_recipe_must() -> None:
    cost, anything = object(), object()
    assert ToyHalf().cost(cost) is cost  # type: ignore[arg-type]
    assert ToyHalf().unmet(anything) is None  # type: ignore[arg-type]
    assert list(ToyHalf.choices(anything, anything)) == []  # type: ignore[arg-type]

    class Empty(Recipe):
        name = "empty"

    with pytest.raises(NotImplementedError, match="Empty"):
        Empty.expand(None, ())
