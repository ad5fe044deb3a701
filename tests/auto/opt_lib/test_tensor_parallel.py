"""tensor_parallel: what it divides, worked by hand, and what it cannot divide."""

from dataclasses import replace

import pytest

from atorch.auto.opt_lib.tensor_parallel import TensorParallel
from atorch.auto.strategy import Strategy
from atorch.cost import peak_memory
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of, on_mesh

AXES = {"tensor": 4}


def test_it_divides_what_is_inside_of_split_parts():
    cost = cost_of(AXES, "tensor_parallel")
    assert (cost.tensor, cost.splits_norms) == (4, False)
    assert cost.num_params == 4000 / 4 + 8 * (200 + 1000 / 4)
    share = 16 / 2  # of the traced batch
    assert peak_memory(cost).activations == share * (800 + 8 * (1000 + 4000 / 4))


def test_replicas_reduce_the_parts_alone():
    cost = cost_of({"tensor": 4, "data": 2}, "tensor_parallel", "ddp")
    assert [(comm.axis[0], comm.num_bytes) for comm in cost.comm] == [("data", 4 * 4600)]


@pytest.mark.parametrize(
    ("axes", "changes", "reason"),
    [
        ({"tensor": 8}, {}, None),
        ({"tensor": 2}, {}, None),
        ({"tensor": 3}, {}, "tensor 3 does not divide the 8 attention heads of blocks.0"),
        ({"tensor": 8}, {"num_kv_heads": 6}, "neither divides nor is a multiple of the 6 key heads"),
        ({"tensor": 4}, {"num_experts": 6}, "does not divide the 6 experts"),
        ({"tensor": 2}, {"matmuls": ()}, "no matrix product"),
    ],
)
def test_what_it_cannot_divide(axes, changes, reason):
    cost = on_mesh(axes, segments=(replace(BLOCK, **changes),))
    found = TensorParallel().unfit(cost)
    assert (found is None) if reason is None else (reason in found)


def test_it_is_tried_where_there_are_heads_and_devices():
    assert list(TensorParallel.choices(PROFILE, cluster())) == [TensorParallel()]
    assert not list(TensorParallel.choices(PROFILE, cluster(devices=1)))
    headless = replace(PROFILE, segments=(replace(BLOCK, num_heads=0),))
    assert not list(TensorParallel.choices(headless, cluster()))


def test_a_plan_says_column_or_row():
    with pytest.raises(StrategyError, match=r"tensor_parallel.plan.q_proj was given 'diagonal'"):
        Strategy.of([("tensor_parallel", {"plan": {"q_proj": "diagonal"}})])
