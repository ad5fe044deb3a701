"""What user code does with parameters whose values are sharded: it works, or says of which parameter it cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.runtime.fsdp.groups import FsdpUnit
from atorch.runtime.fsdp.shard import shard
from tests.pool import on_ranks

WIDTH = 4


class Model(nn.Module):
    """A recurrent layer, and a head that `take_road` may give something of it."""

    def __init__(self, take_road: Callable[[nn.LSTM], Callable[[Tensor], Tensor]] | None = None) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.road = None if take_road is None else take_road(self.rnn)

    def forward(self, x: Tensor, hidden: Any = None) -> Tensor:
        y, _ = self.rnn(x, hidden)
        y = self.head(y)
        return y if self.road is None else y + self.road(y)


def by_closure(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    weight = rnn.weight_hh_l0
    return lambda y: F.linear(y, weight[:WIDTH])


def by_default(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    def road(y: Tensor, weight: Tensor = rnn.bias_hh_l0) -> Tensor:
        return y * weight[:WIDTH]

    return road


def by_partial(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=rnn.weight_ih_l0)


def by_module(rnn: nn.LSTM) -> Callable[[Tensor], Tensor]:
    return lambda y: F.linear(y, rnn.weight_hh_l0[:WIDTH])


REFUSED = [
    (by_closure, "rnn.weight_hh_l0 is sharded, and something computes with the tensor that it was before"),
    (by_default, "rnn.bias_hh_l0 is sharded, and something computes with the tensor that it was before"),
    (by_partial, "rnn.weight_ih_l0 is sharded, and something computes with the tensor that it was before"),
    (by_module, r"rnn.weight_hh_l0 is sharded where it is read.*atorch_ignored_cls=\('rnn.weight_hh_l0',\)"),
]


def sharded(size: int, road: Any = None) -> Model:
    model = Model(road)
    shard(model, init_device_mesh("cpu", (size,)), [FsdpUnit((model.rnn,)), FsdpUnit((model.head,))])
    return model


@on_ranks()
def test_a_parameter_that_cannot_be_read_is_named(rank: int, size: int) -> None:
    for road, message in REFUSED:
        model = sharded(size, road)
        with pytest.raises(ArgumentError, match=message):
            model(torch.ones(2, 3, WIDTH))


@on_ranks()
def test_hidden_states_are_made_of_a_parameter_and_what_waits_for_backward_stays_gathered(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = sharded(size)
    torch.manual_seed(0)
    plain, x = Model(), torch.ones(2, 3, WIDTH)

    def ways(model: Model) -> list[Tensor]:
        first = next(model.parameters())
        return [first.new_zeros(1, 2, WIDTH), first.data.new_zeros(1, 2, WIDTH), first.detach().new_ones(1, 2, WIDTH)]

    pairs = [
        (model(x, (mine, mine)), plain(x, (theirs, theirs)))
        for mine, theirs in zip(ways(model), ways(plain), strict=True)
    ]
    assert max(float((mine - theirs).abs().max()) for mine, theirs in pairs) < 1e-6
    results = []
    for keeps in (True, False):
        torch.manual_seed(0)
        model = Model(by_module)
        if keeps:
            groups = [FsdpUnit((model.rnn,)), FsdpUnit((model.head,))]
            shard(model, init_device_mesh("cpu", (size,)), groups, reshard_after_forward=False)
        for _ in range(2):
            loss = model(torch.ones(2, 3, WIDTH)).square().sum()
            with torch.no_grad():
                model(torch.ones(1, 3, WIDTH))
            loss.backward()
        gradient = model.rnn.weight_hh_l0.grad
        results.append(gradient.full_tensor() if keeps else gradient)
    assert float((results[0] - results[1]).abs().max()) < 1e-6


@on_ranks()
def test_data_of_a_sharded_parameter_is_written_and_not_assigned(rank: int, size: int) -> None:
    model = sharded(size)
    kept = model.head.weight.data
    model.head.weight.data = kept * 0.5
    with pytest.raises(ArgumentError, match=r"head.weight.data was assigned.*copy_"):
        model(torch.ones(2, 3, WIDTH))
    with pytest.raises(ArgumentError, match=r"head.weight.data was assigned"):
        model.state_dict()
    model.head.weight.data = kept
    model.head.weight.data.mul_(0.5)
    model(torch.ones(2, 3, WIDTH))
