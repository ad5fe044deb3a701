"""Registered methods without a step; and no step holds more than the first ones did, nor an ended job anything."""

import gc
import json
import math
import time
import weakref
from dataclasses import fields, replace
from typing import Any

import pytest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from atorch import auto_accelerate
from atorch.auto.job import make_context
from atorch.auto.session import with_sample
from atorch.auto.strategy import METHODS, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import peak_memory, plain_cost, step_time
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.distributed.world import init
from atorch.errors import StrategyError
from tests.contract.job import BATCH, Tokens, arguments, make_model
from tests.contract.test_parity import APPLIED, SETTINGS, attention_of, ranks_of, strategy_of
from tests.pool import Pool

WARM_UP = 3
LETTING_GO_S = 2.0


def sampled(*names: str) -> list[Any]:
    """All methods; but for those named they are `slow`."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in APPLIED]


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def num_tensors_soon(most: int) -> int:
    """The tensors that are alive, after a moment if that makes them no more than `most`.

    A thread of gloo lets go of a tensor a little after the collective is done.
    """
    until = time.monotonic() + LETTING_GO_S
    while (number := num_tensors()) > most and time.monotonic() < until:
        time.sleep(0.01)
    return number


def held_after_steps(rank: int, size: int, load_strategy: Any, attention: str) -> tuple[int, int]:
    """The tensors that are alive after a few steps, and after as many again."""
    given = arguments(dataset=Tokens(2 * WARM_UP * BATCH))
    _, result, _ = auto_accelerate(make_model(attention), load_strategy=load_strategy, **given)
    early = 0
    for number, batch in enumerate(result.dataloader, start=1):
        result.step(batch)
        if number == WARM_UP:
            early = num_tensors()
    return early, num_tensors_soon(early)


@pytest.mark.parametrize("name", sampled("ddp", "fsdp", "pipeline_parallel", "chunk", "offload"))
def test_no_method_holds_more_after_more_steps(pool: Pool, name: str) -> None:
    for early, late in pool.run(held_after_steps, strategy_of(name), attention_of(name), ranks=ranks_of(name)):
        assert late <= early


def fakes() -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), FakeTensor)]


def left_of_a_job(rank: int, size: int, load_strategy: Any, attention: str) -> list[str]:
    """What is alive after a job has ended: parameters of the user's model or the accelerated one, and fake tensors."""
    known: dict[str, weakref.ref[Any]] = {}

    def job() -> None:
        model = make_model(attention)
        known.update((f"the user's {name}", weakref.ref(each)) for name, each in model.named_parameters())
        given = arguments(dataset=Tokens(BATCH))
        _, result, _ = auto_accelerate(model, load_strategy=load_strategy, **given)
        known.update((name, weakref.ref(each)) for name, each in result.model.named_parameters())
        known.update((f"module {name}", weakref.ref(each)) for name, each in result.model.named_modules())
        for batch in result.dataloader:
            result.step(batch)

    job()  # the first of its kind fills caches of torch's
    before = {id(each) for each in fakes()}
    job()
    gc.collect()
    left = [name for name, reference in known.items() if reference() is not None]
    return left + [str(each) for each in fakes() if id(each) not in before]


@pytest.mark.parametrize("name", sampled("fsdp", "chunk", "zero1", "zero2", "offload"))
def test_a_job_that_has_ended_holds_no_tensor_of_a_model(pool: Pool, name: str) -> None:
    """A search would otherwise hold every candidate that it has run."""
    assert pool.run(left_of_a_job, strategy_of(name), attention_of(name), ranks=ranks_of(name)) == (
        [[]] * ranks_of(name)
    )


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
