"""Nothing is left behind: no step holds more than the first ones did, and a job that has ended holds nothing."""

import gc
import time
import weakref
from typing import Any

import pytest
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from atorch import auto_accelerate
from tests.contract.job import BATCH, Tokens, arguments, make_model
from tests.contract.test_parity import APPLIED, attention_of, ranks_of, strategy_of
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
