"""What a pipeline sees of a model at work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from atorch.errors import StrategyError
from atorch.model.structure import units
from atorch.runtime.pipeline.capture.stage_dataflow import route_of
from atorch.runtime.precision.amp import autocast_forward
from tests.pool import on_ranks
from tests.roads import ROADS, WIDTH, loss_func, net


@pytest.mark.parametrize("road", ROADS)
def test_casts_of_weights_that_several_units_use_do_not_pass_between_them(road: str) -> None:
    """The head multiplies by the embedding's weight: autocast keeps the embedding's cast of it for the head."""
    plain, cast, batch = net(road), net(road), torch.ones(4, WIDTH)
    autocast_forward(cast, "cpu", torch.bfloat16)
    expected, found = (
        route_of(model, units(model), batch, lambda model, batch: model(batch), loss_func) for model in (plain, cast)
    )
    assert [(call.unit, call.needs) for call in found.calls] == [(call.unit, call.needs) for call in expected.calls]
    assert found.output_needs == expected.output_needs
    assert torch.is_autocast_cache_enabled()


class Told(StrategyError):
    """What was seen, told from inside of a copy."""


def tell(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    raise Told(str(tuple(model(batch).shape)))


@on_ranks()
def test_of_a_split_parameter_on_the_meta_device_a_process_sees_its_rows(rank: int, size: int) -> None:
    model = nn.Linear(4, 3 * size, bias=False, device="meta")
    part = torch.empty(3, 4, device="meta")
    model.weight = nn.Parameter(DTensor.from_local(part, init_device_mesh("cpu", (size,)), [Shard(0)]))
    with pytest.raises(Told) as told:
        route_of(model, {}, torch.ones(2, 4), tell)
    assert str(told.value) == "(2, 3)"


class Skipping(nn.Module):
    """Keeps what it computes in a list, or adds what it takes from there."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(4, 4), keeps

    def forward(self, x: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        x = self.linear(x)
        if not self.keeps:
            return x + skips.pop()
        skips.append(x)
        return x


class Skips(nn.Module):
    """A stack whose second half takes what the first one keeps, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Skipping(keeps) for keeps in (True, True, False, False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, skips)
        return x


def test_a_list_that_modules_hand_on_is_told() -> None:
    model = Skips()
    with pytest.raises(StrategyError, match="adds to a list that it is given, or takes from it"):
        route_of(model, dict(model.blocks.named_children()), torch.ones(2, 4), lambda model, batch: model(batch), None)
