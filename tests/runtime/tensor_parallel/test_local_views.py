"""Parameters that read otherwise inside a forward, also in copies, and beside other overrides of the same module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atorch.model.wrapper import override
from atorch.runtime.tensor_parallel.split_forward import Inside, present

WIDTH = 4


def half(parameter: Tensor) -> Tensor:
    return parameter[: len(parameter) // 2]


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, x: 2 * forward(self, x)


@pytest.mark.parametrize(
    "order", ["present note", "note present", "note present double", "present note present double"]
)
def test_copies_read_as_the_original_does(order: str) -> None:
    layer, inside, names = nn.Linear(WIDTH, WIDTH), Inside(), ["weight", "bias"]
    x = torch.randn(3, WIDTH)
    expected = layer(x)[:, : WIDTH // 2] * (2 if "double" in order else 1)
    count = order.count("present")
    for step in order.split():
        if step == "note":
            inside.note(layer)
        elif step == "double":
            override(layer, "forward", doubled)
        else:
            present(layer, dict.fromkeys(names if count == 1 else [names.pop()], half), inside)
    for each in (layer, copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer))):
        torch.testing.assert_close(each(x), expected)
        assert len(each.weight) == WIDTH, "outside it is the parameter"
        assert type(each).__name__ == "Linear"
