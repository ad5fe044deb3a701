"""Loads of a mixture's experts: what capacities and routers that are not even make of a step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atorch.cluster.spec import ClusterSpec
from atorch.cost import peak_memory, plain_cost, step_time
from atorch.cost.comm import group_for, of_copy
from atorch.cost.parallelism import (
    accumulate,
    arrange,
    replicate,
    shard,
    shard_optimizer,
    split_tensor,
)
from atorch.cost.profile import busiest_load, distinct_share, expert_saved_bytes
from atorch.cost.transformer import Experts, TransformerShape, transformer_profile

CLUSTER = ClusterSpec.load("8xH100-80GB")
MIXTRAL = TransformerShape(
    layers=4, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000, seq_len=4096,
    experts=Experts(count=8, top_k=2, ffn=14336),
)  # fmt: skip
DEEPSEEK = replace(
    MIXTRAL, hidden=2048, ffn=10944, experts=Experts(count=64, top_k=6, ffn=1408, shared_ffn=2816, dense_layers=1)
)
shapes = pytest.mark.parametrize("shape", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])


def training(shape, *, ranks=8, capacity=0.0, skew=0.0):
    cost = arrange(plain_cost(transformer_profile(shape), 32), {"data": 8})
    cost = accumulate(replace(cost, dtype="bfloat16", param_itemsize=2.0), 4)
    return replicate(cost.replace(expert=ranks, expert_capacity=capacity, expert_skew=skew))


def blocks(shape):
    return next(each for each in transformer_profile(shape).segments if each.num_experts)


def load(shape, **given):
    return busiest_load(blocks(shape), 1.0, **{"ranks": 8, "capacity": 0.0, "skew": 0.0} | given)


@shapes
def test_tokens_that_are_dealt_out_are_even(shape):
    assert load(shape) == load(shape, ranks=1, skew=3.0) == 1
    dense = transformer_profile(shape).segments[0]
    assert busiest_load(dense, 1.0, ranks=8, capacity=2.0, skew=2.0) == 1


def test_a_rank_with_one_expert_has_that_experts_load_and_what_chance_adds():
    """8,192 copies of tokens a rank: √(2 ln 8 × 7/8 / 8192) is 2.1 %."""
    assert load(MIXTRAL, skew=1.0) == pytest.approx(1.0211, abs=1e-4)
    assert load(MIXTRAL, skew=1.5) == pytest.approx(1.5 + 0.0211 * 1.5**0.5, abs=1e-4)
    assert load(MIXTRAL, skew=17.8) == 8  # all tokens on one of eight ranks, and no more


def test_neighbours_share_what_the_busiest_expert_leaves():
    """Eight experts a rank: (1.6 + 7 × 62.4 / 63) / 8, beside chance."""
    even = load(DEEPSEEK, skew=1.0)
    assert load(DEEPSEEK, skew=1.6) - even == pytest.approx((1.6 + 7 * 62.4 / 63) / 8 - 1, rel=0.05)
    assert load(DEEPSEEK, skew=1.6) < load(DEEPSEEK, ranks=64, skew=1.6)


@shapes
@settings(max_examples=40, deadline=None, derandomize=True)
@given(skew=st.floats(1, 20), more=st.floats(0, 5), ranks=st.sampled_from([1, 2, 4, 8]))
def test_a_less_even_router_takes_no_less(shape, skew, more, ranks):
    cost, worse = (training(shape, ranks=ranks, skew=each) for each in (skew, skew + more))
    assert step_time(worse, CLUSTER).total_s >= step_time(cost, CLUSTER).total_s * (1 - 1e-9)
    assert peak_memory(worse).total >= peak_memory(cost).total * (1 - 1e-9)
    assert 1 <= load(shape, ranks=ranks, skew=skew) <= ranks


@shapes
def test_a_capacity_cuts_or_pads_every_load(shape):
    even, padded = training(shape), training(shape, capacity=1.25)
    (sent,), (more,) = (
        [each for each in of_copy(cost, blocks(shape)) if each.kind == "all_to_all"] for cost in (even, padded)
    )
    assert more.num_bytes == pytest.approx(1.25 * sent.num_bytes)
    assert training(shape, capacity=1.25, skew=9.0).expert_capacity == 1.25
    assert step_time(training(shape, capacity=1.25, skew=9.0), CLUSTER) == step_time(padded, CLUSTER)
    assert step_time(training(shape, capacity=1.0), CLUSTER) == step_time(even, CLUSTER)
    slower = step_time(padded, CLUSTER).total_s / step_time(even, CLUSTER).total_s
    assert 1.02 < slower < 1.25  # attention, the dense layers and the head have what they had
    grown = peak_memory(padded).activations - peak_memory(even).activations
    layers = next(each.count for each in even.segments if each.num_experts)
    assert grown == pytest.approx(0.25 * layers * expert_saved_bytes(blocks(shape)), rel=1e-6)


@shapes
def test_the_optimizer_steps_the_states_that_are_kept(shape):
    """Over 8 ranks experts of 4 of them are sharded over 2, all else over 8."""
    start = arrange(plain_cost(transformer_profile(shape), 32), {"data": 8})
    costs = [shard(start.replace(expert=ranks)) for ranks in (1, 4, 8)]
    taken = [step_time(cost, CLUSTER).optimizer_s / peak_memory(cost).optimizer for cost in costs]
    assert taken == pytest.approx([taken[0]] * 3)


@shapes
@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_are_held_once_by_each_group_and_sent_among_those_that_hold_the_same(shape, tensor):
    """Bytes × ranks add up to the model: experts on 16 ranks, all else on the same ranks of the tensor axis."""
    start = split_tensor(arrange(plain_cost(transformer_profile(shape), 32), {"tensor": tensor, "data": 16 // tensor}))
    dense = sum(part.count * (part.num_params - part.expert_params) for part in start.segments)
    experts = sum(part.count * part.expert_params for part in start.segments)
    for ranks in (2, 4, 8):
        cost = start.replace(expert=ranks)
        assert sum(part.count * cost.local_experts(part) for part in cost.segments) * ranks == pytest.approx(experts)
        if tensor == 1:  # which otherwise holds norms and routers twice
            assert 16 * peak_memory(shard(cost)).parameters == pytest.approx(2.0 * (dense + experts))
        for sent in (replicate(cost), shard_optimizer(cost), shard(cost)):
            same = [comm for comm in sent.comm if comm.axis[-1] == "expert"]
            rest = [comm for comm in sent.comm if comm.axis[-1] != "expert"]
            assert bool(same) == (ranks < 16)
            assert {group_for(comm.axis, sent, CLUSTER).size for comm in same} == {16 // ranks}
            assert {group_for(comm.axis, sent, CLUSTER).size for comm in rest} == {16 // tensor}
            share = sum(comm.num_bytes for comm in same) / sum(comm.num_bytes for comm in sent.comm)
            assert share == pytest.approx(cost.expert_share)
    alone = replicate(start.replace(expert=16)) if shape is DEEPSEEK else None
    assert alone is None or not [comm for comm in alone.comm if comm.axis[-1] == "expert"]


@shapes
def test_one_group_of_experts_is_no_axis(shape):
    start = arrange(plain_cost(transformer_profile(shape), 32), {"data": 8})
    for method in (replicate, shard_optimizer, shard):
        plain, one = method(start), method(start.replace(expert=1, expert_skew=0.0))
        assert plain == one
        assert step_time(plain, CLUSTER) == step_time(one, CLUSTER)
        assert peak_memory(plain) == peak_memory(one)
        assert [comm.axis for comm in one.comm if "expert" in comm.axis] == []


def test_hybrid_shards_of_experts_are_summed_over_the_other_replicas():
    """Experts of 4 ranks in shards of 8 are over 2 each; over the 2 replicas go four times as many bytes of them."""
    start = arrange(plain_cost(transformer_profile(MIXTRAL), 32), {"zero": 8, "data": 2}).replace(expert=4)
    cost = shard(start, axes=("zero",), replicas=("data",))
    sums = {comm.axis: comm.num_bytes for comm in cost.comm if comm.kind == "all_reduce"}
    shares = 1.0 - cost.expert_share, 4.0 * cost.expert_share
    assert sums["data", "expert"] / sums["data",] == pytest.approx(shares[1] / shares[0])
    cluster = ClusterSpec.load("2x8xH100-80GB")
    assert group_for(("data", "expert"), cost, cluster) == group_for(("data",), cost, cluster)


def test_tensor_ranks_send_a_part_of_the_tokens_each():
    plain, split = (
        split_tensor(arrange(plain_cost(transformer_profile(MIXTRAL), 32), axes), splits_norms=True).replace(expert=8)
        for axes in ({"data": 8}, {"tensor": 2, "data": 4})
    )
    (sent,), (part,) = (
        [comm for comm in of_copy(cost, blocks(MIXTRAL)) if comm.kind == "all_to_all"] for cost in (plain, split)
    )
    assert part.num_bytes == sent.num_bytes  # half the tokens of twice the samples


def test_a_token_goes_once_to_each_place():
    """Two experts of a token are on 8 ranks, on the same one with a chance of 1/8; on one rank all are."""
    assert distinct_share(blocks(MIXTRAL), 8) == pytest.approx((2 - 1 / 8) / 2)
    assert distinct_share(blocks(MIXTRAL), 1) == pytest.approx(1 / 2)
    assert distinct_share(transformer_profile(MIXTRAL).segments[0], 8) == 1.0
    cost = training(DEEPSEEK)
    assert step_time(cost.replace(sends_once=True), CLUSTER).total_s < step_time(cost, CLUSTER).total_s


def test_what_experts_keep_is_what_their_products_take_and_give():
    """Of 8,192 copies in 16 bits: 4,096 features as they come and as they go, and three times 14,336 between."""
    assert expert_saved_bytes(blocks(MIXTRAL)) == 2 * 8192 * (2 * 4096 + 3 * 14336)


@shapes
def test_balanced_routers_cost_little_and_others_much(shape):
    """As published: 1.04 with biases, 1.14 with losses, 17.8 without (arXiv 2408.15664 and 1701.06538)."""
    even, biases, losses, none = (
        step_time(training(shape, skew=each), CLUSTER).total_s for each in (0.0, 1.04, 1.14, 17.8)
    )
    assert even < biases < losses < 1.15 * even
    assert none > 1.3 * even
