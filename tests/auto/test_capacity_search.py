"""The border of what fits is found, with as many questions as doubling and halving take, and is that of brute force."""

from dataclasses import replace

import pytest

import atorch
from atorch.auto.plan_for_cluster import plan_for
from atorch.auto.planner.request import PlanRequest
from atorch.auto.solve import largest, sized, smallest_cluster
from atorch.auto.sources import catalogue_of
from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError, NoFeasiblePlanError

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


SMALL = "EleutherAI/pythia-160m"
FEW = (
    "tensor_parallel",
    "sequence_parallel",
    "context_parallel",
    "pipeline_parallel",
    "chunk",
    "micro_batch",
    "compile",
)


def fits(**more):
    try:
        return atorch.plan(SMALL, cluster="1xT4", excluded=FEW, dtype="fp16", host_memory=False, verify=0, **more)
    except NoFeasiblePlanError:
        return None


@pytest.mark.parametrize("max_step", [None, "2s"])
@pytest.mark.parametrize(
    ("what", "fixed", "given"),
    [
        ("batch", {"seq": 1024}, lambda size: {"global_batch": size}),
        ("seq", {"global_batch": 4, "seq": 1024}, lambda size: {"seq": size}),
        ("rank", {"seq": 1024, "global_batch": 16}, lambda size: {"lora": size}),
    ],
)
def test_the_size_that_is_found_is_that_of_brute_force_within_an_eighth(what, fixed, given, max_step):
    found = fits(solve=what, max_step=max_step, **fixed)
    size = found.solved["size"]
    assert max_step is None or found.estimate.step_s <= 2
    assert fits(max_step=max_step, **{**fixed, **given(size)}).strategy == found.strategy
    beyond = [size + max(1, size * eighth // 8) for eighth in range(1, 9)]
    if found.solved["is_bounded"]:
        assert not any(fits(max_step=max_step, **{**fixed, **given(each)}) for each in beyond)
        assert "does not" in found.solved["words"]


def test_the_default_length_is_told_once(caplog):
    with caplog.at_level("WARNING", "atorch"):
        found = atorch.plan("Qwen/Qwen3-0.6B", cluster="1xA100-80GB", solve="rank", max_step="1s")
    assert len(found.solved["tried"]) > 1
    assert caplog.text.count("--seq is not given") == 1


def test_the_fewest_devices_take_at_most_the_longest_step():
    job = {"cluster": "8xL4", "global_batch": 64, "seq": 1024, "excluded": FEW, "host_memory": False}
    found = atorch.plan(SMALL, solve="devices", max_step="1s", **job)
    assert found.estimate.step_s <= 1
    assert found.cluster.world_size == found.solved["size"]
    with pytest.raises(NoFeasiblePlanError, match="takes at most 1 s a step; the fastest, .*, takes .*What would make"):
        atorch.plan(SMALL, max_step=1.0, verify=0, **{**job, "cluster": f"{found.solved['size'] // 2}xL4"})
    with pytest.raises(NoFeasiblePlanError, match="nothing fits in 1 µs a step"):
        atorch.plan(SMALL, solve="batch", max_step=1e-6, seq=1024, cluster="1xL4")


def test_the_largest_model_is_that_of_brute_force():
    cluster, request = ClusterSpec.load("1xT4"), PlanRequest(lora=8, dtype="fp16", host_memory=False, verify=0)
    found = atorch.plan(None, cluster="1xT4", solve="model", seq=1024, lora=8, dtype="fp16")

    def step(subject):
        try:
            return plan_for(subject, cluster, request=request, advise=False).estimate.step_s
        except NoFeasiblePlanError:
            return None

    models = catalogue_of(request, 1024, cluster)
    steps = {name: step(subject) for name, subject in models}
    fitting = {name: subject.profile.num_params for name, subject in models if steps[name]}
    assert found.solved["size"] == max(fitting.values()) == fitting[found.solved["model"]]
    assert all(row["step_s"] == steps[row["model"]] for row in found.solved["tried"])


@pytest.mark.parametrize(
    ("model", "knobs", "told"),
    [
        (SMALL, {"solve": "model"}, "only solve 'model' takes None"),
        (None, {"solve": "batch"}, "only solve 'model' takes None"),
        (SMALL, {"solve": "batches"}, "did you mean 'batch'"),
        (SMALL, {"solve": "devices"}, "give --batch"),
        (SMALL, {"max_step": "fast"}, "max_step is 'fast'"),
        (lambda: None, {"solve": "rank", "sample_batch": 1}, "lora cannot be given for a model of your own"),
        (lambda: None, {"solve": "seq", "sample_batch": 1}, "let a model of your own have a parameter seq"),
    ],
)
def test_what_cannot_be_solved(model, knobs, told):
    with pytest.raises(ArgumentError, match=told):
        atorch.plan(model, cluster="8xL4", **knobs)
