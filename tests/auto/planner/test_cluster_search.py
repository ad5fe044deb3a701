"""Answers for clusters: the choice, its neighbours, what does not fit, which objective, and published jobs."""

import json
from dataclasses import replace

import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods  # noqa: F401  registers the methods
from atorch.auto.opt_lib.fp8 import Fp8
from atorch.auto.planner.best_first import TIE
from atorch.auto.planner.cluster_search import WORTH, answer
from atorch.auto.planner.estimate import CLEAR, estimate_of
from atorch.auto.strategy import METHODS, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.distributed.mesh import AXES
from atorch.errors import ArgumentError, NoFeasiblePlanError, StrategyError
from benchmarks.published.patrickstar import FOUR_NODES, SUPERPOD, YARD, best, estimate, fits, profile_of


def llama(layers=16):
    shape = TransformerShape(
        layers=layers, hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000, seq_len=4096, head_dim=128
    )  # fmt: skip
    return transformer_profile(shape, 1, Implementation(itemsize=4.0))


CLUSTER = ClusterSpec.load("4xA100-40GB")


@pytest.fixture(scope="module")
def plan():
    return answer(llama(), CLUSTER, global_batch=16)


@pytest.mark.slow
def test_slower_links_between_leaves_make_no_plan_faster():
    plain = ClusterSpec.load("4x2xA100-40GB")
    alone = before = answer(llama(2), plain, global_batch=16, advise=False).estimate.step_s
    for bandwidth in (25e9, 1e8):
        leaves = replace(plain, nodes_per_leaf=2, inter_leaf=replace(plain.inter_node, bandwidth=bandwidth))
        now = answer(llama(2), leaves, global_batch=16, advise=False).estimate.step_s
        assert now >= before * (1 - TIE)
        before = max(now, before)
    assert before > 1.5 * alone


def test_the_choice_is_what_its_methods_cost(plan):
    start = replace(plain_cost(llama(), 16), device_bytes=CLUSTER.device.memory_bytes)
    unknown = dict.fromkeys(("low_s", "high_s", "low_bytes", "high_bytes", "high_needed_bytes"))
    assert estimate_of(plan.strategy.cost(start), CLUSTER) == replace(plan.estimate, **unknown)
    assert plan.estimate.low_s < plan.estimate.step_s < plan.estimate.high_s
    assert plan.estimate.peak_bytes <= plan.usable_bytes < plan.memory_bytes
    assert plan.estimate.low_bytes < plan.estimate.peak_bytes < plan.estimate.high_bytes
    assert plan.estimate.high_bytes < plan.estimate.high_needed_bytes
    assert plan.fits_narrowly == (plan.estimate.high_needed_bytes > plan.usable_bytes)
    assert plan.estimate.tokens_per_s == pytest.approx(16 * 4096 / plan.estimate.step_s)
    assert plan.ranking[0].strategy == plan.strategy
    chosen_s, *seconds = (each.estimate.step_s for each in plan.ranking)
    assert seconds == sorted(seconds)
    assert chosen_s <= (1 + TIE) * seconds[0]
    assert len({each.strategy.methods for each in plan.ranking}) == 20


def test_near_ties_and_counterfactuals_say_why(plan):
    assert plan.near_ties
    assert all(each.chance >= CLEAR for each in plan.near_ties)
    tied = {each.strategy for each in plan.near_ties}
    assert all((each.chance >= CLEAR) == (each.strategy in tied) for each in plan.ranking[1:])
    sizes = [len(each.strategy) for each in plan.near_ties]
    assert sizes == sorted(sizes)
    assert plan.strategy not in [each.strategy for each in plan.near_ties]
    assert len(plan.strategy) <= sizes[0], "of what the estimate cannot tell apart the simplest is chosen"

    told = {each.change: each for each in plan.counterfactuals}
    assert all(each.what in {*AXES, *METHODS} for each in plan.counterfactuals)
    assert any(change.startswith(("tensor", "pipeline", "sequence")) for change in told)
    assert any(change.startswith("without") or "instead of" in change for change in told)
    for each in plan.counterfactuals:
        assert each.reason
        assert each.ratio is None or each.ratio >= 1 / (1 + TIE) - 1e-9, "nothing that fits is faster but for a tie"
        assert (each.ratio is None) == ("needs" in each.reason)


