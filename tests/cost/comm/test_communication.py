"""What splits send in a micro-batch, by hand, and what the splits make of a cost."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atorch.cluster.spec import ClusterSpec, DeviceSpec, LinkSpec
from atorch.cost import Comm, Cost, Matmul, Region, Segment, peak_memory, step_time
from atorch.cost.comm import (
    BESIDE_OTHERS,
    IN_CHUNKS,
    TREE_PIECE,
    Link,
    LinkGroup,
    boundary_bytes,
    group_of,
    group_of_neighbours,
    of_copy,
)
from atorch.cost.parallelism import (
    accumulate,
    arrange,
    replicate,
    shard,
    shard_optimizer,
    split_context,
    split_pipeline,
    split_sequence,
    split_tensor,
)
from atorch.cost.time import SHARPNESS

# Eight tokens of a stream of 4 elements, in 16 bits: 64 bytes.
BLOCK = Segment(
    name="blocks", count=4, is_block=True, num_params=100, num_trainable=100, split_params=96, input_bytes=64,
    matmuls=(
        Matmul(rows=8, inner=4, columns=12, split="columns"), Matmul(rows=8, inner=4, columns=4, split="rows"),
        Matmul(rows=8, inner=4, columns=16, split="columns"), Matmul(rows=8, inner=16, columns=4, split="rows"),
    ),
    attention_flops=100.0, num_heads=4, num_kv_heads=2, num_ops=10, outside=Region(traffic_bytes=100),
)  # fmt: skip
HEAD = Segment(
    name="head", num_params=40, num_trainable=40, split_params=40,
    matmuls=(Matmul(rows=8, inner=4, columns=10, split="columns"),),
)  # fmt: skip
EMBEDDING = Segment(name="embedding", num_params=40, num_trainable=40, split_params=40)
PLAIN = Cost(
    segments=(EMBEDDING, BLOCK, HEAD), traced_batch=1.0, batch_size=8.0, dtype="bfloat16", param_itemsize=2.0,
    grad_itemsize=4.0,
)  # fmt: skip
LINK = LinkSpec(bandwidth=1e6, latency_s=1e-3)
CLUSTER = ClusterSpec(
    device=DeviceSpec(type="cuda", name="toy", memory_bytes=1e6, peak_flops={"bfloat16": 1e9}, memory_bandwidth=1e9),
    devices_per_node=2,
    intra_node=LINK,
    inter_node=LinkSpec(bandwidth=1e5, latency_s=1e-2, efficiency=0.5),
)


def tensor(degree=2, **others):
    return split_tensor(arrange(accumulate(PLAIN, 8), {"tensor": degree}), **others)


def test_blocks_sum_after_both_branches_forward_and_backward_and_where_they_are_recomputed():
    assert of_copy(tensor(), BLOCK) == [Comm("all_reduce", ("tensor",), 4 * 64, count=4)]
    assert of_copy(replace(tensor(), recompute=1.0), BLOCK) == [Comm("all_reduce", ("tensor",), 6 * 64, count=6)]


def test_sums_of_norms_that_are_split_are_scattered_and_gathered():
    """And what a product by columns was given is gathered again behind its weight's gradient."""
    assert of_copy(tensor(splits_norms=True), BLOCK) == [
        Comm("reduce_scatter", ("tensor",), 4 * 64, count=4),
        Comm("all_gather", ("tensor",), 4 * 64, count=4),
        Comm("all_gather", ("tensor",), 2 * 64, count=2, overlap=1.0),
    ]


