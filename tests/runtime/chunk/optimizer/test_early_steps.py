"""Chunks stepped in backward, in place or by pieces, train the same bits, or tell a loop that looks in between."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atorch.auto.opt_lib.chunk.trace import trace_pass
from atorch.errors import ArgumentError
from atorch.runtime.chunk import optimizer_slices
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from atorch.runtime.chunk.schedule_cache import ScheduleCache
from benchmarks.paced_link import Paced
from tests.pool import on_ranks
from tests.runtime.chunk.test_training import CPU, FAMILIES, assert_same_bits, fresh, in_chunks, needed, train

HALF = torch.bfloat16


def beside_or_in_place(family: str, in_place: bool, group: dist.ProcessGroup | None = None) -> Any:
    """The objects that train a model in chunks, under a budget that brings most of them twice a pass."""
    make, data, loss = FAMILIES[family]
    model = fresh(make)
    schedules = ScheduleCache(
        lambda batch, /, **how: trace_pass(model, batch, loss, device_type="cpu", dtype=HALF, **how), group
    )
    schedules.expect(data(0), [data(0)])
    passed = schedules.first()  # one for all processes
    others, parameters = needed(passed, model)
    operations = chunk(model, passed, others + parameters // 4, device=CPU, dtype=HALF, in_place=in_place, group=group)
    return model, ChunkOptimizer(adam, model.parameters(), operations.chunks), data, loss, operations


@pytest.mark.parametrize("family", ["gpt2", "recurrent"])
def test_same_bits_as_beside(family: str) -> None:
    model, optim, data, loss, _ = beside_or_in_place(family, False)
    expected = train(model, optim, data, loss)
    mine, optim, data, loss, operations = beside_or_in_place(family, True)
    assert train(mine, optim, data, loss) == expected
    assert operations.residency.fetched_bytes > 3 * sum(chunk.compute.nbytes for chunk in operations.chunks.chunks)
    assert {chunk.gradient is chunk.compute for chunk in operations.chunks.chunks if chunk.gradient is not None} == {
        True
    }
    assert_same_bits(mine, model)


@on_ranks()
def test_same_bits_where_processes_share_chunks(rank: int, size: int) -> None:
    trained = []
    for in_place in (False, True):
        model, optim, data, loss, _ = beside_or_in_place("gpt2", in_place, dist.group.WORLD)
        losses = train(model, optim, lambda number, data=data: data(size * number + rank), loss)
        trained.append((losses, model.state_dict()))
    (expected, theirs), (losses, mine) = trained
    assert losses == expected
    assert all(torch.equal(theirs[name], value) for name, value in mine.items())


NUMEL = 3 * 2**24


def lengths(device: str, fused: bool) -> list[int]:
    """Of the pieces of a large parameter."""
    chunk: Any = SimpleNamespace(
        master=torch.empty(NUMEL, device=device),
        share=slice(0, NUMEL),
        within=lambda _: slice(0, NUMEL),
        forms={"weight": SimpleNamespace(shape=(NUMEL,))},
    )
    slot: Any = SimpleNamespace(name="weight", offset=0, numel=NUMEL)
    return [piece.numel for piece in optimizer_slices.cut(chunk, slot, 0, fused)]


@pytest.mark.parametrize("fused", [False, True])
def test_caches_decide_on_the_host_and_calls_on_a_device(fused: bool) -> None:
    """With 26 µs of Python a piece, and pieces of a host's caches, 8 billion parameters took 0.8 s a step."""
    on_host, on_device = lengths("cpu", fused), lengths("meta", fused)
    assert set(on_host) == {2**19 if fused else 2**18}
    assert sum(on_host) == sum(on_device) == NUMEL
    assert 8e9 / max(on_device) * 26e-6 < 0.02
    assert 4 * max(on_device) <= 2**26, "fp32 gradients of a piece are room beside the budget"


def adam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def prepared(family: str, early: bool, dtype: Any = None, in_place: bool = False, transfer: Any = None) -> Any:
    how = {"dtype": dtype, "in_place": in_place, "transfer": transfer}
    model, optim, operations, _ = in_chunks(family, 0.25, optimizer=adam, early=early, **how)
    return model, optim, *FAMILIES[family][1:], operations


@pytest.mark.parametrize(("family", "way"), [("gpt2", (None, False)), ("llama", (HALF, False)), ("gpt2", (HALF, True))])
def test_same_bits_as_in_the_step(family: str, way: tuple[Any, bool]) -> None:
    model, optim, data, loss, _ = prepared(family, False, *way)
    expected = train(model, optim, data, loss)
    mine, optim, data, loss, operations = prepared(family, True, *way)
    assert train(mine, optim, data, loss) == expected
    assert_same_bits(mine, model)
    loss(mine, data(0)).backward()
    stepped = [memory for memory in operations.chunks.chunks if memory.is_stepped]
    assert len(stepped) > 0.6 * len(operations.chunks.chunks)
    optim.step()
    assert not any(memory.is_stepped for memory in operations.chunks.chunks)


def test_gradients_that_are_on_their_way_are_waited_for() -> None:
    expected = train(*prepared("llama", False, HALF)[:4])
    link = Paced(2e7)
    try:
        assert train(*prepared("llama", True, HALF, transfer=link)[:4]) == expected
    finally:
        link.close()


Between = Callable[[nn.Module, Any, Callable[[], Any]], object]
LOOKS: list[Between] = [
    lambda model, optim, again: again().backward(),
    lambda model, optim, again: again(),
    lambda model, optim, again: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model, optim, again: list(optim.gradients()),
    lambda model, optim, again: [setattr(each, "grad", None) for each in model.parameters()],
    lambda model, optim, again: optim.zero_grad(),
    lambda model, optim, again: [each.detach().norm() for each in model.parameters()],
    lambda model, optim, again: [setattr(each, "data", torch.zeros(each.shape)) for each in model.parameters()],
    lambda model, optim, again: optim.state_dict(),
]


def test_a_loop_that_looks_between_backward_and_step_is_refused() -> None:
    model, optim, data, loss, _ = prepared("llama", True)
    train(model, optim, data, loss)
    for look in LOOKS:
        loss(model, data(0)).backward()
        with pytest.raises(ArgumentError, match=r"stepped in backward.*leave out step_in_backward"):
            look(model, optim, lambda: loss(model, data(1)))
        optim.step()  # all else is as it was
        optim.param_groups[0]["lr"] *= 0.9  # a scheduler's change between steps
    loss(model, data(0)).backward()
    optim.param_groups[0]["lr"] *= 0.5
    with pytest.raises(ArgumentError, match=r"Call the scheduler after optim\.step"):
        optim.step()


def test_what_is_looked_at_before_training_is_not_stepped() -> None:
    model, optim, data, loss, operations = prepared("llama", True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(2):
        loss(model, data(number)).backward()
    assert not any(memory.is_stepped for memory in operations.chunks.chunks)
    optim.zero_grad()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_optimizer_of_whole_parameters_is_refused() -> None:
    model, _, _, _, operations = prepared("llama", False)
    with pytest.raises(ArgumentError, match="Adafactor was given parameters that are stepped in backward"):
        ChunkOptimizer(torch.optim.Adafactor, model.parameters(), operations.chunks, early=operations.gradients)