def test_every_scored_composition_has_its_bytes_and_what_binds(plan):
    data = json.loads(json.dumps(plan.to_json_data(), allow_nan=False))
    candidates = data["candidates"]
    assert {len(candidates[name]) for name in ("step_s", "peak_bytes", "label", "why")} == {plan.num_compositions}
    assert len(set(candidates["label"])) == plan.num_compositions
    for row in range(0, plan.num_compositions, 97):
        held = sum(values[row] for values in candidates["memory"].values())
        assert held == pytest.approx(candidates["peak_bytes"][row], rel=1e-3)
        # What the allocator cannot use is needed, too.
        is_large = candidates["peak_bytes"][row] > data["usable_bytes"]
        assert candidates["why"][row] or not is_large
        assert is_large or not candidates["why"][row] or 1.1 * candidates["peak_bytes"][row] > data["usable_bytes"]
    assert {each["why"] for each in data["rejected"]} >= {"memory", "slower"}
    assert all(sum(counts.values()) == plan.num_compositions for counts in data["counts_by_axis"].values())
    assert any(len(counts) > 1 for counts in data["counts_by_axis"].values())
    assert data["nearest_miss"] is None
    assert ClusterSpec.of_json_data(data["cluster"]) == CLUSTER


def test_a_search_that_ends_early_says_what_it_may_have_missed(monkeypatch):
    plan = answer(llama(), CLUSTER, global_batch=16, host_memory=True)
    assert not ON_HOST & names_of(plan), "it saves too little"
    assert plan.gap == 0.0, "proven"
    monkeypatch.setattr("atorch.auto.planner.cluster_search.MOST", 1)
    hasty = answer(llama(), CLUSTER, global_batch=16, host_memory=True)
    assert 1 <= hasty.num_compositions < plan.num_compositions
    assert hasty.gap > 0
    fastest = min(each.estimate.step_s for each in plan.ranking)
    assert min(each.estimate.step_s for each in hasty.ranking) * (1 - hasty.gap) <= fastest
    proven = answer(llama(), CLUSTER, global_batch=16, prove=True, host_memory=True)
    assert proven.gap == 0.0
    assert proven.estimate == plan.estimate


def test_a_reserve_is_kept_free():
    plan = answer(llama(), CLUSTER, global_batch=16, reserve=0.5)
    assert plan.estimate.peak_bytes <= plan.usable_bytes == CLUSTER.device.memory_bytes / 2


def test_methods_are_fixed_extended_included_and_excluded():
    plan = answer(llama(4), CLUSTER, global_batch=16, fixed=Strategy.of(["fsdp", ("amp_native", "bf16")]))
    assert names_of(plan) == {"parallel_mode", "fsdp", "amp_native"}, "several processes need a mesh"
    assert names_of(answer(llama(4), CLUSTER, global_batch=16, fixed=Strategy.of([]))) == {"parallel_mode", "ddp"}
    alone = replace(CLUSTER, devices_per_node=1, num_nodes=1)
    assert names_of(answer(llama(4), alone, global_batch=16, fixed=Strategy.of(["checkpoint"]))) == {"checkpoint"}
    with pytest.raises(StrategyError, match="fixed and extend are both given"):
        answer(llama(4), CLUSTER, global_batch=16, fixed=Strategy.of(["fsdp"]), extend=Strategy.of(["fsdp"]))

    extend = Strategy.of([("parallel_mode", [("tensor", 2), ("data", 2)])])
    plan = answer(
        llama(), CLUSTER, global_batch=16, extend=extend, included=["checkpoint"], excluded=["compile", "half"]
    )
    assert {"parallel_mode", "tensor_parallel", "checkpoint"} <= set(plan.strategy.names())
    assert not {"compile", "half"} & set(plan.strategy.names())
    assert dict(plan.strategy[0].slices) == {"tensor": 2, "data": 2}

    assert "fp8" in answer(llama(4), H100, global_batch=16, included=["fp8"], precision="fp32").strategy.names()

    extend = Strategy.of([("amp_native", "bf16"), "chunk"])
    plan = answer(llama(4), H100, global_batch=16, extend=extend, precision="fp8")
    assert {"amp_native", "chunk"} <= set(plan.strategy.names())
    assert "fp8" not in plan.strategy.names(), "chunks move what fp8 keeps scales of"