def test_sums_of_backward_run_beside_the_products_of_weights_gradients():
    """Those that there are: frozen weights have none. What products take and give is cut into chunks."""
    axis, cost = ("tensor",), tensor(4, splits_norms=True).replace(tensor_beside="weights")
    forward, backward, gathered, again = of_copy(cost, BLOCK)
    assert (forward, backward) == (
        Comm("reduce_scatter", axis, 2 * 64, count=2),
        Comm("reduce_scatter", axis, 2 * 64, count=2, overlap=BESIDE_OTHERS),
    )
    assert (gathered.overlap, again.overlap) == (0.0, 1.0)
    shares = [each.overlap for each in of_copy(cost.replace(tensor_beside="both"), BLOCK)]
    assert shares == [IN_CHUNKS, BESIDE_OTHERS, IN_CHUNKS, 1.0]
    chunked = of_copy(cost.replace(tensor_beside="chunks"), BLOCK)
    assert chunked[0] == Comm("reduce_scatter", axis, 4 * 64, count=4, overlap=IN_CHUNKS)
    frozen = replace(BLOCK, matmuls=tuple(replace(each, trainable=False) for each in BLOCK.matmuls))
    assert of_copy(cost, frozen) == of_copy(cost.replace(tensor_beside="nothing"), frozen)
    assert of_copy(cost.replace(tensor_beside="both"), frozen) == of_copy(cost.replace(tensor_beside="chunks"), frozen)
    whole, behind = of_copy(tensor().replace(tensor_beside="weights"), BLOCK)
    assert (whole.count, whole.overlap, behind.count, behind.overlap) == (2, 0.0, 2, BESIDE_OTHERS)


def test_what_8_bit_products_take_is_gathered_in_8_bits():
    cost = tensor(splits_norms=True).replace(fp8="delayed", fp8_gathers=True)
    scattered, *gathered = of_copy(cost, BLOCK)
    assert [each.num_bytes for each in (scattered, *gathered)] == [4 * 64, 4 * 32, 2 * 32]
    assert of_copy(cost.replace(fp8=None), BLOCK) == of_copy(tensor(splits_norms=True), BLOCK)


def test_a_head_sums_in_backward_and_an_embedding_in_forward():
    assert of_copy(tensor(), HEAD) == [Comm("all_reduce", ("tensor",), 64, count=1)]
    assert of_copy(tensor(), EMBEDDING) == [Comm("all_reduce", ("tensor",), 64, count=1)]


def test_a_sequence_split_exchanges_queries_keys_values_and_results():
    cost = split_sequence(arrange(accumulate(PLAIN, 8), {"sequence": 2}))
    assert of_copy(cost, BLOCK) == [Comm("all_to_all", ("sequence",), 2 * (2 + 2 * 0.5) * 32, count=8)]


def test_a_context_split_passes_keys_and_values_around_behind_attention():
    cost = split_context(arrange(accumulate(PLAIN, 8), {"context": 4}))
    assert of_copy(cost, BLOCK) == [Comm("send", ("context",), 3 * 3 * 16, count=9, overlap=1.0)]


def test_experts_get_tokens_and_send_them_back():
    cost = arrange(accumulate(PLAIN, 8), {"data": 2}).replace(expert=2)
    mixture = replace(BLOCK, dispatched_bytes=128)
    share = 8 / 2 / 8  # of the traced sample
    assert of_copy(cost, mixture) == [Comm("all_to_all", ("expert",), 4 * 128 * share, count=4)]


def test_ranks_are_arranged_tensor_first_and_share_the_batch():
    cost = arrange(PLAIN, {"pipeline": 2, "data": 2, "zero": 2, "tensor": 2, "context": 1})
    assert list(cost.axes.items()) == [("tensor", 2), ("zero", 2), ("data", 2), ("pipeline", 2)]
    assert cost.batch_size == 2


def test_replicas_reduce_in_buckets_of_which_the_last_shows():
    cost = replicate(arrange(PLAIN, {"data": 2}), bucket_bytes=480.0)
    gradients = (40 + 4 * 100 + 40) * 4.0
    last = 40 + 36  # the table, behind what no longer fills a bucket of 120
    assert cost.comm == (Comm("all_reduce", REPLICAS, gradients, count=4, overlap=1 - last / 480),)
    assert replicate(arrange(PLAIN, {"data": 2}), overlaps=False).comm[0].overlap == 0


REPLICAS = ("data", "zero", "sequence", "context")


