"""Peak memory by moment and stage, against numbers worked by hand."""

from dataclasses import replace

import pytest

from atorch.cost import Cost, Matmul, Region, Segment, peak_memory
from atorch.cost.memory import CATEGORIES, HIGH, LOW, SIGMA, SLACK, STUCK, memory_band, memory_shares, stage_memory
from atorch.cost.pipeline_stages import heaviest_stages, in_flight, stages_of
from atorch.units import GiB

EMBEDDING = Segment(name="embedding", num_params=1000, num_trainable=1000, split_params=1000)
BLOCK = Segment(
    name="blocks", count=8, is_block=True, num_params=100, num_trainable=100, split_params=80, input_bytes=50,
    matmuls=(Matmul(rows=1, inner=10, columns=8, split="columns"), Matmul(rows=1, inner=10, columns=8)),
    outside=Region(saved_bytes=100), inside=Region(saved_bytes=300), working_bytes=40, split_working=True,
)  # fmt: skip
HEAD = Segment(
    name="head", num_params=20, num_trainable=20, tied_params=1000, inside=Region(saved_bytes=4000), working_bytes=2000,
    matmuls=(Matmul(rows=1, inner=10, columns=100, split="columns"),), split_working=True,
)  # fmt: skip
COST = Cost(segments=(EMBEDDING, BLOCK, HEAD), traced_batch=1.0, batch_size=1.0, optim_itemsize=8.0)


def moment(cost):
    memory = peak_memory(cost)
    return memory.gradients, memory.activations, memory.transient, memory.working


def test_the_loss_is_the_peak_where_logits_are_large():
    assert moment(COST) == (0, 8 * 400 + 4000, 0, 2000)


def test_the_first_block_is_the_peak_where_parameters_are_many():
    many = replace(BLOCK, num_params=9000, num_trainable=9000)
    cost = replace(COST, segments=(EMBEDDING, many, HEAD), batch_size=20.0)
    assert moment(cost) == (4 * (20 + 8 * 9000), 20 * 400, 0, 20 * 40)  # its backward runs last
    whole = 4 * (1020 + 8 * 9000)
    assert moment(replace(cost, grads_persist=True)) == (whole, 20 * 7200, 0, 20 * 2000)
    assert moment(replace(cost, num_micro_batches=2.0)) == (whole, 10 * 7200, 0, 10 * 2000)


def test_an_optimizer_with_temporaries_is_the_peak_where_nothing_else_is_large():
    assert moment(replace(COST, step_itemsize=16.0)) == (4 * 1820, 0, 16 * 1820, 0)


def test_whole_gradients_are_shards_when_the_optimizer_steps():
    cost = replace(COST, step_itemsize=64.0, optim_shards=2.0)
    assert moment(cost) == (4 * 1820, 0, 64 * 910, 0)  # of ddp
    assert moment(replace(cost, whole_grads=True)) == (4 * 910, 0, 64 * 910, 0)  # of FSDP2


def test_fresh_gradients_stand_beside_those_they_are_added_to():
    cost = replace(COST, grads_persist=True, fresh_itemsize=50.0, bucket_itemsize=1.0)
    assert moment(cost) == (4 * 1820, 0, (50 + 1) * 1820, 0)


def test_a_placeholder_for_every_shape_of_weight():
    cost = replace(COST, grads_persist=True, placeholder_itemsize=2.0)
    assert peak_memory(cost).transient == 2 * 80  # both products of a block have one shape
    # Beside the head's backward, its own: then its activations are gone, and its gradient is what works.
    small = replace(cost, segments=(EMBEDDING, BLOCK, replace(HEAD, inside=Region(saved_bytes=500))))
    assert moment(small) == (4 * 1820, 8 * 400, 2 * (80 + 1000), 2000)


def test_a_tied_head_is_held_again_by_the_last_stage():
    cost = replace(COST, stages=2, num_micro_batches=2.0, batch_size=2.0)
    first, last = (stage_memory(cost, stage) for stage in stages_of(cost))
    assert (first.parameters, last.parameters) == (4 * (1000 + 400), 4 * (400 + 20 + 1000))
    assert peak_memory(cost).stage == 1


def test_experts_are_sharded_over_what_their_own_axis_leaves():
    mixture = replace(BLOCK, num_params=1000, num_trainable=1000, split_params=0, expert_params=800)
    cost = replace(COST, segments=(replace(mixture, count=1),), expert=4, optim_shards=8.0)
    assert peak_memory(cost).optimizer == 8 * (200 / 8 + 200 / 2)
    assert peak_memory(cost).parameters == 4 * (200 + 800 / 4)


def test_a_stage_with_fewer_in_flight_may_hold_gradients_when_the_first_does_not():
    cost = replace(COST, segments=(replace(BLOCK, num_params=9000, num_trainable=9000),), stages=2)
    cost = replace(cost, batch_size=2.0, num_micro_batches=2.0)
    assert moment(cost) == (4 * 36_000, 5 * 400, 0, 40)  # as the first micro-batch's first block goes backward


