"""offload: what it leaves on the device, worked by hand."""

import pytest

from atorch.auto.opt_lib.offload import Offload
from atorch.cost import peak_memory
from tests.auto.opt_lib.splitting import PROFILE, cluster, cost_of


def held(**shares):
    memory = peak_memory(cost_of({"data": 2}, "ddp", ("offload", shares)))
    return memory.parameters, memory.gradients, memory.optimizer, memory.activations, memory.on_host


ACTIVATIONS = 8 / 2 * (800 + 8 * 5000)


def test_shares_wait_on_the_host():
    copies = 2 * 54_400  # of parameters, and gradients while they are stepped
    assert held() == (54_400, 54_400, 0, ACTIVATIONS, 108_800 + copies)
    assert held(parameters=0.5) == (27_200, 27_200, 0, ACTIVATIONS, 108_800 + 54_400 + copies / 2)
    block = 8 / 2 * 5000
    assert held(optimizer=0.0, activations=0.5) == (54_400, 54_400, 108_800, ACTIVATIONS - 4 * block, 4 * block)
    assert held(optimizer=0.0, activations=0.49) == (54_400, 54_400, 108_800, ACTIVATIONS - 3 * block, 3 * block)
    assert held(optimizer=0.0, activations=1.0)[-1] == 7 * block  # the last keeps its own

    # With gradients of their own place, the last block's backward has as much of all else as that of the first.
    cost = cost_of({}, ("offload", {"optimizer": 0.0, "activations": 1.0})).but(grads_persist=True, step_itemsize=0.0)
    block = 16 / 2 * 5000
    assert peak_memory(cost).activations == 16 / 2 * 800 + 2 * block

    cost = cost_of({"pipeline": 4}, "pipeline_parallel", ("offload", {"activations": 1.0}))
    assert (cost.activation_offload, cost.activations_ahead) == (0.5, 0.5)  # one of two goes, and comes back
    alone = cost_of({"pipeline": 8}, "pipeline_parallel", ("offload", {"activations": 1.0}))
    assert alone.activation_offload == 0, "a lone block's are back at once, but for those of other micro-batches"

    shares = [(each.parameters, each.optimizer, each.activations) for each in Offload.choices(PROFILE, cluster())]
    assert shares == [(0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 1, 1)]
    assert not list(Offload.choices(PROFILE, cluster(kind="cpu")))


def test_shards_wait_as_shards():
    memory = peak_memory(cost_of({"data": 2}, "zero1", ("offload", {"optimizer": 1.0})))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (54_400, 54_400, 0)
    assert memory.on_host == 2 * 54_400 / 2 + 2 * 54_400 / 2

    memory = peak_memory(cost_of({"data": 2}, "fsdp", ("offload", {"parameters": 1.0})))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (0, 0, 0)
    assert memory.transient > 0
    assert memory == peak_memory(cost_of({"data": 2}, ("fsdp", {"cpu_offload": True})))

    assert Offload(parameters=0.5).needs == ("fsdp",)
    assert Offload().needs == ()


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ({"optimizer": 0.0, "activations": 1.0}, "activations offloaded"),
        ({}, "optimizer offloaded"),
        ({"parameters": 1.0, "activations": 0.25}, "parameters, optimizer, 25% of activations offloaded"),
    ],
)
def test_it_says_what_waits(shares, told):
    assert str(Offload(**shares)) == told
