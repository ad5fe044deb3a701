"""The jobs of the examples have answers on machines without a GPU, whatever kind of model they are of."""

import pytest

from atorch.auto.plan_for_cluster import plan_for
from atorch.auto.planner.plan import ClusterPlan
from atorch.auto.planner.request import PlanRequest
from atorch.auto.sources import source_of
from atorch.cluster.spec import ClusterSpec
from tests.house.source import ROOT

JOBS = (
    ("plan_llama.py:llama_8b", "8xH100-80GB", 64, 8.03e9),
    ("plan_llama.py:job", "16x8xH100-80GB", 1024, 70.6e9),
    ("plan_llama.py:llama_405b", "128x8xH100-80GB", 1024, 405.9e9),
    ("plan_models.py:mixtral", "2x8xH100-80GB", 128, 46.7e9),
    ("plan_models.py:t5", "8xA100-80GB", 256, 11.3e9),
    ("plan_models.py:vit", "8xA100-40GB", 4096, 0.632e9),
    ("plan_models.py:resnet", "8xV100-16GB", 2048, 25.6e6),
)
LARGE = ("plan_llama.py:job", "plan_llama.py:llama_405b")  # as llama_8b, but for their sizes
FEW = ("sequence_parallel", "context_parallel", "chunk", "offload", "module_replace", "fp8")
"""Methods that are left out so that the tests are quick."""


def planned(named: str, cluster: str, batch: int) -> tuple[float, ClusterPlan]:
    """The model's parameters, and the plan."""
    spec = ClusterSpec.load(cluster)
    subject = source_of(str(ROOT / "examples" / named), None, {}, PlanRequest()).subject(None, spec)
    return subject.profile.num_params, plan_for(subject, spec, global_batch=batch, excluded=FEW, verify=0)


@pytest.mark.parametrize(
    ("named", "cluster", "batch", "num_params"),
    [pytest.param(*job, id=job[0], marks=pytest.mark.nightly if job[0] in LARGE else []) for job in JOBS],
)
def test_a_job_has_an_answer(named: str, cluster: str, batch: int, num_params: float) -> None:
    counted, plan = planned(named, cluster, batch)
    assert counted == pytest.approx(num_params, rel=0.01)
    assert 0 < plan.estimate.peak_bytes <= plan.usable_bytes
    assert plan.estimate.step_s > 0
    assert sum(plan.estimate.time.values()) == pytest.approx(plan.estimate.step_s)
    assert sum(plan.estimate.memory.values()) >= plan.estimate.peak_bytes * (1 - 1e-9)
    assert plan.ranking[0].strategy == plan.strategy
    assert not set(FEW) & set(plan.strategy.names())
