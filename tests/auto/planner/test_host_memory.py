"""Plans that use host memory: jobs that were published fit with it and not without, and what fits plainly has none."""

import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.planner.cluster_search import answer
from atorch.auto.strategy import Strategy
from atorch.errors import NoFeasiblePlanError
from benchmarks.published.patrickstar import FOUR_NODES, SUPERPOD, YARD, best, estimate, fits, profile_of

JOBS = [("18B", YARD.cluster), ("68B", SUPERPOD.cluster)]
RECIPE = Strategy.of([("half", "fp16"), "checkpoint"])
ON_HOST = frozenset(("chunk", "offload"))


@pytest.mark.parametrize(
    ("model", "cluster"), [*JOBS, pytest.param("175B", FOUR_NODES.cluster, marks=pytest.mark.nightly)]
)
def test_published_jobs_fit_with_host_memory_and_not_without(model, cluster):
    """With eight samples a device: in chunks, and by what the planner finds."""
    plan = planned(model, cluster)
    assert ON_HOST & set(plan.strategy.names())
    assert plan.estimate.peak_bytes <= plan.usable_bytes
    with pytest.raises(NoFeasiblePlanError, match="nothing fits"):
        planned(model, cluster, excluded=ON_HOST)


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
