"""What each method does to a step's cost, against numbers worked by hand."""

from dataclasses import replace

import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.strategy import METHODS, Strategy
from atorch.cost import Comm, Cost, peak_memory

PARAMS = 1000.0
PLAIN = Cost(
    axes={},
    num_params=PARAMS, num_trainable=PARAMS, param_bytes=4 * PARAMS, grad_bytes=4 * PARAMS, optim_bytes=8 * PARAMS,
    activation_bytes=900.0, block_activation_bytes=800.0, boundary_bytes=80.0, working_bytes=60.0,
    block_bytes=400.0, num_blocks=8.0, block_flop_fraction=0.6,
    matmul_flops=3000.0, attention_flops=700.0, traffic_bytes=1200.0, num_ops=90.0, optim_traffic_bytes=2000.0,
    batch_size=16.0,
)  # fmt: skip
MESH = ("parallel_mode", ([("data", 4)], None))


def cost(*methods):
    """The plain cost under methods, with a mesh of four where one of them shards or replicates."""
    return Strategy.of(list(methods)).cost(PLAIN)


def test_parallel_mode_divides_what_belongs_to_samples():
    found = cost(MESH)
    assert found.axes == {"data": 4}
    assert (found.batch_size, found.activation_bytes, found.matmul_flops, found.traffic_bytes) == (4, 225, 750, 300)
    assert (found.param_bytes, found.num_ops, found.optim_traffic_bytes) == (4000, 90, 2000)


def test_ddp_reduces_gradients_once():
    (comm,) = cost(MESH, "ddp").comm
    assert (comm.kind, comm.num_bytes) == ("all_reduce", 4000)
    assert comm.count == pytest.approx(1, abs=1e-3)
    assert comm.overlap == pytest.approx(0, abs=1e-3)  # a single bucket is the last one


def test_zero1_shares_the_optimizer():
    found = cost(MESH, "zero1")
    assert found.optim_bytes == 2000
    assert found.optim_traffic_bytes == 500
    assert found.grad_bytes == 4000
    assert [(comm.kind, comm.num_bytes) for comm in found.comm] == [("all_reduce", 4000), ("broadcast", 4000)]


def test_fsdp_shares_everything_and_gathers_blocks():
    found = cost(MESH, "fsdp")
    assert (found.param_bytes, found.grad_bytes, found.optim_bytes) == (1000, 1000, 2000)
    assert found.transient_bytes == (4000 - 8 * 400) + 2 * 400 + 2 * 400
    gathering, reducing = found.comm
    assert gathering.num_bytes == 4000 + 3200  # the blocks are gathered again in backward
    assert gathering.count == 20
    assert (reducing.kind, reducing.num_bytes, reducing.count) == ("reduce_scatter", 4000, 10)


def test_fsdp_never_gathers_more_than_there_is():
    # The largest of unequal blocks, times their number, is more than the model.
    found = Strategy.of([MESH, "fsdp"]).cost(replace(PLAIN, block_bytes=1000.0))
    assert found.transient_bytes == 0 + 2 * 1000 + 2 * 1000
    assert found.comm[0].num_bytes == 2 * 4000


def test_zero2_gathers_once_and_keeps():
    found = cost(MESH, "zero2")
    assert found.transient_bytes == 4000 + 2 * 400
    assert found.comm[0] == Comm("all_gather", ("data", "zero"), 4000, count=10, overlap=0.8)


def test_fsdp_gathers_in_the_precision_of_the_matmuls():
    found = cost(MESH, ("half", "bf16"), "fsdp")
    assert found.param_bytes == 2000 / 4
    assert found.comm[0].num_bytes == 2000 + 1600
    assert found.master_bytes == 4000 / 4


def test_hybrid_sharding_reduces_shards_over_the_replicas():
    found = cost(("parallel_mode", ([("zero", 4), ("data", 2)], None)), "fsdp")
    assert found.param_bytes == 1000
    assert [comm.axis for comm in found.comm] == [("zero",), ("zero",), ("data",)]
    assert found.comm[2].num_bytes == 1000


def test_amp_keeps_weights_and_halves_what_matmuls_save():
    found = cost(("amp_native", "bf16"))
    assert found.dtype == "bfloat16"
    assert (found.param_bytes, found.grad_bytes, found.master_bytes) == (4000, 4000, 0)
    assert found.transient_bytes == 2000  # the weights' copies in 16 bits
    assert peak_memory(found).activations == pytest.approx(600)


def test_half_keeps_masters():
    found = cost(("half", "bf16"))
    assert (found.param_bytes, found.grad_bytes, found.master_bytes, found.optim_bytes) == (2000, 2000, 4000, 8000)
    assert peak_memory(found).activations == 450


def test_checkpoint_keeps_inputs_and_runs_forward_again():
    found = cost("checkpoint")
    assert found.activation_bytes == 900 - 800 + 80
    assert found.working_bytes == 60 + 100
    assert found.matmul_flops == pytest.approx(3000 * 1.2)
    assert found.attention_flops == pytest.approx(900)  # a forward pass is two sevenths of 700


def test_checkpointing_some_blocks():
    found = cost(("checkpoint", {"max_checkpoint_module_num": 2}))
    assert found.activation_bytes == 900 - (800 - 80) / 4
    assert cost(("checkpoint", {"offload_to_cpu": True})).activation_bytes == 100
    assert cost(("checkpoint", {"max_checkpoint_module_num": 99})) == cost("checkpoint")  # there are eight


def test_micro_batches_divide_activations_and_gather_again():
    found = cost(MESH, "fsdp", ("micro_batch", {"count": 2}))
    whole = cost(MESH, "fsdp")
    assert found.activation_bytes == whole.activation_bytes / 2
    assert found.num_ops == 2 * whole.num_ops
    assert found.comm[0].num_bytes == 2 * whole.comm[0].num_bytes
    assert found.comm[1] == whole.comm[1]
    assert cost(MESH, "ddp", ("micro_batch", {"size": 2})).num_micro_batches == 2  # of four samples a device


@pytest.mark.parametrize(
    ("knobs", "count", "rows"), [({"size": 3}, 2, 3), ({"count": 3}, 2, 2), ({"size": 64}, 1, 4), ({"count": 64}, 4, 1)]
)
def test_micro_batches_have_at_least_a_row_and_at_most_the_batch(knobs, count, rows):
    found = cost(MESH, "ddp", ("micro_batch", knobs))  # four samples a device
    assert found.num_micro_batches == count
    assert found.activation_bytes == 225 * rows / 4


def test_compile_fuses_inside_the_blocks():
    found = cost("compile")
    assert found.traffic_bytes == pytest.approx(1200 * 0.7)
    assert found.num_ops == pytest.approx(90 * 0.6)
    assert cost("compile").matmul_flops == PLAIN.matmul_flops


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"parallel_mode"}))
def test_costs_are_of_one_device_and_stay_positive(name):
    found = METHODS[name].of().cost(replace(PLAIN, axes={"data": 2}))
    assert peak_memory(found).total > 0
    assert found.matmul_flops > 0
