"""sequence_parallel in both its modes: what is divided, worked by hand, and what cannot be."""

from dataclasses import replace

import pytest

from atorch.auto.opt_lib.sequence_parallel import SequenceParallel
from atorch.cost import peak_memory
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster, cost_of, on_mesh

MEGATRON = SequenceParallel(mode="megatron")


def test_ulysses_divides_activations_and_no_parameters():
    cost = cost_of({"sequence": 4}, "sequence_parallel", "ddp")
    assert (cost.sequence, cost.tensor) == (4, 1)
    assert cost.num_params == 13_600
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000) / 4
    assert cost.comm[0].num_bytes == 54_400, "gradients are of a part of the tokens"


def test_fsdp_shards_over_the_processes_of_a_sequence():
    assert cost_of({"sequence": 4, "data": 2}, "sequence_parallel", "fsdp").param_shards == 8


def test_megatron_divides_what_tensor_parallel_leaves_whole():
    cost = cost_of({"tensor": 4}, "tensor_parallel", MEGATRON)
    assert (cost.tensor, cost.splits_norms, cost.sequence) == (4, True, 1)
    assert peak_memory(cost).activations == 16 / 2 * (800 + 8 * 5000) / 4
    assert cost.num_params == cost_of({"tensor": 4}, "tensor_parallel").num_params


def test_each_mode_has_its_axis_or_its_companion():
    assert (SequenceParallel().splits, SequenceParallel().needs) == (("sequence",), ())
    assert (MEGATRON.splits, MEGATRON.needs) == ((), ("tensor_parallel",))


@pytest.mark.parametrize(
    ("method", "axes", "changes", "reason"),
    [
        (SequenceParallel(), {"sequence": 8}, {}, None),
        (SequenceParallel(), {"tensor": 2, "sequence": 4}, {}, None),
        (SequenceParallel(), {"tensor": 4, "sequence": 4}, {}, "tensor × sequence 16 does not divide the 8 attention"),
        (SequenceParallel(), {"sequence": 4}, {"sequence_length": 1026}, "into 4 pieces"),
        (MEGATRON, {"tensor": 4}, {}, None),
        (MEGATRON, {"tensor": 4}, {"sequence_length": 1026}, "does not divide their 1026 tokens"),
    ],
)
def test_what_it_cannot_divide(method, axes, changes, reason):
    found = method.unfit(on_mesh(axes, segments=(replace(BLOCK, **changes),)))
    assert (found is None) if reason is None else (reason in found)


def test_both_modes_are_tried():
    assert list(SequenceParallel.choices(PROFILE, cluster())) == [SequenceParallel(), MEGATRON]
    assert not list(SequenceParallel.choices(PROFILE, cluster(devices=1)))
