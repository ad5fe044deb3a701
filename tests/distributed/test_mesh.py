"""Rank tables, and the groups and device meshes that are made of them."""

import math
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from atorch.distributed import Mesh, parallel_group, parallel_group_size, parallel_rank, rank_table, use_mesh
from atorch.distributed.collectives import use_world_group
from atorch.distributed.local_collectives import fake_world
from atorch.distributed.mesh import AXES, groups_along, own_group
from atorch.errors import StrategyError
from tests.pool import on_ranks


def test_the_table_of_the_document() -> None:
    assert rank_table([("tensor", 4), ("pipeline", 2), ("data", 2)], 16) == {
        "tensor": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        "data": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    }


def test_the_product_of_axes() -> None:
    slices = [("tensor", 2), ("zero", 2), ("data", 2)]
    assert groups_along(slices, 8, None, ("data", "zero")) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups_along(slices, 8, None, ("data", "tensor")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert groups_along(slices, 8, None, ()) == [[rank] for rank in range(8)]


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[list[tuple[str, int]], int, list[int]]:
    names = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=4))
    slices = [(name, draw(st.integers(1, 4))) for name in names]
    world_size = math.prod(size for _, size in slices)
    return slices, world_size, draw(st.permutations(range(world_size)))


@given(arrangements(), st.sets(st.sampled_from(AXES)))
def test_every_table(arranged: Any, names: set[str]) -> None:
    """The groups of an axis partition the ranks, and those of two axes meet in one rank at most."""
    slices, world_size, order = arranged
    table = rank_table(slices, world_size, order)
    for name, groups in table.items():
        assert sorted(rank for group in groups for rank in group) == list(range(world_size))
        assert {len(group) for group in groups} == {dict(slices)[name]}
        for other in set(table) - {name}:
            assert all(len(set(a) & set(b)) <= 1 for a in groups for b in table[other])
    for group in groups_along(slices, world_size, order, list(names)):
        for rank in group:
            assert own_group(rank, slices, order, list(names)) == sorted(group)
    plain = rank_table(slices, world_size)
    assert table == {name: [[order[rank] for rank in group] for group in groups] for name, groups in plain.items()}
    if slices:
        assert [rank for group in plain[slices[0][0]] for rank in group] == list(range(world_size)), "contiguous"


def test_a_group_of_one_is_made_by_that_one_alone() -> None:
    with fake_world(4096, rank=7), mock.patch.object(dist, "new_group", side_effect=dist.new_group) as made:
        mesh = Mesh((("tensor", 8), ("data", 512)), None, "cpu", timedelta(seconds=5))
        assert mesh.group("pipeline").size() == mesh.group("zero").size() == 1
        assert made.call_count == 1
        assert mesh.group("tensor").size() == 8
        assert {call.kwargs["timeout"] for call in made.call_args_list} == {timedelta(seconds=5)}