def test_a_sharded_optimizer_gathers_what_it_stepped_over_its_own_group():
    cost = shard_optimizer(arrange(PLAIN, {"data": 2, "zero": 4}), over=("zero",), bucket_bytes=480.0)
    assert cost.optim_shards == 4
    reduced, gathered = cost.comm
    assert (reduced.kind, reduced.axis, reduced.num_bytes) == ("reduce_scatter", REPLICAS, 1920)
    assert (gathered.kind, gathered.axis, gathered.num_bytes, gathered.count) == ("all_gather", ("zero",), 960, 3)


def test_sharded_parameters_are_gathered_twice_in_every_micro_batch():
    cost = shard(arrange(PLAIN, {"data": 2}))
    gathered, reduced = cost.comm
    assert (gathered.num_bytes, gathered.count, gathered.per_micro_batch) == (2 * (480 + 400), 6 + 4, True)
    assert (reduced.num_bytes, reduced.count) == (4 * 480, 6)
    assert shard(arrange(PLAIN, {"data": 2}), keeps_gathered=True).comm[0].num_bytes == 2 * 480
    once, twice = (step_time(accumulate(cost, times), CLUSTER).exposed_comm_s for times in (1, 2))
    assert twice == pytest.approx(2 * once, rel=0.05)


def test_what_is_gathered_once_a_step_is_sent_once_and_stays():
    arranged = arrange(PLAIN, {"data": 2})
    each, once = shard(arranged), shard(arranged, once_a_step=True)
    few, many = (step_time(accumulate(once, times), CLUSTER).exposed_comm_s for times in (1, 4))
    assert many == pytest.approx(few, rel=0.01), "more micro-batches send nothing more"
    assert step_time(accumulate(each, 4), CLUSTER).exposed_comm_s > 3 * few
    assert peak_memory(accumulate(once, 4)).total > peak_memory(accumulate(each, 4)).total
    assert (once.whole_grads, once.grad_shards, once.param_shards) == (True, 1, 2)


def test_groups_inside_a_node_across_nodes_and_of_neighbours():
    axes = {"tensor": 2, "data": 4}
    inside, apart = (Link(1, 1e6),), (Link(3, 5e4),)
    assert group_of(("tensor",), axes, CLUSTER) == LinkGroup(2, 1, 1e6, 1e-3, 1e-2, tree_bandwidth=5e5, links=inside)
    assert group_of(("data",), axes, CLUSTER) == LinkGroup(4, 4, 5e4, 1e-3, 1e-2, tree_bandwidth=5e5, links=apart)
    assert group_of_neighbours(4, CLUSTER, stride=2) == group_of(("data",), axes, CLUSTER)
    both = group_of(("tensor", "data"), axes, CLUSTER)
    assert both == LinkGroup(8, 4, 1e5, 1e-3, 1e-2, tree_bandwidth=5e5, links=(Link(1, 1e6), Link(6, 5e4)))


def test_what_every_rank_sends_others_goes_through_its_own_links():
    """A ring leaves a node once, through all its ranks' links; messages of an all-to-all through their own rank's."""
    group = group_of(("tensor", "data"), {"tensor": 2, "data": 4}, CLUSTER)
    assert group.carrying_s("all_gather", 800) == pytest.approx(7 / 8 * 800 / 1e5)
    assert group.carrying_s("all_to_all", 800) == pytest.approx(6 / 8 * 800 / 5e4)
    assert group.carrying_s("send", 800) == pytest.approx(800 / 5e4)
    alone = group_of(("tensor",), {"tensor": 2}, CLUSTER)
    assert alone.carrying_s("all_to_all", 800) == pytest.approx(alone.carrying_s("all_gather", 800))


LEAF = LinkSpec(bandwidth=1e4, latency_s=1e-1)


