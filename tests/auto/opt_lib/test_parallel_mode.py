"""parallel_mode: its configurations, other numbers of processes, and the meshes that a search tries."""

import math
from dataclasses import replace
from typing import Any

import pytest

from atorch.auto.job import make_context
from atorch.auto.opt_lib.parallel_mode import ParallelMode, meshes
from atorch.auto.opt_lib.shared.defaults import complete, disagreement, idle_axes
from atorch.auto.planner.estimate import fastest_mesh, lacks_degrees, on_mesh
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.distributed import parallel_group_size, parallel_rank, rank_table
from atorch.distributed.world import init
from atorch.errors import StrategyError
from tests.auto.opt_lib import splitting  # noqa: F401  registers the methods
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster
from tests.contract.job import make_model
from tests.pool import Pool

SHAPE = TransformerShape(
    layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq_len=2048, head_dim=128
)


def chosen(*names: str, batch: int = 64, cluster: str = "2x8xH100-80GB") -> tuple[ParallelMode, tuple[str, ...]]:
    """The mesh that the planner chooses for methods without degrees, and the methods on it."""
    profile, machine = transformer_profile(SHAPE, 1, Implementation(itemsize=4.0)), ClusterSpec.load(cluster)
    strategy = Strategy.of(list(names))
    assert lacks_degrees(strategy)
    mode = fastest_mesh(strategy, profile, plain_cost(profile, batch), machine)
    return mode, on_mesh(strategy, mode, machine.world_size).names()


def test_degrees_are_chosen_where_there_is_no_mesh() -> None:
    # 2 billion parameters take 16 bytes each with Adam, in fp32 more than 24 GiB: one device cannot hold them.
    mode, names = chosen("mixed_parallel", cluster="1x8xL4-24GB")
    assert mode.size("tensor", "pipeline") > 1
    assert set(names) & {"tensor_parallel", "pipeline_parallel"}
    mode, names = chosen("mixed_parallel", "checkpoint")
    assert ("tensor_parallel" in names) == (mode.size("tensor") > 1)
    assert ("pipeline_parallel" in names) == (mode.size("pipeline") > 1)
    assert "checkpoint" in names
    for name in ("tensor_parallel", "pipeline_parallel"):  # data parallelism alone is estimated faster here
        assert {name, "fsdp"} <= {*chosen(name, "fsdp")[1]}
    with pytest.raises(StrategyError, match=r"fits on no mesh of 2 processes; the nearest is parallel_mode\("):
        chosen("tensor_parallel", cluster="2xL4-24GB")
    with pytest.raises(StrategyError, match="is legal on no mesh of 16 processes: .*Give a parallel_mode"):
        chosen("tensor_parallel", batch=3)


SLICES = [("tensor", 2), ("pipe", 2), ("data", 2)]


def test_several_instances_of_a_mesh(pool: Pool) -> None:
    slices = [("tensor", 2), ("data", 2)]
    assert rank_table(slices, 8, instances=True) == {
        "tensor": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
    }
    assert rank_table(slices, 4, instances=True) == rank_table(slices, 4)
    with pytest.raises(StrategyError, match="multiply to that"):
        rank_table(slices, 8)
    with pytest.raises(StrategyError, match="multiply to that"):
        rank_table(slices, 6, instances=True)

    assert pool.run(places, None, ranks=4) == [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]
    assert pool.run(places, [0, 2, 1, 3], ranks=4) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


@pytest.mark.parametrize("given", [None, "data", [("data", 2), "pipe"], (SLICES, None), [("data",)]])
def test_what_is_no_mesh_is_told(given: Any) -> None:
    with pytest.raises(StrategyError, match=r"takes \[\(name, size\), …\]"):
        rank_table(given, 2)


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


def slices_of(config: Any, world_size: int) -> list[tuple[str, int]]:
    return list(ParallelMode.of(config).resized(world_size).slices)


@pytest.mark.parametrize(
    ("config", "world_size", "expected"),
    [
        (None, 16, [("data", 16)]),
        (([("data", 8)], None), 16, [("data", 16)]),
        (([("tensor", 2), ("pipeline", 2), ("data", 2)], None), 16, [("tensor", 2), ("pipeline", 2), ("data", 4)]),
        ([("tensor", 4)], 8, [("tensor", 4), ("data", 2)]),
        ([["zero", 2], ["data", 2]], 4, [("zero", 2), ("data", 2)]),
        (([("tensor", 4)], None), 4, [("tensor", 4)]),
    ],
)
def test_data_is_resized_to_fill_the_world(config: Any, world_size: int, expected: list[tuple[str, int]]) -> None:
    assert slices_of(config, world_size) == expected


def test_sizes_and_orders_that_do_not_fit_the_world_are_refused() -> None:
    with pytest.raises(
        StrategyError, match=r"tensor 3 × pipeline 2 = 6, which does not divide 8 processes. Use tensor 2"
    ):
        slices_of([("tensor", 3), ("pipeline", 2)], 8)
    with pytest.raises(StrategyError, match=r"Start 4 processes \(torchrun .*\) or a multiple. Else use tensor 1"):
        slices_of([("tensor", 4)], 1)

    assert ParallelMode.of(([("data", 2)], [1, 0])).resized(2).rank_order == (1, 0)
    with pytest.raises(StrategyError, match="rank_order"):
        ParallelMode.of(([("data", 2)], [0, 1])).resized(4)


