"""Scaler, checkpoints and delayed parameters of smp in a whole step, against plain training of the same."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch.smp as smp
from atorch.smp.activation_checkpointing import place_of
from tests.pool import on_ranks
from tests.smp.job import begun

ROWS, WIDTH = 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.backwards += torch._C._current_graph_task_id() != -1  # it runs again, in a backward pass
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """A Sequential that lies on two partitions."""

    def __init__(self, place: Callable[[int], AbstractContextManager[Any]] = smp.partition) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        layers = []
        for number in range(4):
            with place(number // 2):
                layers.append(Layer())
        self.layers = nn.Sequential(*layers)
        with place(1):
            self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


@pytest.mark.parametrize(("strategy", "delays", "auto"), [("contiguous", True, False), ("each", False, True)])
@on_ranks(2)
def test_delayed_checkpointed_and_scaled(rank: int, size: int, strategy: str, delays: bool, auto: bool) -> None:
    """A step of a model that is filled anew, and how often layers ran again."""
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(4))
    plain = Net(lambda number: nullcontext())
    torch.manual_seed(9)
    plain.apply(reset)
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    config = {"microbatches": 2, "partitions": 2, "auto_partition": auto, "delayed_parameter_initialization": delays}
    with begun(config):
        with smp.model_creation():
            net = Net()
        assert net.head.weight.is_meta == delays
        torch.manual_seed(9)
        if not delays:
            net.apply(reset)
        torch.manual_seed(9)
        model = smp.DistributedModel(net)
        smp.set_activation_checkpointing(net.layers, strategy=strategy)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        scaler = smp.amp.GradScaler(init_scale=16.0)

        @smp.step
        def train(model: Any, x: Tensor) -> None:
            model.backward(scaler.scale(model(x).square().mean()))

        train(model, x)
        scaler.step(optimizer)
        scaler.update()
        places = [place_of(layer).partition for layer in net.layers]
        assert sorted(set(places)) == [0, 1]
        assert auto or places == [0, 0, 1, 1]
        # In each micro-batch, where they are.
        assert [layer.backwards for layer in net.layers] == [2 if place == rank else 0 for place in places]
        state = model.state_dict()
    assert all(torch.allclose(state[name], each, atol=1e-6) for name, each in plain.state_dict().items())
