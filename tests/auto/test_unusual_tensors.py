"""Parameters and buffers that lie in memory in unusual ways train as they do in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from atorch import auto_accelerate
from atorch.distributed.collectives import gather_objects
from tests.pool import Pool

WIDTH, BATCH = 8, 4
METHODS = ("ddp", "zero1", "zero2", "fsdp", "chunk")


class Net(nn.Module):
    """Two layers and what a case adds to them."""

    def __init__(self, change: Callable[[Net], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after: Callable[[Net, Tensor], Tensor] = lambda model, x: x
        change(self)

    def forward(self, x: Tensor, expected: Tensor) -> Tensor:
        return F.mse_loss(self.after(self, self.second(torch.relu(self.first(x)))), expected)


def expanded_buffer(model: Net) -> None:
    model.register_buffer("mask", torch.linspace(0, 1, WIDTH).expand(4, WIDTH))
    model.after = lambda model, x: x * model.mask[0]


def expanded_parameter(model: Net) -> None:
    model.factor = nn.Parameter(torch.ones(1, WIDTH).expand(4, WIDTH))
    model.after = lambda model, x: x * model.factor[0]


def empty_parameter(model: Net) -> None:
    model.none = nn.Parameter(torch.zeros(0, WIDTH))
    model.after = lambda model, x: x + model.none.sum()


def transposed_parameter(model: Net) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach().t())


def dict_of_parameters(model: Net) -> None:
    model.terms = nn.ParameterDict({"rows": torch.randn(64, WIDTH), "factor": torch.ones(WIDTH)})
    model.after = lambda model, x: x * model.terms["factor"] + model.terms["rows"].mean(0)


CASES: Mapping[str, Callable[[Net], None]] = {
    each.__name__: each
    for each in (expanded_buffer, expanded_parameter, empty_parameter, transposed_parameter, dict_of_parameters)
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randn(2, 4 * BATCH, WIDTH, generator=generator))


def losses(rank: int, size: int, model: Net, method: str) -> list[float]:
    """The whole batch's losses over one epoch."""
    _, result, _ = auto_accelerate(
        copy.deepcopy(model),
        torch.optim.SGD,
        data(),
        lambda batch, loss: loss,
        model_input_format="unpack_sequence",
        optim_args={"lr": 0.1},
        dataloader_args={"batch_size": BATCH},
        load_strategy=[method],
    )
    assert result is not None
    return [sum(gather_objects(float(result.step(batch)))) / size for batch in result.dataloader]


def all_losses(rank: int, size: int, case: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = Net(CASES[case])
    return [losses(rank, size, model, method) for method in METHODS]


def plainly(case: str) -> list[float]:
    torch.manual_seed(0)
    model = Net(CASES[case])
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # torch's own optimizers refuse expanded ones
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in torch.utils.data.DataLoader(data(), batch_size=BATCH):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_lies_in_memory_in_unusual_ways_trains_as_plainly(pool: Pool, case: str) -> None:
    for method, found in zip(METHODS, pool.run(all_losses, case)[0], strict=True):
        assert found == pytest.approx(plainly(case), rel=1e-5), method
