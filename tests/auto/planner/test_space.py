"""What may be tried, and that folding over the tree scores it as each strategy alone would be."""

from dataclasses import replace

import pytest

from atorch.auto.opt_lib.amp_native import AmpNative
from atorch.auto.opt_lib.checkpoint import Checkpoint
from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.planner.candidate import Feed
from atorch.auto.planner.estimate import estimate_of, fold, score, split_by_memory
from atorch.auto.planner.planner import starting_point
from atorch.auto.planner.space import compositions
from atorch.auto.strategy import Strategy
from atorch.errors import StrategyError
from tests.auto.planner.jobs import cluster, context, net


@pytest.fixture(scope="module")
def start():
    ctx = context()
    return starting_point(ctx, Feed(ctx))


def names(space):
    return {strategy.names() for strategy in space.strategies}


def test_one_process_needs_no_mesh(start):
    space = compositions(start[0], cluster())
    assert () in names(space)
    assert not any({"parallel_mode", "ddp", "fsdp"} & set(each) for each in names(space))
    assert len(set(space.strategies)) == len(space.strategies)


def test_several_processes_have_a_mesh_and_a_data_parallel_method(start):
    space = compositions(start[0], cluster(2))
    data_parallel = {"ddp", "zero1", "zero2", "fsdp"}
    for each in names(space):
        assert "parallel_mode" in each
        assert len(data_parallel & set(each)) == 1
    assert {each for held in names(space) for each in held} >= data_parallel | {"amp_native", "half", "checkpoint"}


def test_fp16_and_batch_norm(start):
    space = compositions(start[0], cluster())
    assert not any(getattr(each, "dtype", "bf16") == "fp16" for strategy in space.strategies for each in strategy)
    assert not any("micro_batch" in each for each in names(space)), "statistics would be of smaller batches"


def test_what_the_hardware_lacks_is_named(start):
    unmet = {each.name: reason for each, reason in compositions(start[0], cluster()).unmet}
    assert "GPU" in unmet["fp8"]


def test_excluded_and_included(start):
    space = compositions(start[0], cluster(2), excluded=["compile", "half"], included=["zero1", "checkpoint"])
    assert all({"zero1", "checkpoint"} <= set(each) for each in names(space))
    assert not any({"compile", "half"} & set(each) for each in names(space))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"excluded": ["zero9"]}, "zero9"),
        ({"included": ["chekpoint"]}, "did you mean 'checkpoint'"),
        ({"excluded": ["ddp"], "included": ["ddp"]}, "both excluded and included"),
        ({"included": ["ddp", "fsdp"]}, "exclude each other"),
        ({"excluded": ["ddp", "zero1", "zero2", "fsdp"]}, "data_parallel"),
        ({"excluded": "ddp"}, "give a list"),
        ({"included": ["fp8"]}, "fp8 is included, but this machine cannot run it: fp8 needs a GPU"),
        ({"excluded": ["ddp"], "fixed": Strategy((Ddp(),))}, "ddp is excluded"),
        ({"included": ["fsdp"], "fixed": Strategy((Ddp(),))}, "keeps its methods"),
    ],
)
def test_what_does_not_hold(start, arguments, match):
    with pytest.raises(StrategyError, match=match):
        compositions(start[0], cluster(2), **arguments)


def test_fixed_keeps_methods_and_the_knobs_that_were_set(start):
    fixed = Strategy((ParallelMode(slices=(("data", 2),)), Ddp(bucket_cap_mb=3), AmpNative(), Checkpoint()))
    space = compositions(start[0], cluster(2), fixed=fixed)
    assert fixed in space.strategies
    assert names(space) == {("parallel_mode", "amp_native", "checkpoint", "ddp")}
    assert {strategy.get(AmpNative).dtype for strategy in space.strategies} == {"fp16", "bf16"}
    assert {strategy.get(Ddp).bucket_cap_mb for strategy in space.strategies} == {3}


def test_fixed_tries_nothing_that_contradicts_a_knob_that_was_set(start):
    profile = replace(start[0], module_classes=frozenset())  # without BatchNorm
    counts = compositions(profile, cluster(), fixed=Strategy((MicroBatch(),)))
    assert {strategy.get(MicroBatch).size for strategy in counts.strategies} >= {"auto", 1, 2, 4}
    fixed = Strategy((MicroBatch(size=4),))
    assert compositions(profile, cluster(), fixed=fixed).strategies == (fixed,)


def test_the_fold_is_each_strategy_by_itself(start):
    profile, cost = start
    strategies = compositions(profile, cluster(2)).strategies
    folded = dict(fold(strategies, cost))
    assert len(folded) == len(strategies) >= 24
    for strategy in strategies:
        assert folded[strategy] == strategy.cost(cost)


def test_ranking_is_by_estimated_seconds(start):
    profile, cost = start
    scored = score(compositions(profile, cluster(2)).strategies, cost, cluster(2))
    brute = sorted(estimate_of(each.strategy.cost(cost), cluster(2)).step_s for each in scored)
    assert [each.estimate.step_s for each in scored] == brute


def test_what_cannot_fit_says_what_takes_the_room(start):
    profile, cost = start
    scored = score(compositions(profile, cluster(2)).strategies, cost, cluster(2))
    sizes = sorted(each.estimate.peak_bytes for each in scored)
    small = cluster(2, memory_bytes=sizes[len(sizes) // 2] / 0.92)
    fitting, rejected = split_by_memory(scored, small)
    assert fitting
    assert len(fitting) + len(rejected) == len(scored)
    assert all("more than the usable" in each.reason for each in rejected)
    assert all(next(iter(each.estimate.memory)) in each.reason for each in rejected)


def test_sharding_saves_memory_where_there_are_many_blocks():
    ctx = context(net(layers=16))
    profile, cost = starting_point(ctx, Feed(ctx))
    plain = compositions(profile, cluster(2), excluded=["half", "amp_native", "compile"]).strategies
    peaks = {each.names(): estimate_of(folded, cluster(2)).peak_bytes for each, folded in fold(plain, cost)}
    ddp, zero1, zero2, fsdp = (peaks["parallel_mode", name] for name in ("ddp", "zero1", "zero2", "fsdp"))
    assert fsdp < min(zero1, zero2) <= max(zero1, zero2) < ddp
    assert peaks["parallel_mode", "checkpoint", "fsdp"] < peaks["parallel_mode", "fsdp"]