def test_fewest_devices_and_cost():
    least = answer(llama(), CLUSTER, global_batch=16, objective="fewest_devices")
    assert least.cluster.world_size == 1, "it fits on one"
    assert not least.estimate.on_host_bytes
    cheap = answer(llama(), CLUSTER, global_batch=16, objective="cost")
    whole = answer(llama(), CLUSTER, global_batch=16, objective="throughput")
    spent = [each.estimate.step_s * each.cluster.world_size for each in (cheap, least, whole)]
    assert spent[0] <= 1.03 * min(spent), "of a tie the simplest is chosen"

    (choice,) = Fp8.choices(llama(4), H100)
    assert choice.exclude == ("head",)
    assert not choice.cost(plain_cost(llama(4))).fp8_outside


def test_what_does_not_hold():
    with pytest.raises(ArgumentError, match="did you mean 'step_time'"):
        answer(llama(), CLUSTER, global_batch=16, objective="steptime")
    with pytest.raises(StrategyError, match="give a list"):
        answer(llama(), CLUSTER, global_batch=16, excluded="ddp")
    extend = Strategy.of([("parallel_mode", [("tensor", 3)])])
    with pytest.raises(StrategyError, match=r"no legal composition is left: .*tensor 3 does not divide"):
        answer(llama(), replace(CLUSTER, devices_per_node=3), global_batch=16, extend=extend)

    splits = ["tensor_parallel", "sequence_parallel", "context_parallel", "pipeline_parallel"]
    with pytest.raises(StrategyError, match="7 samples are not shared out evenly over 4 processes") as told:
        answer(llama(), CLUSTER, global_batch=7, excluded=splits)
    assert "host memory" not in str(told.value)


def test_a_job_that_fits_nowhere_names_the_nearest_miss_and_remedies_that_work():
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=1e9))
    excluded = ["offload", "chunk", "sequence_parallel", "context_parallel", "pipeline_parallel"]
    with pytest.raises(
        NoFeasiblePlanError, match=r"nothing fits on 4 × .*nearest miss, parallel_mode.* is .* short of the "
    ) as no:
        answer(llama(), small, global_batch=16, excluded=excluded)
    (miss,) = no.value.rejected
    needed = miss["estimate"]["peak_bytes"] + miss["estimate"]["reserve_bytes"]
    assert miss["short_bytes"] == pytest.approx(needed - 0.95e9)
    assert 1 <= len(miss["remedies"]) <= 3
    for remedy in miss["remedies"]:
        assert remedy in str(no.value)
    devices = [remedy for remedy in miss["remedies"] if "of these devices" in remedy]
    for remedy in devices:
        nodes = int(remedy.split()[1]) // 4
        assert answer(llama(), replace(small, num_nodes=nodes), global_batch=16, excluded=excluded, keep=1)


METHODS_OF = {"fp32": set(), "autocast": {"amp_native"}, "half": {"half"}, "fp8": {"half", "fp8"}}
LESS_EXACT = {"amp_native", "half", "fp8"}
H100 = ClusterSpec.load("8xH100-80GB")


def names_of(plan):
    return {method.name for methods in plan.candidates.methods for method in methods}


@pytest.mark.parametrize("precision", ["fp32", "autocast", "half", "fp8"])
def test_numbers_are_no_less_exact_than_is_allowed(precision):
    given = {} if precision == "half" else {"precision": precision}  # the default
    plan = answer(llama(4), H100, global_batch=16, **given)
    allowed = METHODS_OF[precision]
    assert LESS_EXACT & set(plan.strategy.names()) == allowed, "the least exact are fastest here"
    assert LESS_EXACT & names_of(plan) <= allowed | ({"amp_native"} if allowed else set())


ON_HOST = {"offload", "chunk"}


