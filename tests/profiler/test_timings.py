"""Timings name what was timed, keep to their budget, and are the same calls on every process."""

import pytest
import torch
import torch.distributed as dist

from atorch.profiler import timings

CPU = torch.device("cpu")


def test_products_go_from_small_to_large():
    found = timings.products(torch.float32, CPU, 0.2)
    flops = [m * k * n for m, k, n in found]
    assert flops == sorted(flops)
    assert len(flops) > 4
    assert all(seconds > 0 for seconds in found.values())


def test_a_budget_ends_a_series():
    calls = []

    def make(name):
        calls.append(name)
        return lambda: None

    some = timings._growing({"big": 1e18, "small": 1.0}, make, CPU, 1e-3)
    assert list(some) == calls == ["small"]


def test_attention_is_timed_forward_and_backward():
    found = timings.attentions(torch.float32, CPU, 0.1)
    assert {(batch, head_dim) for batch, _, _, head_dim in found} == {(1, 64)}


def _collectives(rank, size):
    return timings.collectives(dist.group.WORLD, CPU, 0.2)


def test_all_processes_time_the_same_collectives(pool):
    first, *others = pool.run(_collectives, ranks=3)
    assert {kind for kind, _ in first} == {"all_reduce", "all_gather"}
    assert all(num_bytes % (4 * 3) == 0 for _, num_bytes in first)
    assert all(other.keys() == first.keys() for other in others)


@pytest.mark.gpu
def test_copies_to_and_from_the_host():
    found = timings.host_copies(torch.device("cuda"), 0.5)
    assert {way for way, _ in found} == {"to device", "to host"}