@pytest.mark.parametrize(
    ("schedule", "interleave", "held"),
    [("1f1b", 1, [4, 3, 2, 1]), ("gpipe", 1, [8, 8, 8, 8]), ("interleaved", 2, [5.5, 4.5, 3.5, 2.5])],
)
def test_micro_batches_in_flight(schedule, interleave, held):
    cost = replace(COST, stages=4, num_micro_batches=8.0, schedule=schedule, interleave=interleave)
    assert [in_flight(cost, index) for index in range(4)] == held


def test_stages_of_equal_flops_leave_room_for_the_head():
    def blocks(cost):
        return [stage.num_blocks for stage in stages_of(cost)]

    cost = replace(COST, stages=4)
    assert blocks(cost) == [2, 2, 2, 2]
    assert blocks(replace(cost, stages=3)) == [3, 3, 2]
    # Of 8 · 320 + 2,000 FLOPs a quarter is 1,140: after 4 and 8 blocks. But each stage has parameters to train.
    balanced = replace(cost, balances_flops=True)
    assert blocks(balanced) == [4, 3, 1, 0]
    assert [stage.parts[-1][0].name for stage in stages_of(balanced)] == ["blocks", "blocks", "blocks", "head"]
    assert blocks(replace(balanced, stages=2)) == [8, 0]
    assert blocks(replace(balanced, stages=10)) == [0, *[1] * 8, 0]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("balances", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1.0, 2.0, 16.0])
@pytest.mark.parametrize("persist", [False, True])
def test_the_heaviest_stage_is_among_those_looked_at(stages, balances, num_micro_batches, persist):
    cost = replace(
        COST, stages=stages, balances_flops=balances, num_micro_batches=num_micro_batches, grads_persist=persist
    )
    every = [stage_memory(cost, stage) for stage in stages_of(cost)]
    assert peak_memory(cost).total == max(each.total for each in every)
    assert peak_memory(cost).needed == pytest.approx(max(each.needed for each in every))
    assert len(heaviest_stages(cost)) <= min(stages, 3)


def test_inputs_of_split_products_are_gathered_whole():
    plain = peak_memory(replace(COST, tensor=2, grads_persist=True))
    cost = replace(COST, tensor=2, grads_persist=True, splits_norms=True)
    split, held = peak_memory(cost), peak_memory(replace(cost, held_gathers=1.5))
    assert plain.activations - split.activations == 8 * 100 / 2
    assert held.activations - split.activations == 1.5 * 8 * 50 / 2  # what is kept gathered is not divided
    small = replace(cost, segments=(BLOCK,))
    assert peak_memory(small).working == 40 / 2 + 2 * 50 / 2  # one gathered input, and one gradient to scatter


def test_slack_is_reserved_beside_what_comes_and_goes():
    memory = peak_memory(replace(COST, bucket_bytes=100.0))
    assert memory.slack == pytest.approx(SLACK * (7200 + 2000))
    assert memory.reserved == memory.total + memory.slack
    assert memory.needed == memory.total + STUCK * memory.slack


def test_slack_is_of_the_moment_at_which_most_comes_and_goes():
    many = replace(BLOCK, num_params=9000, num_trainable=9000)
    memory = peak_memory(replace(COST, segments=(EMBEDDING, many, HEAD)))
    assert memory.activations == 0  # at the peak, which all gradients make
    assert memory.slack == SLACK * (7200 + 2000)  # of the loss
    away = peak_memory(replace(COST, activation_offload=0.5))
    assert away.slack == pytest.approx(SLACK * (4000 + 2000 + 1600))


HELD = {"activations": 20 * GiB, "parameters": 8 * GiB, "optimizer": 8 * GiB, "transient": 3 * GiB, "working": GiB}


def test_shares_are_of_the_kinds_of_bytes_and_add_up():
    assert memory_shares(HELD) == pytest.approx((0.4, 0.5, 0.1, 0.0))
    assert memory_shares({}) == (0.0,) * len(SIGMA)
    every = dict.fromkeys((*CATEGORIES, "slack"), 1.0)  # each has a kind
    assert sum(memory_shares(every)) == sum(memory_shares({**HELD, "slack": 2 * GiB})) == pytest.approx(1)


def test_a_band_is_around_what_is_estimated_and_grows_with_it():
    low, high = memory_band(HELD)
    assert low < 40 * GiB < high
    assert LOW < 0 < HIGH
    assert memory_band({name: 2 * size for name, size in HELD.items()}) == pytest.approx((2 * low, 2 * high))
    assert all(memory_band({**HELD, name: size + GiB})[1] > high for name, size in HELD.items())
    states, *others = (memory_band({kind: GiB}) for kind in ("parameters", "activations", "working", "slack"))
    assert all(other[1] - other[0] > states[1] - states[0] for other in others), "states are known best"