@pytest.mark.parametrize(
    ("slices", "world_size", "order", "message"),
    [
        ([("tensor", 3), ("data", 2)], 8, None, "tensor 3 × data 2 = 6, but there are 8 processes"),
        ([], 2, None, "no axis = 1, but there are 2 processes"),
        ([("data", 2), ("data", 2)], 4, None, "axis 'data' is given twice"),
        ([("data", -2), ("tensor", -2)], 4, None, "axis 'data' has size -2; a size is a whole number of at least 1"),
        ([("data", 0)], 0, None, "axis 'data' has size 0"),
        ([("data", 2.0)], 2, None, "axis 'data' has size 2.0"),
        ([("data", True)], 1, None, "axis 'data' has size True"),
        ([("data", 2)], 2, [0, 0], r"rank_order is \[0, 0\]; it must hold each of the 2 ranks 0 to 1 once"),
        ([("data", 2)], 2, [0], "rank_order"),
        ([("data", 2)], 2, [0, "1"], "rank_order"),
        ([("data", 2)], 2, [False, True], "rank_order"),
    ],
)
def test_what_does_not_hold(slices: Any, world_size: int, order: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        rank_table(slices, world_size, order)


def test_a_mesh_has_known_axes_and_groups_in_the_order_of_ranks() -> None:
    with pytest.raises(StrategyError, match="there is no axis 'pipe'; did you mean 'pipeline'"):
        Mesh((("pipe", 2),), None, "cpu")
    with pytest.raises(
        StrategyError, match=r"\[1, 0\] in one 'data' group in that order; a group numbers its processes"
    ):
        Mesh((("data", 2),), (1, 0), "cpu")
    with pytest.raises(StrategyError, match="axis 'data' has size 0"):
        Mesh((("data", 0),), None, "cpu")
    with fake_world(2), pytest.raises(StrategyError, match="the mesh arranges 4 processes, but there are 2"):
        Mesh((("data", 4),), None, "cpu").group("data")


def test_sizes_and_layout() -> None:
    mesh = Mesh((("tensor", 4), ("data", 2)), None, "cpu")
    assert mesh.num_ranks == 8
    assert (mesh.size("tensor"), mesh.size("data", "tensor"), mesh.size("zero"), mesh.size()) == (4, 8, 1, 1)
    assert mesh.layout() == Mesh((("tensor", 4), ("data", 2)), None, "cpu").layout()
    assert mesh.layout() != Mesh((("data", 2), ("tensor", 4)), None, "cpu").layout()


def test_the_current_mesh_is_the_innermost() -> None:
    with use_mesh(None), pytest.raises(StrategyError, match="no mesh has been made, so there is no group 'data'"):
        parallel_group_size("data")
    outer, inner = Mesh((("data", 1),), None, "cpu"), Mesh((("tensor", 1),), None, "cpu")
    with use_mesh(outer):
        with use_mesh(inner):
            assert parallel_rank("tensor") == 0
            with pytest.raises(StrategyError, match="the mesh has no axis 'data'; it has tensor"):
                parallel_group("data")
        assert parallel_group_size("data") == 1


def test_threads_without_a_context_of_their_own_see_the_mesh_that_was_made_current_last() -> None:
    seen: list[int] = []
    with use_mesh(Mesh((("tensor", 1),), None, "cpu")):
        autograds = threading.Thread(target=lambda: seen.append(parallel_group_size("tensor")))
        autograds.start()
        autograds.join()
    assert seen == [1]


def summed(value: float, group: dist.ProcessGroup) -> float:
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


ARRANGED = [((("tensor", 2), ("data", 2)), None), ((("data", 2), ("tensor", 2)), (0, 2, 1, 3))]


@on_ranks(4)
def test_groups_reduce_over_the_ranks_of_the_table(rank: int, size: int) -> None:
    for slices, order in ARRANGED:
        mesh, table = Mesh(slices, order, "cpu"), rank_table(slices, 4, order)
        of_axis = {(name,): next(group for group in table[name] if rank in group) for name in ("data", "tensor")}
        for names, members in {**of_axis, ("data", "tensor"): range(4), ("zero",): [rank]}.items():
            group = mesh.group(*names)
            assert group is mesh.group(*names)
            assert dist.get_process_group_ranks(group) == mesh.ranks(*names)
            assert dist.get_rank(group) == mesh.rank(*names)
            assert summed(2.0**rank, group) == sum(2.0**member for member in members)
        with use_mesh(mesh):
            assert parallel_group("data") is mesh.group("data")
            assert (parallel_rank("tensor"), parallel_group_size("tensor")) == (mesh.rank("tensor"), 2)


@on_ranks(4)
def test_a_device_mesh_shards_in_the_order_of_the_mesh(rank: int, size: int) -> None:
    whole = torch.arange(8.0)
    for slices, order in ARRANGED:
        mesh = Mesh(slices, order, "cpu")
        inner, outer = mesh.device_mesh("tensor"), mesh.device_mesh("data")
        both = mesh.device_mesh("tensor", "data")
        assert both.mesh_dim_names == ("data", "tensor")
        assert mesh.device_mesh("zero", "data").shape == (2, 1)
        assert inner.get_group() is mesh.group("tensor")
        assert outer.get_local_rank() == mesh.rank("data")
        for device_mesh in (inner, outer):
            assert torch.equal(distribute_tensor(whole, device_mesh, [Shard(0)]).full_tensor(), whole)
        local = distribute_tensor(whole, both, [Shard(0), Shard(0)]).to_local()
        assert torch.equal(local, whole.view(2, 2, 2)[mesh.rank("data"), mesh.rank("tensor")])


@on_ranks(2)
def test_a_mesh_like_a_closed_one_has_groups_of_its_own(rank: int, size: int) -> None:
    for value in (1.0, 2.0):
        group = dist.new_group()
        with use_world_group(group):
            mesh = Mesh((("data", size),), None, "cpu")
            local = torch.full((1,), value + rank)
            parameter: Any = nn.Parameter(DTensor.from_local(local, mesh.device_mesh("data"), [Shard(0)]))
            assert parameter.full_tensor().tolist() == [value, value + 1]
            mesh.close()
        dist.destroy_process_group(group)


@on_ranks(4)
def test_axes_are_joined_in_the_order_of_ranks(rank: int, size: int) -> None:
    slices = (("sequence", 2), ("data", 2))
    for arranged in (slices, slices[::-1]):
        mesh = Mesh(arranged, None, "cpu")
        both = mesh.joined_mesh(("data", "sequence"))
        assert mesh.joined_mesh(("data", "sequence")) is both
        assert mesh.joined_mesh(("data",), ("sequence", "context")).mesh_dim_names == ("data", "sequence")
        assert both.mesh.tolist() == [0, 1, 2, 3]
        assert both.get_local_rank() == mesh.rank("data", "sequence") == both.get_group().rank()
        whole = torch.arange(8.0)
        spread = distribute_tensor(whole, both, [Shard(0)])
        assert torch.equal(spread.full_tensor(), whole)
        assert torch.equal(spread.to_local(), whole.chunk(both.size())[both.get_local_rank()])


def test_joined_axes_beside_tensor_are_in_the_usual_order() -> None:
    usual, other = (Mesh(tuple((name, 2) for name in names), None, "cpu") for names in ORDERS)
    with fake_world(8, rank=6):
        assert usual.joined_mesh(("data", "sequence")).mesh.tolist() == [0, 2, 4, 6]
        with pytest.raises(
            StrategyError, match="in the order data, tensor, sequence, .* give them in the order tensor"
        ):
            other.joined_mesh(("data", "sequence"))


ORDERS = (("tensor", "sequence", "data"), ("data", "tensor", "sequence"))
