"""Chunks that are stepped in backward train the same bits, and say so where a loop looks in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from benchmarks.paced_link import Paced
from tests.runtime.chunk.test_training import FAMILIES, assert_same_bits, in_chunks, train

HALF = torch.bfloat16


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
    loss(model, data(0)).backward()
    optim.param_groups[0]["lr"] *= 0.5
    with pytest.raises(ArgumentError, match=r"call the scheduler after optim\.step"):
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
