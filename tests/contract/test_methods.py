"""What every registered method keeps, without running a step."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from atorch.auto.strategy import METHODS, Strategy
from atorch.errors import StrategyError
from tests.contract.test_parity import SETTINGS


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod:
    def test_is_the_same_after_a_round_trip_through_json(self, name: str) -> None:
        strategy = Strategy.of([(name, SETTINGS[name])])
        assert Strategy.of(strategy.to_json()) == strategy
        assert Strategy.of(json.dumps([[name, json.loads(strategy[0].model_dump_json())]])) == strategy

    def test_refuses_an_unknown_knob(self, name: str) -> None:
        with pytest.raises(StrategyError, match=name):
            Strategy.of([(name, {"no_such_knob": 1})])

    def test_is_frozen(self, name: str) -> None:
        each = METHODS[name].of(SETTINGS[name])
        knob = next(iter(type(each).model_fields), None)
        if knob is not None:
            with pytest.raises(ValueError, match="frozen"):
                setattr(each, knob, None)

    def test_says_what_it_is(self, name: str) -> None:
        assert METHODS[name].__doc__
        assert METHODS[name].slot


@pytest.mark.parametrize("name", METHODS)
def test_apply_leaves_the_old_context_alone(name: str) -> None:
    from atorch.auto.job import make_context
    from atorch.cluster import ClusterSpec
    from atorch.distributed.world import init
    from tests.contract.job import arguments, make_model

    world = init()
    ctx = make_context(make_model(), **arguments(), world=world, cluster=ClusterSpec.detect(world, measure=False))
    before = {field.name: getattr(ctx, field.name) for field in fields(ctx)}
    METHODS[name].of(SETTINGS[name]).apply(ctx)
    assert {field.name: getattr(ctx, field.name) for field in fields(ctx)} == before
