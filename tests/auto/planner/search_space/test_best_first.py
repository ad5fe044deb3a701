"""Pruning loses nothing: the best N under the estimate are exactly those of brute force, whatever model and machine."""

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.planner.best_first import best_first
from atorch.auto.planner.bounds import Bounds, num_legal
from atorch.auto.planner.candidate_table import CandidateTable, intricacy, least_intricacy, preferred
from atorch.auto.planner.space import Space, plannable
from atorch.auto.strategy import METHODS, Method, Phase, Strategy, method
from atorch.cluster.spec import ClusterSpec, LinkSpec
from atorch.cost import StepTimes, peak_memory, plain_cost, step_seconds
from atorch.cost.memory import CATEGORIES
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.errors import StrategyError

KEPT = {"parallel_mode", "ddp", "fsdp"}
OPTIONAL = sorted(set(METHODS) - KEPT)


@draw.composite
def jobs(pick):
    """A model, a cluster, a batch, and the methods that are left out."""
    heads = pick(draw.sampled_from([4, 8]))
    shape = TransformerShape(
        layers=pick(draw.integers(1, 9)), hidden=pick(draw.sampled_from([64, 512, 4096])), heads=heads,
        kv_heads=pick(draw.sampled_from([2, heads])), ffn=pick(draw.sampled_from([128, 2048, 8192])),
        vocab=pick(draw.sampled_from([100, 32000])), seq_len=pick(draw.sampled_from([16, 2048, 4096])), head_dim=64,
        tied=pick(draw.booleans()),
    )  # fmt: skip
    keep = Implementation(itemsize=4.0, flash_attention=pick(draw.booleans()))
    profile = transformer_profile(shape, 1, keep)
    known = pick(draw.sampled_from(["H100-80GB", "V100-16GB", "RTX4090"]))
    spec = ClusterSpec.load(f"{pick(draw.sampled_from(['1', '2', '4', '2x2']))}x{known}")
    link = LinkSpec(bandwidth=pick(draw.sampled_from([1e9, 1e11])), latency_s=pick(draw.sampled_from([1e-6, 1e-3])))
    spec = replace(spec, inter_node=link, host_memory_bytes=pick(draw.sampled_from([1e9, 1e12])))
    return (
        profile,
        spec,
        pick(draw.sampled_from([1, 4, 8, 12])),
        pick(draw.sets(draw.sampled_from(OPTIONAL), min_size=8)),
    )


def brute(space, start, spec):
    """`(methods, seconds, memory)` of every composition."""
    for leaf in space.leaves(space.root(start)):
        yield leaf.methods, step_seconds(leaf.cost, spec), peak_memory(leaf.cost)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(jobs(), draw.floats(0.05, 1.5), draw.sets(draw.sampled_from(OPTIONAL), max_size=2))
def test_the_best_are_those_of_brute_force(job, tightness, included):
    profile, spec, batch, excluded = job
    try:
        space = plannable(profile, spec, excluded=excluded, included=included - excluded)
    except StrategyError:  # two that exclude each other
        return
    start = plain_cost(profile, batch)
    every = list(brute(space, start, spec))
    if not every:
        return
    peaks = sorted(memory.needed for _, _, memory in every)
    device = peaks[min(len(peaks) - 1, int(tightness * len(peaks) / 2))]
    host = spec.host_memory_bytes / spec.devices_per_node
    fitting = sorted(seconds for _, seconds, held in every if held.needed <= device and held.on_host <= host)
    found = best_first(space, start, spec, device_bytes=device, host_bytes=host, keep=5).columns
    assert [found.step_s[row] for row in found.fastest(5)] == fitting[:5]
    assert len(found) == len(set(found.methods)) <= len(every)
    least = best_first(space, start, spec, device_bytes=device, host_bytes=host).columns
    assert [columns.step_s[row] for columns in (found, least) for row in columns.fastest(1)] == 2 * fitting[:1]
    if fitting:
        whole = CandidateTable(device, host)
        for each in every:
            whole.add(*each)
        chosen = preferred(whole)
        order = whole.intricacy(chosen), whole.step_s[chosen]
        for columns in (found, least):
            row = preferred(columns)
            assert (columns.intricacy(row), columns.step_s[row]) == order


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(jobs(), draw.floats(0.01, 0.99))
def test_where_nothing_fits_the_nearest_miss_is_found(job, share):
    profile, spec, batch, excluded = job
    space, start = plannable(profile, spec, excluded=excluded), plain_cost(profile, batch)
    every = list(brute(space, start, spec))
    if not every:
        return
    device = share * min(memory.needed for _, _, memory in every)
    found = best_first(space, start, spec, device_bytes=device).columns
    assert not found.fitting
    assert min(found.short_bytes) == found.least_short == min(memory.needed for _, _, memory in every) - device


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_no_composition_is_below_its_bounds(job):
    hold_bounds(*job)