def test_a_strategy_is_completed_for_its_processes() -> None:
    assert complete(Strategy(), 1) == Strategy(), "one process needs nothing"
    assert complete(Strategy(), 4) == Strategy.of([("parallel_mode", ([("data", 4)], None)), "ddp"])
    assert complete(Strategy.of(["fsdp"]), 2).names() == ("parallel_mode", "fsdp"), "what shards stays alone"
    split = Strategy.of([("parallel_mode", [("tensor", 2)])])
    assert complete(split, 2).names() == ("parallel_mode",), "nothing is replicated"
    of_tokens = Strategy.of([("parallel_mode", [("sequence", 2)]), "sequence_parallel"])
    assert complete(of_tokens, 2).names() == ("parallel_mode", "sequence_parallel", "ddp")
    saved = complete(Strategy.of([("parallel_mode", [("zero", 2), ("data", 2)]), "fsdp"]), 4)
    assert complete(saved, 8).get(ParallelMode).slices == (("zero", 2), ("data", 4)), "the data axis alone"
    with pytest.raises(StrategyError, match="does not divide 3 processes"):
        complete(saved, 3)


def places(rank: int, size: int, order: list[int] | None) -> tuple[int, int, int]:
    world = init()
    ctx = make_context(make_model(), world=world, cluster=ClusterSpec.detect(world, measure=False))
    ParallelMode.of(([("tensor", 2), ("data", 2)], order)).apply(ctx)
    return parallel_rank("tensor"), parallel_rank("data"), parallel_group_size("data")


def test_axes_are_split_by_methods() -> None:
    strategy = Strategy.of([("parallel_mode", [("tensor", 2), ("data", 2)]), "ddp"])
    assert idle_axes(strategy) == [("tensor", 2)]
    assert idle_axes(Strategy.of([("parallel_mode", [("zero", 2)]), "fsdp"])) == []


ORDER = ("tensor", "sequence", "context", "zero", "data", "pipeline")
LLAMA = TransformerShape(
    layers=126, hidden=16_384, heads=128, kv_heads=8, ffn=53_248, vocab=128_256, seq_len=8192, head_dim=128
)


def sizes(axis, found):
    return {dict(mesh).get(axis, 1) for mesh in found}


@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (4, 8), (3, 4), (16, 1), (2, 6)])
def test_every_mesh_fills_the_world_in_the_order_of_links(nodes, devices):
    found = list(meshes(PROFILE, cluster(nodes, devices)))
    assert len(set(found)) == len(found) > 1
    for mesh in found:
        names = [name for name, _ in mesh]
        assert math.prod(size for _, size in mesh) == nodes * devices
        assert names == sorted(names, key=ORDER.index)
        assert min(size for _, size in mesh) > 1
        inner = dict(mesh).get("tensor", 1) * dict(mesh).get("sequence", 1)
        assert devices % inner == 0, "tensor and sequence stay inside a node"


def test_sizes_divide_the_model():
    found = list(meshes(PROFILE, cluster(8, 8)))
    assert sizes("tensor", found) == {1, 2, 4, 8}
    assert sizes("context", found) == {1, 2, 4}  # 4,096 tokens, 1,024 for each at least
    assert sizes("pipeline", found) == {1, 2, 4, 8}  # as many as blocks
    six = replace(PROFILE, segments=(replace(BLOCK, num_heads=6, num_kv_heads=6, count=3),))
    found = list(meshes(six, cluster(8, 8)))
    assert (sizes("tensor", found), sizes("pipeline", found)) == ({1, 2}, {1, 2})
    assert max(dict(mesh).get("tensor", 1) * dict(mesh).get("sequence", 1) for mesh in found) == 2

    plain = replace(PROFILE, segments=(replace(BLOCK, num_heads=0, num_kv_heads=0, sequence_length=0),))
    assert set(meshes(plain, cluster(1, 4))) == {(("data", 4),), (("data", 2), ("pipeline", 2)), (("pipeline", 4),)}

    need = 8 * 1200 + 5000 / 2  # weights, gathered and as gradients, and one sample's results
    assert max(sizes("tensor", meshes(PROFILE, cluster(4, 2, memory_bytes=need / 2)))) == 2
    assert max(sizes("tensor", meshes(PROFILE, cluster(4, 2, memory_bytes=need / 3)))) == 4

    offered = [mode.slices for mode in ParallelMode.choices(PROFILE, cluster(2, 2))]
    assert offered == list(meshes(PROFILE, cluster(2, 2)))
    assert not list(ParallelMode.choices(PROFILE, cluster(1, 1)))


def test_shards_stay_inside_a_node_or_a_leaf():
    found = set(meshes(PROFILE, cluster(4, 8)))
    assert (("zero", 8), ("data", 4)) in found
    assert (("tensor", 2), ("zero", 4), ("data", 4)) in found
    assert sizes("zero", meshes(PROFILE, cluster(1, 8))) == {1}, "one node has one kind of link"

    plain = cluster(8, 4)
    leaves = replace(plain, nodes_per_leaf=4, inter_leaf=plain.inter_node)
    assert {16, 4, 1} <= sizes("zero", meshes(PROFILE, leaves))
    assert 16 not in sizes("zero", meshes(PROFILE, plain))
    one = replace(leaves, nodes_per_leaf=8)
    assert list(meshes(PROFILE, one)) == list(meshes(PROFILE, plain))


@pytest.mark.parametrize(("name", "least", "most"), [("128x8xH100-80GB", 150, 400), ("8xH100-80GB", 20, 40)])
def test_a_few_hundred_at_most(name, least, most):
    found = list(meshes(transformer_profile(LLAMA), ClusterSpec.load(name)))
    assert least < len(found) < most
    assert (("tensor", 8), ("data", 8), ("pipeline", 16)) in found or "128" not in name
