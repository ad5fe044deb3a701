"""Gradients in the place of parameters train the same bits, and say so where a pass would read them as parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from atorch.auto.opt_lib.chunk.trace import foreseen
from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.schedule_cache import Courses
from tests.pool import on_ranks
from tests.runtime.chunk.test_training import CPU, FAMILIES, adam, assert_same_bits, fresh, needed, train

HALF = torch.bfloat16


def prepared(family: str, in_place: bool, group: dist.ProcessGroup | None = None) -> Any:
    """What trains a model of a family in chunks, under a budget that brings most of them twice a pass."""
    make, data, loss = FAMILIES[family]
    model = fresh(make)
    courses = Courses(lambda batch, /, **how: foreseen(model, batch, loss, device_type="cpu", dtype=HALF, **how), group)
    courses.expect(data(0), [data(0)])
    passed = courses.first()  # one for all processes
    others, parameters = needed(passed, model)
    operations = chunk(model, passed, others + parameters // 4, device=CPU, dtype=HALF, in_place=in_place, group=group)
    return model, ChunkOptimizer(adam, model.parameters(), operations.chunks), data, loss, operations


@pytest.mark.parametrize("family", ["gpt2", "recurrent"])
def test_same_bits_as_beside(family: str) -> None:
    model, optim, data, loss, _ = prepared(family, False)
    expected = train(model, optim, data, loss)
    mine, optim, data, loss, operations = prepared(family, True)
    assert train(mine, optim, data, loss) == expected
    assert operations.residency.fetched_bytes > 3 * sum(chunk.compute.nbytes for chunk in operations.chunks.chunks)
    assert all(chunk.gradient is chunk.compute for chunk in operations.chunks.chunks if chunk.gradient is not None)
    assert_same_bits(mine, model)


@on_ranks()
def test_same_bits_where_processes_share_chunks(rank: int, size: int) -> None:
    trained = []
    for in_place in (False, True):
        model, optim, data, loss, _ = prepared("gpt2", in_place, dist.group.WORLD)
        losses = train(model, optim, lambda number, data=data: data(size * number + rank), loss)
        trained.append((losses, model.state_dict()))
    (expected, theirs), (losses, mine) = trained
    assert losses == expected
    assert all(torch.equal(theirs[name], value) for name, value in mine.items())


def test_one_pass_a_step() -> None:
    model, optim, data, loss, _ = prepared("llama", True)
    loss(model, data(0)).backward()
    with pytest.raises(ArgumentError, match="another pass began before they were stepped on or cleared"):
        loss(model, data(1))
    optim.zero_grad(set_to_none=False)
    loss(model, data(1)).backward()
    optim.step()
    assert loss(model, data(0)).isfinite()
