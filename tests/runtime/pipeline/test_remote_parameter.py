"""What stands for another stage's tensors is described as they are, and names them where values are asked for."""

import copy

import pytest
import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.runtime.pipeline.stand_ins import Away, need_values

CPU = torch.device("cpu")


def away() -> Away:
    return Away.of("blocks.0.fc.weight", nn.Parameter(torch.ones(4, 3)), CPU)


def test_it_is_described_as_where_the_stage_computes() -> None:
    for each in (away(), copy.deepcopy(away())):
        assert (each.shape, each.dtype, each.device) == ((4, 3), torch.float32, CPU)
    assert torch.ones(2).to(away().device).sum() == 2
    assert away().new_zeros(2).sum() == 0
    assert torch.ones(3).expand_as(away()).sum() == 12


def test_what_a_stage_does_not_need_may_be_computed_of_it_and_who_asks_for_values_is_told_whose() -> None:
    assert (away().norm() * 2).square().shape == ()
    for ask in (lambda: torch.ones(2, 3) @ away().t(), lambda: float(1.0 + 0.1 * away().norm())):
        with pytest.raises(ArgumentError, match="blocks.0.fc.weight is of another stage of the pipeline"):
            ask()


def test_code_between_units_may_compute_of_it_and_others() -> None:
    passing = [True]
    weight = Away.of("pos", torch.ones(4, 3), CPU, lambda: passing[0])
    made = torch.ones(2, 3) @ weight.t() + 1
    assert (made.shape, made.device) == ((2, 4), CPU)
    with pytest.raises(ArgumentError, match="pos is of another stage"):
        float(made.sum())
    with pytest.raises(ArgumentError, match="pos is of another stage"):
        need_values({"logits": [made]})
    passing[0] = False
    with pytest.raises(ArgumentError, match="pos is of another stage"):
        torch.ones(2, 3) + weight
