"""Nothing is left behind: no step holds more than the first ones did, and a job that has ended holds nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import Tensor, nn

from atorch import auto_accelerate
from tests.contract.job import BATCH, Tokens, arguments, make_model
from tests.contract.test_parity import APPLIED, attention_of, ranks_of, strategy_of
from tests.pool import Pool

WARM_UP = 3
SAMPLE = {"ddp", "fsdp", "pipeline_parallel", "chunk", "offload"}


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def held_after_steps(rank: int, size: int, load_strategy: Any, attention: str) -> tuple[int, int]:
    """The tensors that are alive after a few steps, and after as many again."""
    given = arguments(dataset=Tokens(2 * WARM_UP * BATCH))
    _, result, _ = auto_accelerate(make_model(attention), load_strategy=load_strategy, **given)
    assert result is not None
    device = next(result.model.parameters()).device
    held = []
    for number, batch in enumerate(result.dataloader, start=1):
        batch = result.prepare_input(batch, device)
        loss = result.loss_func(batch, result.model(**batch))
        loss.backward()
        result.optim.step()
        result.optim.zero_grad()
        if number in (WARM_UP, 2 * WARM_UP):
            held.append(num_tensors())
    early, late = held
    return early, late


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.matrix) for name in APPLIED]
)
def test_no_method_holds_more_after_more_steps(pool: Pool, name: str) -> None:
    for early, late in pool.run(held_after_steps, strategy_of(name), attention_of(name), ranks=ranks_of(name)):
        assert late <= early


def left_of_a_job(rank: int, size: int, load_strategy: Any, attention: str) -> list[str]:
    """The parameters, of the user's model or the accelerated one, that are alive after a job has ended."""
    known: dict[str, weakref.ref[nn.Parameter]] = {}

    def job() -> None:
        model = make_model(attention)
        known.update((f"the user's {name}", weakref.ref(each)) for name, each in model.named_parameters())
        given = arguments(dataset=Tokens(BATCH))
        _, result, _ = auto_accelerate(model, load_strategy=load_strategy, **given)
        assert result is not None
        known.update((name, weakref.ref(each)) for name, each in result.model.named_parameters())
        device = next(result.model.parameters()).device
        for batch in result.dataloader:
            batch = result.prepare_input(batch, device)
            result.loss_func(batch, result.model(**batch)).backward()
            result.optim.step()

    job()
    gc.collect()
    return [name for name, reference in known.items() if reference() is not None]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in {"fsdp", "chunk"} else pytest.mark.matrix) for name in APPLIED]
)
def test_a_job_that_has_ended_holds_no_parameter(pool: Pool, name: str) -> None:
    """A search would otherwise hold every candidate that it has run."""
    assert pool.run(left_of_a_job, strategy_of(name), attention_of(name), ranks=ranks_of(name)) == (
        [[]] * ranks_of(name)
    )