def test_a_group_over_leaves_is_bound_by_the_links_out_of_a_leaf():
    axes = {"tensor": 2, "data": 4}
    leaves, apart = replace(CLUSTER, nodes_per_leaf=2, inter_leaf=LEAF), (Link(3, 5e4), Link(2, 1e4))
    assert group_of(("tensor",), axes, leaves) == group_of(("tensor",), axes, CLUSTER)
    assert group_of(("data",), axes, leaves) == LinkGroup(4, 4, 2e4, 1e-3, 1e-2, 2, 1e-1, 5e5, apart)
    both = (Link(1, 1e6), Link(6, 5e4), Link(4, 1e4))
    assert group_of(("tensor", "data"), axes, leaves) == LinkGroup(8, 4, 4e4, 1e-3, 1e-2, 2, 1e-1, 5e5, both)
    assert group_of_neighbours(2, leaves, stride=2) == group_of_neighbours(2, CLUSTER, stride=2)
    assert group_of_neighbours(4, leaves, stride=2) == group_of(("data",), axes, leaves)
    group = group_of(("data",), axes, leaves)
    assert group.seconds("send", 3, 0) == pytest.approx(3 * 1e-1)
    assert group.seconds("all_gather", 1, 0) == pytest.approx(3 * 1e-1), "ranks of a ring go in step"
    assert group.seconds("broadcast", 1, 0) == pytest.approx(2 * 1e-2 + 1e-1), "those of a chain need not"
    assert group.seconds("all_reduce", 1, 0) == pytest.approx(2 * (1e-2 + 1e-1))


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
AXES = st.dictionaries(
    st.sampled_from(("tensor", "zero", "data", "pipeline")), st.sampled_from((2, 3, 4, 8)), min_size=1
)


