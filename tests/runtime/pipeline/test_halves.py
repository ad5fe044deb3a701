"""Which graphs torch takes apart into gradients of inputs and gradients of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from atorch.runtime.pipeline.schedules import comes_apart

WIDTH = 4
Way = Callable[["Stage", Tensor], list[Tensor]]


class Stage(nn.Module):
    """A way through weights that can be used in several places."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.way = way

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.way(self, x)


def once(stage: Stage, x: Tensor) -> list[Tensor]:
    return [x + stage.second(stage.first(x).tanh())]


def side_by_side(stage: Stage, x: Tensor) -> list[Tensor]:
    return [stage.first(x @ stage.experts[0] + x.tanh() @ stage.experts[1])]


def one_after_the_other(stage: Stage, x: Tensor) -> list[Tensor]:
    return [stage.first(stage.second(stage.first(x).tanh()))]


def positions(stage: Stage, x: Tensor) -> list[Tensor]:
    """A bias that is made of a weight alone and added in two places, as T5's."""
    bias = stage.experts[0].sin()
    return [stage.second((stage.first(x) + bias).tanh()) + bias]


def beside_the_input(stage: Stage, x: Tensor) -> list[Tensor]:
    """The second's weights meet nothing of the input."""
    return [stage.first(x), stage.second(torch.ones(WIDTH, WIDTH))]


def gradients(stage: Stage, x: Tensor, halves: bool) -> dict[str, Tensor | None]:
    outputs = stage(x)
    ones = list(map(torch.ones_like, outputs))
    if halves:
        _, groups = stage_backward_input(outputs, ones, [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        torch.autograd.backward(outputs, ones)
    return {"x": x.grad} | {name: each.grad for name, each in stage.named_parameters()}


def made(way: Way) -> tuple[Stage, Tensor]:
    torch.manual_seed(0)
    return Stage(way), torch.randn(WIDTH, WIDTH, requires_grad=True)


def test_an_output_that_was_let_go_is_known_by_its_edge() -> None:
    for way in (once, one_after_the_other):
        stage, x = made(way)
        edges = [get_gradient_edge(output) for output in stage(x)]
        assert comes_apart(edges, [x], stage.parameters()) == (way is once)


@pytest.mark.parametrize("way", [once, side_by_side])
def test_halves_are_the_whole(way: Way) -> None:
    stage, x = made(way)
    assert comes_apart(stage(x), [x, torch.ones(1), "text"], stage.parameters())
    torch.testing.assert_close(gradients(stage, x, True), gradients(*made(way), False))


@pytest.mark.parametrize("way", [one_after_the_other, positions, beside_the_input])
def test_what_torch_would_lose_stays_whole(way: Way) -> None:
    stage, x = made(way)
    assert not comes_apart(stage(x), [x], stage.parameters())
    expected = gradients(*made(way), False)
    try:
        got = gradients(stage, x, True)
    except RuntimeError:  # backward through the graph a second time
        return
    assert any(
        grad is not None and (got[name] is None or not torch.allclose(got[name], grad))
        for name, grad in expected.items()
    )