def test_casts_of_many_micro_batches_are_no_bound():
    """Autocast's copies of weights, of as many micro-batches as are in flight: fewer where micro-batches are larger."""
    shape = TransformerShape(
        layers=9, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=100, seq_len=16, head_dim=64
    )  # fmt: skip
    profile, spec = transformer_profile(shape, 1, Implementation(itemsize=4.0)), ClusterSpec.load("4xH100-80GB")
    hold_bounds(profile, spec, 4, set(METHODS) - {"parallel_mode", "pipeline_parallel", "amp_native", "micro_batch"})


def hold_bounds(profile, spec, batch, excluded):
    """Without any room, without host memory, with all: every composition is in one part, and none is above it."""
    space, start = plannable(profile, spec, excluded=excluded), plain_cost(profile, batch)
    times = StepTimes(spec)
    for room in ((0, 0), (math.inf, 0), (math.inf, math.inf)):
        bounds = Bounds(space, times, *room)
        for node in space.descend(space.root(start), bounds.depth):
            scored = {
                each.methods: (times.of(each.cost).total_s, peak_memory(each.cost)) for each in space.leaves(node)
            }
            assert all(bounds.least_seconds(node) <= seconds for seconds, _ in scored.values())
            for part in bounds.parts(node):
                held = hold_part(part, node, space, scored, room)
                cuts = () if part.is_settled else bounds.cut(part)
                assert part.is_settled or held == set().union(
                    *(hold_part(each, node, space, scored, room) for each in cuts)
                )
                for methods in held:
                    del scored[methods]
            assert not scored


def hold_part(part, node, space, scored, room):
    held = {leaf.methods for leaf in space.leaves(node, part.only)}
    for methods in held:
        seconds, memory = scored[methods]
        short = max(memory.needed - room[0], memory.on_host - room[1])
        assert part.short_bytes <= max(0, short), methods
        assert part.seconds <= seconds, methods
        assert least_intricacy(node, part.only) <= intricacy(methods, on_host=memory.on_host > 0, is_narrow=False)
    return held


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(jobs(), draw.randoms())
def test_what_just_fits_is_in_a_part_that_may_fit_and_takes_no_less(job, chance):
    profile, spec, batch, excluded = job
    space, start = plannable(profile, spec, excluded=excluded), plain_cost(profile, batch)
    times, depth = StepTimes(spec), Bounds(space, StepTimes(spec), 0, 0).depth
    for node in itertools.islice(space.descend(space.root(start), depth), 20):
        leaves = list(space.leaves(node))
        for leaf in chance.sample(leaves, min(3, len(leaves))):
            memory = peak_memory(leaf.cost)
            bounds = Bounds(space, times, memory.needed, memory.on_host)
            parts = [each for each in bounds.parts(node) if has(space, node, each, leaf)]
            if not parts[0].is_settled:
                parts += [each for each in bounds.cut(parts[0]) if has(space, node, each, leaf)]
            assert len(parts) == 1 + (not parts[0].is_settled)
            assert all(each.short_bytes == 0.0 and each.seconds <= times.of(leaf.cost).total_s for each in parts)


