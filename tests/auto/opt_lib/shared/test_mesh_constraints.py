"""A mesh and the methods beside it agree, or the reason is told."""

import pytest

from atorch.auto.opt_lib.shared.mesh_constraints import disagreement
from atorch.auto.strategy import Strategy
from tests.auto.opt_lib import splitting  # noqa: F401  registers the methods


@pytest.mark.parametrize(
    ("axes", "methods", "reason"),
    [
        ({}, [], None),
        ({}, ["checkpoint"], None),
        ({"data": 2}, ["ddp"], None),
        ({"data": 2}, ["chunk"], None),
        ({}, ["chunk"], None),
        ({"data": 2}, [], "no method of the slot data_parallel"),
        ({}, ["fsdp"], "fsdp has no two processes"),
        ({"tensor": 2}, ["tensor_parallel", "ddp"], "ddp has no two processes"),
        ({"tensor": 2}, ["tensor_parallel"], None),
        ({"tensor": 2}, [], "no method splits over tensor"),
        ({"data": 2}, ["tensor_parallel", "ddp"], "tensor_parallel has no axis tensor"),
        ({"tensor": 2, "pipeline": 1}, ["tensor_parallel", "pipeline_parallel"], "pipeline_parallel has no axis"),
        ({"sequence": 2}, ["sequence_parallel", "ddp"], None),
        ({"sequence": 2}, ["sequence_parallel"], "no method of the slot data_parallel"),
        ({"context": 2, "data": 2}, ["sequence_parallel", "ddp"], "no method splits over context"),
        ({"tensor": 2}, ["tensor_parallel", ("sequence_parallel", {"mode": "megatron"})], None),
        ({"tensor": 2}, [("sequence_parallel", {"mode": "megatron"})], "no method splits over tensor"),
        ({}, [("sequence_parallel", {"mode": "megatron"})], "sequence_parallel completes tensor_parallel"),
        ({"zero": 2, "data": 2}, ["fsdp"], None),
        ({"zero": 2, "data": 2}, ["zero2"], None),
        ({"zero": 2, "data": 2}, ["ddp"], "no method splits over zero"),
        ({"zero": 2, "data": 2}, ["zero1"], "no method splits over zero"),
        ({"data": 4}, ["fsdp", "offload"], None),
    ],
)
def test_agreement(axes, methods, reason):
    found = disagreement(Strategy.of(methods), axes)
    assert (found is None) if reason is None else (found is not None and reason in found)
