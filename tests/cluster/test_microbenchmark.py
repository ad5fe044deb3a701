"""What is measured is positive, and links are measured where there are several processes."""

import pytest
import torch

from atorch.cluster.microbenchmark import copy_bandwidth, measured, measured_link
from atorch.cluster.spec import DeviceSpec
from atorch.distributed.world import World

CPU = torch.device("cpu")


def test_a_copy_counts_what_is_read_and_written(monkeypatch):
    monkeypatch.setattr("atorch.cluster.microbenchmark.seconds", lambda work, place: 0.5)
    assert copy_bandwidth(CPU) == 2 * 4 * 2**23 / 0.5


def test_measuring_draws_no_random_number():
    before = torch.get_rng_state()
    measured(DeviceSpec(type="cpu", name="cpu", memory_bytes=1e9), CPU)
    assert torch.equal(torch.get_rng_state(), before)


def _link(rank, size):
    return measured_link(World(rank=rank, size=size, local_rank=rank, device=CPU))


def test_a_link_is_measured_by_two(pool):
    for link in pool.run(_link, ranks=2):
        assert 0 < link.latency_s < 1
        assert 1e3 < link.bandwidth < 1e14


def test_one_process_takes_a_default():
    assert _link(0, 1).bandwidth == pytest.approx(1e10)
