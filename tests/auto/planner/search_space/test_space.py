"""What may be tried, and that folding over the tree scores it as each strategy alone would be."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.job import make_context
from atorch.auto.opt_lib.amp_native import AmpNative
from atorch.auto.opt_lib.checkpoint import ActivationCheckpoint
from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.opt_lib.shared.defaults import disagreement
from atorch.auto.planner.dry_runs.trial import BatchCache
from atorch.auto.planner.estimate import estimate_of
from atorch.auto.planner.planner import starting_point
from atorch.auto.planner.ranking import SearchLimits, ranked
from atorch.auto.planner.request import less_exact as less_exact_names
from atorch.auto.planner.space import compositions, plannable
from atorch.auto.strategy import METHODS, PRECISIONS, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import peak_memory, plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.distributed.world import World
from atorch.errors import StrategyError
from tests.auto.planner.drawn import Drawn
from tests.auto.planner.drawn import strategies as strategies_of
from tests.auto.planner.jobs import cluster, context, net
from tests.contract.job import Tokens, make_model
from tests.language_models import gpt2


@pytest.fixture(scope="module")
def start():
    ctx = context()
    return starting_point(ctx, BatchCache(ctx))


def strategies(space, cost):
    return [Strategy(leaf.methods) for leaf in space.leaves(space.root(cost))]


def names(space, cost):
    return {strategy.names() for strategy in strategies(space, cost)}


def test_what_may_be_tried_on_one_process_and_on_two(start):
    found = strategies(compositions(start[0], cluster()), start[1])
    assert Strategy() in found
    assert not any({"parallel_mode", "ddp", "fsdp"} & set(each.names()) for each in found)
    assert len(set(found)) == len(found)

    found = strategies(compositions(start[0], cluster()), start[1])
    assert not any(getattr(each, "dtype", "bf16") == "fp16" for strategy in found for each in strategy)
    assert not any("micro_batch" in each.names() for each in found), "statistics would be of smaller batches"

    found = names(compositions(start[0], cluster(2)), start[1])
    data_parallel = {"ddp", "zero1", "zero2", "fsdp"}
    for each in found:
        assert "parallel_mode" in each
        parts = {"tensor_parallel", "pipeline_parallel"} & set(each)
        assert len(data_parallel & set(each)) == (0 if parts else 1), "two processes have equal parameters, or parts"
    assert {each for held in found for each in held} >= data_parallel | {"amp_native", "half", "checkpoint"}

    unmet = {each.name: reason for each, reason in compositions(start[0], cluster()).unmet}
    assert "GPU" in unmet["fp8"]


def test_what_is_excluded_included_or_fixed(start):
    space = compositions(start[0], cluster(2), excluded=["compile", "half"], included=["zero1", "checkpoint"])
    found = names(space, start[1])
    assert found
    assert all({"zero1", "checkpoint"} <= set(each) for each in found)
    assert not any({"compile", "half"} & set(each) for each in found)

    assert all("half" in each for each in names(compositions(start[0], cluster(), included=["half"], precision="fp32"),
                                                start[1]))  # fmt: skip
    fixed = plannable(start[0], cluster(), extend=Strategy.of([("half", "bf16")]), precision="fp32")
    assert all("half" in each for each in names(fixed, start[1]))

    fixed = Strategy((ParallelMode(slices=(("data", 2),)), Ddp(bucket_cap_mb=3), AmpNative(), ActivationCheckpoint()))
    found = strategies(compositions(start[0], cluster(2), fixed=fixed), start[1])
    assert fixed in found
    assert {each.names() for each in found} == {("parallel_mode", "amp_native", "checkpoint", "ddp")}
    assert {strategy.get(AmpNative).dtype for strategy in found} == {"fp16", "bf16"}
    assert {strategy.get(Ddp).bucket_cap_mb for strategy in found} == {3}

    profile = replace(start[0], module_classes=frozenset())  # without BatchNorm
    space = compositions(profile, cluster(), fixed=Strategy((MicroBatch(),)))
    assert {strategy.get(MicroBatch).size for strategy in strategies(space, start[1])} == {"auto", 2, 4}
    short = start[1].replace(device_bytes=peak_memory(start[1]).total)  # so that memory is worth time
    assert {strategy.get(MicroBatch).size for strategy in strategies(space, short)} == {"auto", 1, 2, 4}
    fixed = Strategy((MicroBatch(size=4),))
    assert strategies(compositions(profile, cluster(), fixed=fixed), start[1]) == [fixed]


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
        ({"excluded": ["ddp"], "fixed": Strategy((Ddp(),))}, "ddp is both excluded and given"),
        ({"included": ["fsdp"], "fixed": Strategy((Ddp(),))}, "keeps its methods"),
    ],
)
def test_what_does_not_hold(start, arguments, match):
    with pytest.raises(StrategyError, match=match):
        compositions(start[0], cluster(2), **arguments)


@pytest.mark.parametrize(
    ("precision", "less_exact"),
    [("fp32", {"amp_native", "half", "fp8"}), ("autocast", {"half", "fp8"}), ("half", {"fp8"}), ("fp8", set())],
)
def test_numbers_are_as_exact_as_asked_for(start, precision, less_exact):
    assert {name for name in METHODS if name in less_exact_names(precision)} == less_exact
    for space in (
        compositions(start[0], cluster(), precision=precision),
        plannable(start[0], cluster(), precision=precision),
    ):
        held = {name for each in names(space, start[1]) for name in each}
        assert not held & less_exact
        assert held >= {"amp_native", "half"} - less_exact


def llama(**changes):
    shape = {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 512, "vocab": 1000, "seq_len": 4096}
    return transformer_profile(
        TransformerShape(**{**shape, "head_dim": 32, **changes}), 1, Implementation(itemsize=4.0)
    )


@pytest.mark.parametrize(
    "name", ["1xA100-80GB", pytest.param("2x1xA100-80GB", marks=pytest.mark.nightly), "2xA100-80GB"]
)
def test_the_tree_has_what_is_legal_among_all_products(name):
    profile, spec = llama(), ClusterSpec.load(name)
    some = ["half", "compile", "offload", "checkpoint", "zero1", "zero2"]
    space, cost = plannable(profile, spec, excluded=some), plain_cost(profile, 8)
    slots = {}
    for level in space.levels:
        slots.setdefault(level.kind.slot, [None]).extend(choice.method for choice in level.choices)
    legal = set()
    for chosen in itertools.product(*slots.values()):
        strategy, folded, fits = Strategy(tuple(filter(None, chosen))), cost, True
        for each in strategy:
            fits = fits and each.unfit(folded) is None
            folded = each.cost(folded) if fits else folded
        has_mesh = spec.world_size == 1 or "parallel_mode" in strategy.names()
        if fits and has_mesh and disagreement(strategy.methods, folded.axes) is None:
            legal.add(strategy)
    assert set(strategies(space, cost)) == legal
    assert len(legal) > 20 * spec.world_size


def test_a_method_is_left_as_soon_as_the_one_that_it_completes_cannot_come():
    profile, spec = llama(), ClusterSpec.load("4xA100-80GB")
    space = plannable(profile, spec)
    depth = 1 + next(at for at, level in enumerate(space.levels) if level.kind.name == "tensor_parallel")
    found = list(space.descend(space.root(plain_cost(profile, 8)), depth))
    completing = [node for node in found if any("tensor_parallel" in each.needs for each in node.methods)]
    assert completing
    assert all("tensor_parallel" in {each.name for each in node.methods} for node in completing)
    assert any("which is not there" in reason for reason in space.refused)


def test_parts_can_be_fixed_for_a_plan():
    profile, spec = llama(), ClusterSpec.load("4xA100-80GB")
    mesh = Strategy.of([("parallel_mode", [("tensor", 2), ("data", 2)]), "ddp"])
    found = strategies(plannable(profile, spec, extend=mesh), plain_cost(profile, 8))
    assert found
    assert all(set(mesh) <= set(each) and "tensor_parallel" in each for each in found)
    assert len({each.names() for each in found}) > 5
    with pytest.raises(StrategyError, match="both excluded and given"):
        plannable(profile, spec, fixed=mesh, excluded=["ddp"])
    with pytest.raises(StrategyError, match="ddp and fsdp are both given, but exclude each other"):
        plannable(profile, spec, extend=mesh, included=["fsdp"])
    with pytest.raises(StrategyError, match="fsdp is included, but the given strategy keeps its methods"):
        plannable(profile, spec, fixed=mesh, included=["fsdp"])


def make_gpt2():
    """Its Linear layers are Conv1D, but for the head's."""
    return gpt2(layers=4, bos_token_id=1, eos_token_id=2)


