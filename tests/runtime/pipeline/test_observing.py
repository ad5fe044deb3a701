"""What a pipeline sees of a model at work."""

from __future__ import annotations

import pytest
import torch

from atorch.blocks import units
from atorch.runtime.amp import autocast_forward
from atorch.runtime.pipeline.observing import route_of
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
