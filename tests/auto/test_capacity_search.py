"""The border of what fits is found, with as many questions as doubling and halving take."""

from dataclasses import replace

import pytest

from atorch.auto.plan_for_cluster import largest, sized, smallest_cluster
from atorch.cluster.spec import ClusterSpec
from atorch.errors import NoFeasiblePlanError

KIND = ClusterSpec.load("8xH100-80GB")


def fits_to(border):
    """Plans for sizes up to a border; a plan is its size."""

    def ask(size):
        if size > border:
            raise NoFeasiblePlanError(f"{size} is too large")
        return size

    return ask


def quiet(size, plan):
    assert plan in (size, None)


@pytest.mark.parametrize(
    ("border", "first", "found"),
    [
        (1000, 64, 960),  # 512 fits and 1024 does not; of 768, 896 and 960 all do
        (1000, 1000, 1000),
        (5, 64, 5),
        (64, 64, 64),
        (65, 64, 64),
        (1, 4096, 1),
        (100, 96, 96),
    ],
)
def test_the_largest_is_found_from_below_and_from_above(border, first, found):
    fit = largest(fits_to(border), first, 2**20, quiet)
    assert fit.size == fit.plan == found
    assert fit.is_bounded
    assert fit.size <= border < fit.size + max(1, fit.size // 7)


def test_the_search_for_the_largest_ends():
    told = []
    fit = largest(fits_to(1000), 512, 2**20, lambda size, plan: told.append((size, plan is not None)))
    assert told == [(512, True), (1024, False), (768, True), (896, True), (960, True)]
    assert fit.tried == tuple(told)

    fit = largest(fits_to(10**9), 100, 1000, quiet)
    assert (fit.size, fit.is_bounded) == (800, False)

    with pytest.raises(NoFeasiblePlanError, match="1 is too large"):
        largest(fits_to(0), 64, 1024, quiet)


@pytest.mark.parametrize(
    ("border", "found"), [(1, 1), (3, 4), (8, 8), (9, 16), (40, 40), (41, 48), (200, 208), (129, 144)]
)
def test_the_smallest_cluster_is_found(border, found):
    clusters = []

    def ask(cluster):
        clusters.append(cluster)
        if cluster.world_size < border:
            raise NoFeasiblePlanError("too few devices")
        return cluster

    fit = smallest_cluster(ask, KIND, 2**14, lambda size, plan: None)
    assert fit.size == fit.plan.world_size == found
    assert [size for size, _ in fit.tried] == [cluster.world_size for cluster in clusters]
    assert all(cluster.devices_per_node == 8 or cluster.num_nodes == 1 for cluster in clusters)
    assert len(clusters) <= 12


def test_a_cluster_keeps_its_kind_or_none_is_large_enough():
    def ask(cluster):
        raise NoFeasiblePlanError(f"{cluster.world_size} devices are too few")

    with pytest.raises(NoFeasiblePlanError, match="64 devices are too few"):
        smallest_cluster(ask, KIND, 64, lambda size, plan: None)

    assert sized(KIND, 4) == replace(KIND, num_nodes=1, devices_per_node=4)
    assert sized(KIND, 64) == replace(KIND, num_nodes=8)
    assert sized(KIND, 64).device == KIND.device