@pytest.mark.parametrize("make", [make_gpt2, make_model], ids=["gpt2", "llama"])
def test_what_may_be_tried_is_not_refused_before_it_runs(make):
    """Walks down the tree for 8 GPUs, through all that these and their packages can run."""
    machine = ClusterSpec.load("8xH100-80GB")
    world = World(rank=0, size=8, local_rank=0, device=torch.device("cpu"))
    job = make_context(
        make(), torch.optim.AdamW, Tokens(64), lambda batch, output: output.loss, model_input_format="unpack_dict",
        dataloader_args={"batch_size": 64}, world=world, cluster=machine,
    )  # fmt: skip
    profile, _ = starting_point(job, BatchCache(job))
    drawn = Drawn(profile, machine, 64, compositions(profile, machine))
    found = {Strategy(each.methods) for each in strategies_of(random.Random(0), drawn, 250)}
    assert {"compile", "pipeline_parallel", "checkpoint"} <= {name for each in found for name in each.names()}
    for each in found:
        each.check(job)


def test_the_fold_is_each_strategy_by_itself(start):
    profile, cost = start
    space = compositions(profile, cluster(2))
    leaves = list(space.leaves(space.root(cost)))
    assert len(leaves) >= 24
    for leaf in leaves:
        assert leaf.methods == Strategy(leaf.methods).methods, "in the order in which they apply"
        assert leaf.cost == Strategy(leaf.methods).cost(cost)
        assert space.follow(leaf.methods[::-1], cost).cost == leaf.cost
    assert space.follow((Ddp(),), cost) is None, "without a mesh"

    ctx = context(net(layers=16))
    profile, cost = starting_point(ctx, BatchCache(ctx))
    space = compositions(profile, cluster(2), excluded=["half", "amp_native", "compile"])
    peaks = {
        str(Strategy(leaf.methods[1:])): estimate_of(leaf.cost, cluster(2)).peak_bytes
        for leaf in space.leaves(space.root(cost))
    }
    ddp, zero1, zero2, fsdp = (peaks[name] for name in ("ddp", "zero1", "zero2", "fsdp"))
    assert fsdp < min(zero1, zero2) <= max(zero1, zero2) < ddp
    assert peaks["checkpoint + fsdp"] < peaks["fsdp"]


