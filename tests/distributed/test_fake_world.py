"""A world that is not there: its place, its end, and what real code sees of fakes in it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from atorch.distributed.collectives import from_rank_zero, gather_objects
from atorch.distributed.local_collectives import Pretending, fake_world
from atorch.distributed.mesh import Mesh
from atorch.errors import ArgumentError, CapabilityError
from atorch.model.copy import copy_structure
from atorch.profiler.memory_tracker import CommCounter


def test_a_world_of_any_size_ends_with_its_context() -> None:
    with fake_world(1024, rank=1000) as world:
        assert (world.rank, world.size, dist.get_world_size()) == (1000, 1024, 1024)
        mesh = Mesh((("zero", 8), ("data", 128)), None, "cpu")
        assert mesh.rank("zero") == 0
        assert mesh.axes_of(mesh.group("zero").group_name) == ("zero",)
        assert mesh.axes_of(mesh.group("zero", "data").group_name) == ("zero", "data")
        assert gather_objects("here")[-1] == "here"
        assert from_rank_zero("here") == "here"
    assert not dist.is_initialized()


def test_a_rank_must_be_one_and_a_real_group_stays() -> None:
    with pytest.raises(ArgumentError, match="ranks are 0 to 7"), fake_world(8, rank=8):
        pass
    with fake_world(2), pytest.raises(CapabilityError, match="has a group of 2"), fake_world(4):
        pass
    assert not dist.is_initialized()


def test_small_whole_numbers_are_real_and_the_rest_is_not() -> None:
    pretending = Pretending()
    weight = pretending.fake(torch.empty(4, 4, device="meta"))
    with pretending, pretending.stepping():
        positions = torch.arange(8)[None]
        assert not isinstance(positions, FakeTensor)
        assert bool((positions.diff() == 1).all())
        assert isinstance(torch.zeros(4), FakeTensor)
        assert isinstance(torch.arange(2**11)[None] < torch.arange(2**11)[:, None], FakeTensor), "it is large"
        assert isinstance(weight @ torch.ones(4), FakeTensor)
        step = torch.tensor(0.0)
        step += 1
        assert step.item() == 1


def test_questions_to_fakes_have_the_answer_of_a_good_step() -> None:
    pretending = Pretending()
    weight = pretending.fake(torch.empty(4, 4, device="meta"))
    with pretending, pretending.stepping():
        assert bool(torch.isfinite(weight).all())
        assert torch.equal(weight, weight + 1)
        assert float(weight.sum()) == 1


def test_a_module_of_fakes_can_be_cast_and_replicated() -> None:
    pretending, sent = Pretending(), CommCounter()
    with pretending:
        model = copy_structure(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), pretending.fake).bfloat16()
    with fake_world(4), pretending:
        replicas = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        with pretending.stepping(), sent:
            for _ in range(3):
                sent.counts.clear()
                replicas(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert list(sent.counts.values()) == [(1, 2 * 40)]
    assert {kind for kind, _ in sent.counts} == {"all_reduce"}
