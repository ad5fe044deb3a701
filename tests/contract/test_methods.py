"""What every registered method keeps, without running a step."""

import json
import math
from dataclasses import fields, replace

import pytest

from atorch.auto.job import make_context
from atorch.auto.session import with_sample
from atorch.auto.strategy import METHODS, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import peak_memory, plain_cost, step_time
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.distributed.world import init
from atorch.errors import StrategyError
from tests.contract.job import BATCH, arguments, make_model
from tests.contract.test_parity import APPLIED, SETTINGS

PROFILE = transformer_profile(
    TransformerShape(layers=8, hidden=64, heads=8, kv_heads=4, ffn=128, vocab=100, seq_len=4096, head_dim=8),
    implementation=Implementation(itemsize=4.0),
)
CLUSTER = ClusterSpec.load("2x8xH100-80GB")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_frozen_documented_and_goes_through_json(name: str) -> None:
    strategy = Strategy.of([(name, SETTINGS[name])])
    assert Strategy.of(strategy.to_json()) == strategy
    assert Strategy.of(json.dumps([[name, json.loads(strategy[0].model_dump_json())]])) == strategy
    with pytest.raises(StrategyError, match=name):
        Strategy.of([(name, {"no_such_knob": 1})])
    for knob in type(strategy[0]).model_fields:
        with pytest.raises(ValueError, match="frozen"):
            setattr(strategy[0], knob, None)
    assert METHODS[name].__doc__
    assert METHODS[name].slot


@pytest.mark.parametrize("name", METHODS)
def test_what_the_search_may_try_has_a_cost_or_a_reason(name: str) -> None:
    """On every mesh: bytes and seconds that are finite, of the same batch, and nothing changed that was given."""
    start = replace(plain_cost(PROFILE, 64), device_bytes=CLUSTER.device.memory_bytes)
    choices = list(METHODS[name].choices(PROFILE, CLUSTER))
    assert len(set(map(str, choices))) == len(choices)
    scored = 0
    for mesh in METHODS["parallel_mode"].choices(PROFILE, CLUSTER):
        before = mesh.cost(start)
        for choice in choices:
            assert Strategy.of(json.dumps([[name, choice.model_dump(mode="json")]])) == Strategy((choice,))
            if choice.unfit(start if name == "parallel_mode" else before) is None:
                cost = choice.cost(start if name == "parallel_mode" else before)
                assert 0 < peak_memory(cost).total < math.inf
                assert 0 < step_time(cost, CLUSTER).total_s < math.inf
                scored += 1
    assert scored or not choices
    assert start == replace(plain_cost(PROFILE, 64), device_bytes=CLUSTER.device.memory_bytes)


@pytest.mark.parametrize("name", APPLIED)
def test_apply_leaves_the_old_context_alone(name: str) -> None:
    world = init()
    job = arguments(dataloader_args={"batch_size": BATCH // 2})  # of a rank of two
    ctx = make_context(make_model(), **job, world=world, cluster=ClusterSpec.detect(world, measure=False))
    setting = METHODS[name].of(SETTINGS[name])
    if setting.needs_sample:
        ctx = with_sample(ctx, Strategy((setting,)))
    before = {field.name: getattr(ctx, field.name) for field in fields(ctx)}
    setting.apply(ctx)
    assert {field.name: getattr(ctx, field.name) for field in fields(ctx)} == before
