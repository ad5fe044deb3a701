"""A strategy is an ordered, valid set of methods, from any of the forms that users write."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from atorch.auto.strategy import METHODS, Method, Phase, Recipe, Strategy, method
from atorch.errors import StrategyError
from tests.auto.strategy.toys import ToyAmp, ToyCompile, ToyContext, ToyHalf, ToyMesh, ToyShard

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


BOTH = Strategy((ToyMesh(), ToyAmp(dtype="bf16")))


@pytest.mark.parametrize(
    "source",
    [
        ["toy_mesh", ("toy_amp", "bf16")],
        ["toy_mesh", ["toy_amp", "bf16"]],
        [("toy_mesh", None), ("toy_amp", {"dtype": "bf16"})],
        [ToyMesh(), ("toy_amp", ToyAmp(dtype="bf16"))],
        ("toy_mesh", ToyAmp(dtype="bf16")),
        [{"name": "toy_mesh"}, {"name": "toy_amp", "config": "bf16"}],
        (each for each in BOTH),
        BOTH,
        '["toy_mesh", ["toy_amp", "bf16"]]',
        ' \n["toy_mesh", ["toy_amp", {"dtype": "bf16"}]]',
        b'{"atorch_strategy": 1, "methods": ["toy_mesh", {"name": "toy_amp", "config": {"dtype": "bf16"}}]}',
    ],
)
def test_every_form_that_users_write(source: Any) -> None:
    assert Strategy.of(source) == BOTH


def test_methods_are_in_the_order_of_phases() -> None:
    given = Strategy.of(["toy_shard", "toy_compile", "toy_amp", "toy_mesh"])
    assert given.names() == ("toy_mesh", "toy_amp", "toy_compile", "toy_shard")
    assert given == Strategy.of(["toy_mesh", "toy_compile", "toy_shard", "toy_amp"])

    both = Strategy((ToyShard(), ToyCompile()))
    assert both.cost([]) == ["toy_compile", "toy_shard"]  # type: ignore[arg-type, comparison-overlap]
    ctx = both.apply(ToyContext())  # type: ignore[arg-type]
    assert ctx == ToyContext(("toy_compile", "toy_shard"), both)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (["toy_msh"], r"strategy\[0\]: there is no method named 'toy_msh'; did you mean 'toy_mesh'\?"),
        (["toy_mesh", ("toy_recip", 1)], r"strategy\[1\]\[0\]: .*did you mean 'toy_recipe'\?"),
        (["toy_amp", "toy_half"], r"strategy\[1\]: toy_amp and toy_half exclude each other: .* one toy_precision"),
        (["toy_amp", "toy_mesh", ("toy_amp", "bf16")], r"strategy\[2\]: toy_amp is given twice"),
        ([("toy_amp", {"dtype": "fp8"})], r"strategy\[0\]\[1\].dtype: toy_amp.dtype was given 'fp8'"),
        ([("toy_amp", "fp3")], r"strategy\[0\]\[1\]: toy_amp.dtype was given 'fp3'"),
        ([("toy_mesh", {"slices": [("data", 2), ("tensor", 0.5)]})], r"strategy\[0\]\[1\].slices\[1\]\[1\]: "),
        ([("toy_shard", {"use_ds_zero", True})], r"strategy\[0\]\[1\]: .* write the dict {'use_ds_zero': True}"),
        ([{"toy_amp", "bf16"}], r"strategy\[0\]: .* a set has no order: write a tuple"),
        ([{"toy_amp": "bf16"}], r"strategy\[0\].toy_amp: .*: write \('toy_amp', 'bf16'\)"),
        ([{"name": 3}], r"strategy\[0\].name: 3 is not a method's name"),
        ([{}], r"strategy\[0\].name: None is not a method's name"),
        ([("toy_amp", "bf16", True, 1)], r"strategy\[0\]: .* is not a method; a method is written"),
        ([ToyAmp], r"strategy\[0\]: .* is not a method"),
        ([None], r"strategy\[0\]: None is not a method"),
        ([(ToyAmp, "bf16")], r"strategy\[0\]: .* is not a method"),
        (["toy_mesh"] * 101, "101 methods; a strategy has at most 100"),
        ({"toy_amp": "bf16"}, "a strategy cannot be made of dict"),
        (None, "a strategy cannot be made of NoneType None"),
        (bytearray(b"[]"), "a strategy cannot be made of bytearray"),
        (Path, "a strategy cannot be made of type"),
    ],
)
def test_what_does_not_hold_is_refused_with_its_place(source: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Strategy.of(source)


def test_only_registered_methods_make_a_strategy() -> None:
    with pytest.raises(StrategyError, match="'toy_amp' is none. Build one with Strategy.of"):
        Strategy(("toy_amp",))  # type: ignore[arg-type]

    class Forgotten(Method):
        """Without the decorator."""

    with pytest.raises(StrategyError, match="Forgotten is not registered; decorate it with @method"):
        Strategy.of([Forgotten()])


def test_a_recipe_stands_for_methods_beside_the_others() -> None:
    assert Strategy.of(["toy_recipe"]).names() == ("toy_mesh", "toy_shard")
    shared = Strategy.of([("toy_recipe", {"slices": [["data", 4]]}), ("toy_shard", {"share": 0.5})])
    assert shared == Strategy((ToyMesh(slices=(("data", 4),)), ToyShard(share=0.5)))
    with pytest.raises(StrategyError, match=r"strategy\[1\]: toy_mesh is given twice"):
        Strategy.of(["toy_mesh", "toy_recipe"])
    with pytest.raises(StrategyError, match=r"strategy\[0\]\[1\].slices\[0\]"):
        Strategy.of([("toy_recipe", {"slices": [3]})])


def test_it_is_a_sequence_of_methods() -> None:
    assert len(BOTH) == 2
    assert BOTH[0] == ToyMesh()
    assert BOTH[1:] == (ToyAmp(dtype="bf16"),)
    assert list(BOTH) == list(BOTH.methods)
    assert "toy_amp" in BOTH
    assert ToyAmp(dtype="bf16") in BOTH
    assert ToyAmp() not in BOTH
    assert "toy_half" not in BOTH

    assert BOTH.get(ToyAmp) == ToyAmp(dtype="bf16")
    assert BOTH.get(ToyHalf) is None

    assert Strategy()
    assert Strategy.of([])
    assert not len(Strategy())

    assert Strategy.of(BOTH) is BOTH

    known = dataclasses.replace(BOTH, metadata={"world_size": 2})
    swapped = known.with_method(ToyHalf())
    assert swapped.names() == ("toy_mesh", "toy_half")
    assert known.without("toy_amp").names() == ("toy_mesh",)
    assert swapped.metadata == known.without("toy_amp").metadata == {"world_size": 2}
    assert known == BOTH
    with pytest.raises(StrategyError, match="did you mean 'toy_amp'"):
        BOTH.without("toy_am")

    assert Strategy(BOTH.methods, {"a": 1}) == BOTH
    assert hash(Strategy(BOTH.methods, {"a": 1})) == hash(BOTH)
    assert Strategy((ToyMesh(), ToyAmp())) != BOTH

    assert BOTH.report is None
    assert Strategy(BOTH.methods, {"report": {"rejected": []}}).report == {"rejected": []}


@pytest.mark.parametrize("new", ["toy_half", ("toy_half", None), {"name": "toy_half"}])
def test_with_method_takes_what_a_list_may_hold(new: Any) -> None:
    assert BOTH.with_method(new) == BOTH.with_method(ToyHalf())


@pytest.mark.parametrize(
    ("new", "message"),
    [("toy_haf", "did you mean 'toy_half'"), (None, "None is not a method"), (["toy_half"], "is not a method")],
)
def test_with_method_refuses_what_a_list_may_not_hold(new: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        BOTH.with_method(new)


def test_it_is_shown_as_a_person_writes_it() -> None:
    assert str(BOTH) == "toy_mesh + toy_amp(bf16)"
    assert str(Strategy()) == "plain"

    strategy = Strategy.of(["fsdp", ("amp_native", "bf16")])
    assert repr(strategy) == "<Strategy amp_native(bf16) + fsdp>"
    assert strategy._repr_html_() == "<code>amp_native(bf16)</code> + <code>fsdp</code>"

    strategy = Strategy.of(["fsdp", ("amp_native", "bf16")])
    assert strategy.to_list() == [["amp_native", {"dtype": "bf16"}], "fsdp"]
    assert Strategy.of(strategy.to_list()) == strategy
    with pytest.raises(StrategyError, match="objects of this process"):
        Strategy.of([("fsdp", {"param_init_fn": print})]).to_list()
