"""Gradients of chunks that processes share: none is lost where a pass is not the one that was foreseen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.auto.opt_lib.chunk.trace import foreseen
from atorch.errors import ArgumentError
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.chunk.chunked import chunk
from tests.pool import on_ranks


class Branching(nn.Module):
    """Takes its last layer only when it is told to, and may raise in backward."""

    takes_all = raises = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, batch: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers[: None if self.takes_all else -1]):
            batch = torch.tanh(layer(batch))
            if self.raises and number == 0:  # the layers after it have their gradients by then
                batch.register_hook(_raise)
        return batch


def _raise(gradient: Tensor) -> None:
    raise ValueError("stumbled in backward")


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def batch_of(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def made() -> Branching:
    torch.manual_seed(0)
    return Branching()


@pytest.mark.parametrize("stumbles", [False, True])
@on_ranks()
def test_after_what_nobody_foresaw_all_gradients_are_reduced(rank: int, size: int, stumbles: bool) -> None:
    model, plain = made(), made()
    first = foreseen(model, batch_of(rank), loss_of, device_type="cpu")
    operations = chunk(model, first, 10**6, device=torch.device("cpu"), group=dist.group.WORLD)
    if stumbles:
        model.raises = True
        try:
            loss_of(model, batch_of(rank)).backward()
        except ValueError:
            model.raises = False
    model.takes_all = plain.takes_all = not stumbles  # what takes nothing waits for the end of backward
    loss_of(model, batch_of(rank)).backward()
    for each in range(size):
        (loss_of(plain, batch_of(each)) / size).backward()
    found = []
    for name, parameter in plain.named_parameters():
        place = operations.chunks.place(model.get_parameter(name))
        assert place is not None
        memory, slot = place
        part, wanted = memory.gradient_of(slot), parameter.grad
        if wanted is None:
            assert slot.name not in memory.has_gradient
            continue
        held = memory.within(slot)
        distance = 0.0 if part is None else (part.flatten() - wanted.flatten()[held]).abs().max().item()
        found.append((distance, slot.name in memory.has_gradient))
    assert all(distance < 1e-6 and has for distance, has in found)


@on_ranks()
def test_a_gradient_that_no_process_has_reduced_is_refused(rank: int, size: int) -> None:
    model, plain = made(), made()
    first = foreseen(model, batch_of(rank), loss_of, device_type="cpu")
    operations = chunk(model, first, 10**6, device=torch.device("cpu"), group=dist.group.WORLD)
    optim = ChunkOptimizer(torch.optim.SGD, model.parameters(), operations.chunks)
    weight = model.layers[0].weight
    loss_of(model, batch_of(rank)).backward()
    for each in range(size):
        (loss_of(plain, batch_of(each)) / size).backward()
    mine, edited = weight.grad, 2 * plain.layers[0].weight.grad
    optim.zero_grad()
    if mine is not None:
        weight.grad = 2 * mine
        place = operations.chunks.place(weight)
        edited = edited if mine.shape == weight.shape else edited.flatten()[place[0].within(place[1])]
        edited = (weight.grad.as_subclass(Tensor) - edited).abs().max()  # which refuses numbers otherwise
    optim.step()
    loss_of(model, batch_of(rank)).backward()
    optim.zero_grad()  # a pass that is thrown away
    (gradient,) = torch.autograd.grad(loss_of(model, batch_of(rank)), [weight])
    with pytest.raises(ArgumentError) as error:
        weight.grad = gradient
    assert str(error.value).startswith("layers.0.weight.grad was assigned, and no backward pass has reduced")
    assert (float(edited.max()) if mine is not None else 0.0) <= 1e-6
