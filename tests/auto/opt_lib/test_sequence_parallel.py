"""sequence_parallel: what is divided, worked by hand."""

from __future__ import annotations

from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.cost import peak_memory
from tests.auto.opt_lib.splitting import PROFILE, cluster, cost_of

MEGATRON = SequenceParallel(mode="megatron")


def test_what_is_divided():
    cost = cost_of({"sequence": 4}, "sequence_parallel", "ddp")
    assert (cost.sequence, cost.tensor) == (4, 1)
    assert cost.num_params == 13_600
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000 / 4)  # the embedding is whole
    assert cost.comm[0].num_bytes == 54_400, "gradients are of a part of the tokens"

    assert cost_of({"sequence": 4, "data": 2}, "sequence_parallel", "fsdp").param_shards == 8

    cost = cost_of({"tensor": 4}, "tensor_parallel", MEGATRON)
    assert (cost.tensor, cost.splits_norms, cost.sequence) == (4, True, 1)
    gathered = 2 * 600 * (1 - 1 / 4)  # what each block's products are given stays gathered for backward
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * (5000 / 4 + gathered))
    assert cost.num_params == cost_of({"tensor": 4}, "tensor_parallel").num_params

    assert (SequenceParallel().splits, SequenceParallel().needs) == (("sequence",), ())
    assert (MEGATRON.splits, MEGATRON.needs) == ((), ("tensor_parallel",))

    assert list(SequenceParallel.choices(PROFILE, cluster())) == [SequenceParallel(), MEGATRON]
    assert not list(SequenceParallel.choices(PROFILE, cluster(devices=1)))
