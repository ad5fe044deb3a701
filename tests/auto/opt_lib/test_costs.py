"""What each method does to a step's cost, against numbers worked by hand."""

from dataclasses import replace

import pytest
from torch import nn

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch import auto_accelerate
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.strategy import METHODS, Strategy
from atorch.cluster.spec import ClusterSpec, DeviceSpec, LinkSpec
from atorch.cost import Comm, Cost, Matmul, Region, Segment, peak_memory, step_time
from atorch.cost.parallelism import REPLICA_AXES
from atorch.errors import StrategyError
from tests.auto.opt_lib.splitting import PROFILE, cluster, cost_of

ENDS = Segment(
    name="", num_params=200, num_trainable=200, outside=Region(saved_bytes=100, traffic_bytes=400), num_ops=10,
    matmuls=(Matmul(rows=10, inner=10, columns=2),), working_bytes=60,
)  # fmt: skip
BLOCK = Segment(
    name="blocks.0", count=8, is_block=True, num_params=100, num_trainable=100, num_ops=2, input_bytes=10,
    outside=Region(saved_bytes=100, traffic_bytes=100), matmuls=(Matmul(rows=10, inner=5, columns=1),),
    attention_flops=25.0,
)  # fmt: skip
# Gradients that keep their place: the peak is at the loss, when all activations are there.
PLAIN = Cost(segments=(ENDS, BLOCK), traced_batch=16.0, batch_size=16.0)
CPU = ClusterSpec(
    device=DeviceSpec(type="cpu", name="toy", memory_bytes=1e6, peak_flops={"float32": 1e6}),
    intra_node=LinkSpec(bandwidth=1e4, latency_s=1e-2),
    inter_node=LinkSpec(bandwidth=1e3, latency_s=1e-1),
)
MESH = ("parallel_mode", ([("data", 4)], None))


def cost(*methods):
    """The plain cost under methods, with a mesh of four where one of them shards or replicates."""
    return Strategy.of(list(methods)).cost(PLAIN)


def activations(cost):
    """All that forward keeps: without gradients, which appear while activations go, that is the peak."""
    return peak_memory(replace(cost, grad_itemsize=0.0)).activations


def test_ddp_has_one_message():
    (comm,) = cost(MESH, "ddp").comm
    assert (comm.kind, comm.num_bytes) == ("all_reduce", 4000)
    assert comm.count == pytest.approx(1, abs=1e-3)
    assert comm.overlap == pytest.approx(0, abs=1e-3)  # a single bucket is the last one


def test_sharding():
    of_matrices = Strategy.of([MESH, "zero1"]).cost(replace(PLAIN, optim_is_elementwise=False))
    assert of_matrices.optim_bytes >= 2000
    assert [(comm.kind, comm.num_bytes) for comm in of_matrices.comm] == [("all_reduce", 4000), ("broadcast", 4000)]

    found = cost(MESH, "fsdp")
    assert (found.param_bytes, found.grad_bytes, found.optim_bytes) == (1000, 1000, 2000)
    assert peak_memory(found).transient == (4000 - 8 * 400) + 2 * 400 + 2 * 400
    gathering, reducing = found.comm
    assert gathering.num_bytes == 4000 + 3200  # the blocks are gathered again in backward
    assert gathering.count == 10 + 8
    assert (reducing.kind, reducing.num_bytes, reducing.count) == ("reduce_scatter", 4000, 10)
    assert (gathering.copied, reducing.copied) == (2 * 7200, 2 * 4000)  # out of a buffer, and into one
    bandwidth = CPU.device.memory_bandwidth * CPU.device.efficiency.traffic
    copied = step_time(found, CPU).exposed_comm_s - step_time(_without_copies(found), CPU).exposed_comm_s
    assert copied == pytest.approx((2 * 7200 + 2 * 4000) / bandwidth)

    one = replace(PLAIN, segments=(ENDS, replace(BLOCK, count=1, num_params=800, num_trainable=800)))
    found = Strategy.of([MESH, "fsdp"]).cost(one)
    assert peak_memory(found).transient == 4 * (200 + 800 + 800)

    found = cost(MESH, "zero2")
    assert peak_memory(found).transient == 4000 + 2 * 400
    gathering = Comm("all_gather", REPLICA_AXES, 4000, count=10, overlap=0.8, per_micro_batch=True, copied=8000)
    assert found.comm[0] == gathering

    found = cost(("parallel_mode", ([("zero", 4), ("data", 2)], None)), "fsdp")
    assert found.param_bytes == 1000
    assert [comm.axis[0] for comm in found.comm] == ["zero", "zero", "data"]
    assert found.comm[2].num_bytes == 1000


def _without_copies(cost):
    return replace(cost, comm=tuple(replace(comm, copied=0.0) for comm in cost.comm))


