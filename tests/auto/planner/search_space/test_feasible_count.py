"""The number of legal compositions is that of brute force, and the choice does not follow from the order of listing."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from atorch.auto.planner.estimate.candidate_table import preferred
from atorch.auto.planner.search_space.best_first import best_first
from atorch.auto.planner.search_space.bounds import num_legal
from atorch.auto.planner.search_space.space import Space, plannable
from atorch.auto.strategy import Strategy
from atorch.cost import plain_cost
from tests.auto.planner.search_space.test_best_first import jobs


def listed_otherwise(space: Space, chance: random.Random) -> Space:
    """The same compositions, each level's choices in another order."""
    levels = [replace(each, choices=tuple(chance.sample(each.choices, len(each.choices)))) for each in space.levels]
    return Space(tuple(levels), space.world_size, space.unmet)


@settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs())
def test_as_many_are_counted_as_there_are(job) -> None:
    profile, spec, batch, excluded = job
    space, start = plannable(profile, spec, excluded=excluded), plain_cost(profile, batch, spec.device.memory_bytes)
    assert num_legal(space, start) == sum(1 for _ in space.leaves(space.root(start)))


@settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs(), draw.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_follow_from_the_order_of_listing(job, chance) -> None:
    profile, spec, batch, excluded = job
    space, start = plannable(profile, spec, excluded=excluded), plain_cost(profile, batch)
    told = []
    for each in (space, listed_otherwise(space, chance)):
        columns = best_first(each, start, spec, device_bytes=spec.device.memory_bytes, keep=5).columns
        rows = columns.fastest(5)
        told.append([str(Strategy(columns.methods[row])) for row in ([preferred(columns)] if rows else []) + rows])
    assert told[0] == told[1]