def score(profile, cost, machine=None):
    return ranked(profile, cost, machine or cluster(2), SearchLimits(), PRECISIONS[-1])


def test_ranking_is_by_estimates_that_add_up(start):
    profile, cost = start
    found = score(profile, cost).fitting
    brute = sorted(estimate_of(each.strategy.cost(cost), cluster(2)).step_s for each in found)
    assert [each.estimate.step_s for each in found] == brute

    profile, cost = start
    for each in score(profile, cost).fitting:
        assert sum(each.estimate.time.values()) == pytest.approx(each.estimate.step_s)
        assert sum(each.estimate.memory.values()) == pytest.approx(each.estimate.peak_bytes)
        assert each.estimate.samples_per_s == pytest.approx(8 / each.estimate.step_s)

    profile, cost = start
    found = score(profile, cost).fitting
    sizes = sorted(each.estimate.needed_bytes for each in found)
    small = cluster(2, memory_bytes=sizes[len(sizes) // 2] / 0.95)
    ranking = score(profile, cost, small)
    rejected = [each for each in ranking.rejected if each.why == "memory"]
    assert ranking.fitting
    assert rejected
    assert ranking.num_compositions == len(found)
    assert all(" short of the " in each.reason for each in rejected)
    assert all(next(iter(each.estimate.memory)) in each.reason for each in rejected)