def test_16_bits():
    found = cost(("amp_native", "bf16"))
    assert found.dtype == "bfloat16"
    assert (found.param_bytes, found.grad_bytes, found.master_itemsize) == (4000, 4000, 0)
    assert peak_memory(found).transient == 2000  # the weights' copies in 16 bits
    assert activations(found) == pytest.approx(600)

    found = cost(("half", "bf16"))
    assert (found.param_bytes, found.grad_bytes, found.optim_bytes) == (2000, 2000, 8000)
    assert peak_memory(found).masters == 4000
    assert activations(found) == 450

    found = cost(MESH, ("half", "bf16"), "fsdp")
    assert found.param_bytes == 2000 / 4
    assert found.comm[0].num_bytes == 2000 + 1600
    assert peak_memory(found).masters == 4000 / 4


def test_checkpoint_keeps_inputs_and_runs_forward_again():
    found = cost("checkpoint")
    assert activations(found) == 900 - 800 + 80
    assert (
        peak_memory(replace(found, grads_persist=True)).working == 100 - 10
    )  # a block run again, but for what was kept of it
    block, plain = (step_time(each, CPU).matmul_s for each in (found, PLAIN))
    assert block / plain == pytest.approx((3 * 400 + 4 * 800 + 4.5 * 200) / (3 * 1200 + 3.5 * 200), rel=1e-4)

    found = cost(("checkpoint", {"max_checkpoint_module_num": 2}))
    assert activations(found) == 900 - (800 - 80) / 4
    assert activations(cost(("checkpoint", {"offload_to_cpu": True}))) == 100
    assert cost(("checkpoint", {"max_checkpoint_module_num": 99})) == cost("checkpoint")  # there are eight

    found, whole = (step_time(cost(("checkpoint", {"selective": each})), CPU) for each in (True, False))
    plain = step_time(PLAIN, CPU)
    assert found.matmul_s == plain.matmul_s
    assert (found.traffic_s, found.launch_s) == (whole.traffic_s, whole.launch_s)
    assert found.traffic_s > plain.traffic_s


def test_micro_batches_divide_activations_and_gather_again():
    found = cost(MESH, "fsdp", ("micro_batch", {"count": 2}))
    whole = cost(MESH, "fsdp")
    assert activations(found) == activations(whole) / 2
    assert step_time(found, CPU).launch_s == 2 * step_time(whole, CPU).launch_s
    gathering, reducing = found.comm
    assert (gathering, gathering.per_micro_batch) == (whole.comm[0], True)
    assert reducing == replace(whole.comm[1], per_micro_batch=False)
    assert (found.grad_bytes, whole.grad_bytes) == (4000, 1000), "whole until the last micro-batch"
    assert cost(MESH, "ddp", ("micro_batch", {"size": 2})).num_micro_batches == 2  # of four samples a device

    found = cost(MESH, "fsdp", ("micro_batch", {"count": 2, "reduce": "each"}))
    assert found.comm[:2] == cost(MESH, "fsdp").comm
    assert found.grad_bytes == 1000
    assert cost(MESH, "fsdp", ("micro_batch", {"count": 2})).grad_bytes == 4000


@pytest.mark.parametrize(
    ("knobs", "count", "rows"), [({"size": 3}, 2, 3), ({"count": 3}, 2, 2), ({"size": 64}, 1, 4), ({"count": 64}, 4, 1)]
)
def test_micro_batches_have_at_least_a_row_and_at_most_the_batch(knobs, count, rows):
    found = cost(MESH, "ddp", ("micro_batch", knobs))  # four samples a device
    assert found.num_micro_batches == count
    assert activations(found) == 225 * rows / 4


@pytest.mark.parametrize(
    ("results", "scores", "saved"),
    [(0.0, None, 60.0), (20.0, None, 20.0), (50.0, None, 0.0), (0.0, 5, 50.0), (10.0, 5, 30.0), (0.0, 0, 10.0)],
)
def test_compile_leaves_traffic_with_products_and_of_the_stream(results, scores, saved):
    """Of 1,200 bytes 8 blocks move 100 each: 40 of the stream, and results of products, read and written.

    25 FLOPs of attention over heads of 5 features are 1.25 scores of 4 bytes; of none that is known, 25.
    """
    block = replace(
        BLOCK, outside=replace(BLOCK.outside, selective_bytes=results), writes_scores=scores is not None,
        head_dim=scores or 0,
    )  # fmt: skip
    found = METHODS["compile"].of().cost(replace(PLAIN, segments=(ENDS, block)))
    assert found.traffic_scale == pytest.approx(1 - 8 * saved / 1200)
    assert found.ops_scale == pytest.approx(1 - 1000 / 1400 * 2 / 3)


def test_micro_batch_needs_a_loss_and_samples_apart() -> None:
    with pytest.raises(StrategyError, match="loss_func"):
        auto_accelerate(nn.Linear(2, 2), load_strategy=["micro_batch"])

    tried = [(each.size, each.reduce) for each in MicroBatch.choices(PROFILE, cluster())]
    assert tried == [(2**power, reduce) for power in range(9) for reduce in ("once", "each")]
    together = replace(PROFILE, module_classes=frozenset({"BatchNorm1d"}))
    assert not list(MicroBatch.choices(together, cluster()))


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
    cost = cost_of({}, ("offload", {"optimizer": 0.0, "activations": 1.0})).replace(
        grads_persist=True, step_itemsize=0.0
    )
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
