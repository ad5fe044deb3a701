"""The meshes that are tried: all of the world, in the order of links, and nothing the model cannot be divided by."""

import math
from dataclasses import replace

import pytest

from atorch.auto.opt_lib.parallel_mode import ParallelMode, meshes
from atorch.cluster.spec import ClusterSpec
from atorch.cost.transformer import TransformerShape, transformer_profile
from tests.auto.opt_lib.splitting import BLOCK, PROFILE, cluster

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