def test_host_memory_is_used_where_it_is_allowed_or_nothing_fits_without(plan):
    for name, batch in (("1xA100-80GB", 1), ("8xH100-80GB", 32)):
        roomy = answer(llama(), ClusterSpec.load(name), global_batch=batch, advise=False)
        assert not ON_HOST & set(roomy.strategy.names())

    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=5e9))
    few = {"global_batch": 4, "excluded": ["tensor_parallel", "sequence_parallel", "context_parallel"]}
    assert not ON_HOST & names_of(plan)
    needed = answer(llama(), small, **few)
    assert answer(llama(), small, **few, host_memory=True).strategy == needed.strategy
    assert ON_HOST & set(needed.strategy.names())
    assert needed.estimate.on_host_bytes > 0
    told = "allow host memory (host_memory=True, --host-memory)"
    with pytest.raises(NoFeasiblePlanError) as no:
        answer(llama(), small, **few, host_memory=False)
    assert told in str(no.value)
    with pytest.raises(NoFeasiblePlanError, match="nothing fits"):
        answer(llama(), replace(small, host_memory_bytes=1e8), **few, advise=False)
    included = answer(llama(), CLUSTER, global_batch=16, host_memory=False, included=["offload"])
    assert "offload" in included.strategy.names()


@pytest.mark.parametrize(("name", "value"), [("precision", "bf16"), ("precision", None), ("host_memory", "no")])
def test_what_is_allowed_is_one_of_a_few_words(name, value):
    with pytest.raises(ArgumentError, match=f"{name} is {value!r}"):
        answer(llama(), CLUSTER, global_batch=16, **{name: value})


SLOW_METHODS = (
    "micro_batch", "zero1", "zero2", "chunk", "compile", "pipeline_parallel", "tensor_parallel", "sequence_parallel",
)  # fmt: skip


def with_and_without(link):
    """With host memory and without, on devices that would recompute where activations cannot wait on the host."""
    cluster = ClusterSpec.load("2xA100-40GB")
    cluster = replace(cluster, host_link=replace(cluster.host_link, bandwidth=link), host=None)
    return [
        answer(llama(), cluster, global_batch=16, excluded=(*SLOW_METHODS, "context_parallel"), host_memory=allowed)
        for allowed in (True, False)
    ]


def test_what_saves_more_than_the_estimate_may_be_wrong_is_taken(monkeypatch):
    with_host, without = with_and_without(link=1e12)
    assert with_host.estimate.on_host_bytes > 0
    saved = without.estimate.step_s / with_host.estimate.step_s
    assert saved > 1 + WORTH, "nothing is recomputed, which takes a quarter of the time"
    monkeypatch.setattr("atorch.auto.planner.cluster_search.WORTH", 1.01 * (saved - 1))
    with_host, without = with_and_without(link=1e12)
    assert with_host.estimate.on_host_bytes == 0
    assert with_host.strategy == without.strategy


JOBS = [("18B", YARD.cluster), ("68B", SUPERPOD.cluster)]
RECIPE = Strategy.of([("half", "fp16"), "checkpoint"])
HOST_METHODS = frozenset(("chunk", "offload"))


@pytest.mark.parametrize(
    ("model", "cluster"), [*JOBS, pytest.param("175B", FOUR_NODES.cluster, marks=pytest.mark.nightly)]
)
def test_published_jobs_fit_with_host_memory_and_not_without(model, cluster):
    """With eight samples a device: in chunks, and by what the planner finds."""
    plan = planned(model, cluster)
    assert HOST_METHODS & set(plan.strategy.names())
    assert plan.estimate.peak_bytes <= plan.usable_bytes
    with pytest.raises(NoFeasiblePlanError, match="nothing fits"):
        planned(model, cluster, excluded=HOST_METHODS)


def planned(model, cluster, excluded=()):
    batch = 8 * cluster.world_size
    return answer(profile_of(model), cluster, global_batch=batch, extend=RECIPE, excluded=excluded, advise=False)


def test_published_jobs_fit_in_chunks_and_larger_ones_do_not():
    for model, cluster in (*JOBS, ("175B", FOUR_NODES.cluster)):
        found = estimate(model, cluster, batch=8)
        assert fits(found, cluster)
        assert found.on_host_bytes > 0, "device memory alone would not do"
    assert best("18B", YARD.cluster) is not None
    assert not fits(estimate("40B", YARD.cluster, batch=4), YARD.cluster)