def has(space, node, part, leaf):
    return leaf.methods in {each.methods for each in space.leaves(node, part.only)}


def small():
    shape = TransformerShape(
        layers=4, hidden=256, heads=8, kv_heads=8, ffn=512, vocab=1000, seq_len=2048, head_dim=32
    )  # fmt: skip
    return transformer_profile(shape, 1, Implementation(itemsize=4.0)), ClusterSpec.load("8xH100-80GB")


def test_much_is_left_unopened_and_breadth_opens_it():
    profile, spec = small()
    space, start = plannable(profile, spec), plain_cost(profile, 64)
    few = best_first(space, start, spec, device_bytes=spec.device.memory_bytes)
    more = best_first(space, start, spec, device_bytes=spec.device.memory_bytes, breadth=4 * len(few.columns))
    assert few.num_slow > 0
    assert few.gap == more.gap == 0
    assert len(more.columns.fitting) >= 4 * len(few.columns)
    assert min(few.columns.step_s) == min(more.columns.step_s)


def test_a_strangers_late_method_is_not_pruned_away():
    @method("stranger", phase=Phase.STEP)
    class Stranger(Method):
        def cost(self, cost):
            return replace(cost, extra_s=-1e-3)  # nothing that bounds could know of

        @classmethod
        def choices(cls, profile, cluster) -> Iterable["Stranger"]:
            yield cls()

    try:
        profile, spec = small()
        spec = replace(spec, devices_per_node=2)
        space, start = plannable(profile, spec, excluded=["compile", "chunk", "offload"]), plain_cost(profile, 8)
        found = best_first(space, start, spec).columns
        every = list(brute(space, start, spec))
        assert [found.step_s[row] for row in found.fastest(1)] == [min(seconds for _, seconds, _ in every)]
        assert all("stranger" in {each.name for each in found.methods[row]} for row in found.fastest(20))
    finally:
        METHODS.remove("stranger")


@pytest.mark.slow
def test_pareto_and_order():
    profile, spec = small()
    found = best_first(plannable(profile, spec), plain_cost(profile, 64), spec, device_bytes=5e8, breadth=500).columns
    front = found.pareto()
    assert len(front) > 1
    for before, after in pairwise(front):
        assert found.step_s[after] < found.step_s[before]
        assert found.peak_bytes[after] > found.peak_bytes[before]
    for row in found.fastest():
        assert any(
            found.step_s[each] <= found.step_s[row] and found.peak_bytes[each] <= found.peak_bytes[row]
            for each in front
        )
    held = [sum(row) for row in zip(*map(found.memory, range(len(CATEGORIES))), strict=True)]
    assert held == pytest.approx(list(found.peak_bytes))
    assert {why.split(":")[0] for why in found.why()} == {"", "memory"}


def listed_otherwise(space: Space, chance: random.Random) -> Space:
    """The same compositions, each level's choices in another order."""
    levels = [replace(each, choices=tuple(chance.sample(each.choices, len(each.choices)))) for each in space.levels]
    return Space(tuple(levels), space.world_size, space.unmet)


def test_a_loss_by_chunks_is_counted_only_where_nothing_is_split() -> None:
    """A pipeline with tensor parallelism has other continuations than one without."""
    shape = TransformerShape(layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=32000, seq_len=2048, head_dim=64)
    profile, spec = transformer_profile(shape, 1, Implementation(itemsize=4.0)), ClusterSpec.load("4xV100-16GB")
    some = {"cross_entropy", "pipeline_parallel", "tensor_parallel"}
    space, start = plannable(profile, spec, excluded=set(OPTIONAL) - some), plain_cost(profile, 1)
    assert num_legal(space, start) == sum(1 for _ in space.leaves(space.root(start)))


@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(jobs())
def test_as_many_are_counted_as_there_are(job) -> None:
    profile, spec, batch, excluded = job
    space, start = plannable(profile, spec, excluded=excluded), plain_cost(profile, batch, spec.device.memory_bytes)
    assert num_legal(space, start) == sum(1 for _ in space.leaves(space.root(start)))


@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
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