@given(AXES, st.data(), st.sampled_from(KINDS), st.floats(0, 1e9), st.integers(1, 9))
def test_leaves_only_ever_cost(axes, data, kind, num_bytes, nodes_per_leaf):
    """One leaf is none; slower links between leaves, and smaller leaves, make nothing faster."""
    names = tuple(data.draw(st.sets(st.sampled_from(sorted(axes)), min_size=1)))
    devices = data.draw(st.sampled_from((1, 2, 8)))
    plain = replace(CLUSTER, num_nodes=-(-math.prod(axes.values()) // devices), devices_per_node=devices)
    link = LinkSpec(bandwidth=data.draw(st.floats(1e3, 1e8)), latency_s=data.draw(st.floats(0, 1)))
    slower = LinkSpec(bandwidth=link.bandwidth / data.draw(st.floats(1, 100)), latency_s=link.latency_s * 2)

    def seconds(per_leaf, given):
        cluster = plain if given is None else replace(plain, nodes_per_leaf=per_leaf, inter_leaf=given)
        return group_of(names, axes, cluster).seconds(kind, 2, num_bytes)

    one = seconds(nodes_per_leaf, link)
    assert seconds(plain.num_nodes, slower) == seconds(1, None)
    assert one >= seconds(1, None) * (1 - 1e-9)
    assert seconds(nodes_per_leaf, slower) >= one * (1 - 1e-9)


def test_a_slower_link_between_leaves_makes_no_step_faster():
    cost = replicate(split_tensor(arrange(accumulate(PLAIN, 2), {"tensor": 2, "data": 4})))
    wide = replace(CLUSTER, num_nodes=4)
    before = step_time(cost, wide).total_s
    assert step_time(cost, replace(wide, nodes_per_leaf=4, inter_leaf=LEAF)).total_s == before
    for slower in (1, 2, 10):
        link = replace(LEAF, bandwidth=LEAF.bandwidth / slower)
        now = step_time(cost, replace(wide, nodes_per_leaf=2, inter_leaf=link)).total_s
        assert now > before
        before = now


def test_an_all_reduce_over_many_nodes_goes_up_and_down_a_tree():
    group = LinkGroup(
        size=32, num_nodes=16, bandwidth=1e5, inner_latency_s=1e-3, outer_latency_s=1e-2, tree_bandwidth=5e4
    )
    by_tree, by_ring = 2 * (1e-3 + 4 * 1e-2 + 2 * 1000 / 5e4), 31 * 1e-2 + 31 / 32 * 1000 / 1e5
    assert group.seconds("all_reduce", 1, 1000) == pytest.approx(by_tree), "whose hops are filled one after the other"
    assert group.seconds("all_gather", 1, 1000) == pytest.approx(by_ring)
    wide, alone = replace(group, tree_bandwidth=2e5), replace(group, size=16)
    assert wide.seconds("all_reduce", 1, 1000) == pytest.approx(2 * (1e-3 + 4 * 1e-2 + 2 * 1000 / 1e5))
    assert alone.seconds("all_reduce", 1, 1000) == pytest.approx(2 * (4 * 1e-2 + 2 * 1000 / 1e5)), "nothing is inside"
    large = 1e6  # for which a ring's rate is worth its hops
    assert group.seconds("all_reduce", 1, large) == pytest.approx(2 * (31 * 1e-2 + 31 / 32 * large / 1e5))


def test_a_tree_is_filled_with_pieces_hop_by_hop():
    group = LinkGroup(size=32, num_nodes=16, bandwidth=1e9, inner_latency_s=0, outer_latency_s=1, tree_bandwidth=1e9)
    hops, large = 1 + 4, 1e9
    assert group.seconds("all_reduce", 1, large) == pytest.approx(2 * (4 + (large + hops * TREE_PIECE) / 1e9))
    assert group.seconds("all_reduce", 2, large) == pytest.approx(2 * (8 + (large + 2 * hops * TREE_PIECE) / 1e9))


def test_hops_hold_up_launches_only_where_a_pipeline_leaves_the_node():
    within = split_tensor(split_pipeline(arrange(accumulate(PLAIN, 8), {"tensor": 2, "pipeline": 2})))
    slow = replace(within, hop_wait_s=1.0)
    alone = replace(tensor(), hop_wait_s=1.0)
    wide = replace(CLUSTER, devices_per_node=4)
    calls = 8 * 2 * 4  # micro-batches, blocks of a stage, sums of a block
    ends = 8 * 1  # the embedding's sum, or the head's
    waited = step_time(slow, CLUSTER).launch_s - step_time(within, CLUSTER).launch_s
    assert waited == pytest.approx(2 * (calls + ends))  # an all-reduce of two ranks has two hops
    assert step_time(slow, wide) == step_time(within, wide)
    assert step_time(alone, CLUSTER) == step_time(tensor(), CLUSTER)


def test_ranks_wait_for_each_other_at_a_collective_that_nothing_hides(monkeypatch):
    whole, scattered = tensor(), tensor(splits_norms=True)
    with_meeting = [step_time(cost, CLUSTER).exposed_comm_s for cost in (whole, scattered)]
    monkeypatch.setattr("atorch.cost.time.MEETING_S", 0.0)
    without = [step_time(cost, CLUSTER).exposed_comm_s for cost in (whole, scattered)]
    # Two sums forward and two backward in 4 blocks, one of the embedding and one of the head, in 8 micro-batches: each
    # an all-reduce of two rounds, or a reduce-scatter and an all-gather of one.
    rounds = 8 * 2 * (4 * 4 + 2)
    assert [each - other for each, other in zip(with_meeting, without, strict=True)] == pytest.approx(
        2 * [rounds * 5e-5]
    )


def test_stages_send_a_share_where_tensor_ranks_hold_the_same():
    cost = split_pipeline(split_tensor(arrange(accumulate(PLAIN, 8), {"tensor": 2, "pipeline": 2})))
    assert boundary_bytes(cost) == 64
    assert boundary_bytes(replace(cost, scatters_sends=True)) == 32


def test_where_launches_and_work_are_alike_neither_hides_the_other():
    cost = replace(PLAIN, segments=(replace(BLOCK, attention_flops=0.0, matmuls=(), num_params=0, num_trainable=0),))
    busy = 4 * 8 * 2.5 * 100 / CLUSTER.device.memory_bandwidth
    launching = 4 * 3 * 10
    alike = replace(CLUSTER, device=replace(CLUSTER.device, launch_s=busy / launching))
    assert step_time(cost, alike).total_s == pytest.approx(2 ** (1 / SHARPNESS) * busy)
    quick = replace(CLUSTER, device=replace(CLUSTER.device, launch_s=busy / launching / 10))
    assert busy < step_time(cost, quick).total_s < 1.002 * busy
