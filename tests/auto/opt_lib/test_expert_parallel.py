"""expert_parallel: a plan may have it, says so, and nothing applies it."""

from dataclasses import replace

import pytest

from atorch import auto_accelerate
from atorch.auto.opt_lib.expert_parallel import ExpertParallel
from atorch.auto.plan_for_cluster import plan_for, subject_of
from atorch.auto.planner.space import compositions
from atorch.auto.strategy import METHODS, Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost
from atorch.cost.transformer import Experts, TransformerShape, transformer_profile
from atorch.errors import CapabilityError, NoFeasiblePlanError, StrategyError
from tests.contract.job import arguments, make_model

CLUSTER = ClusterSpec.load("2x8xH100-80GB")
SHAPE = TransformerShape(
    layers=8, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=4096, vocab=32000, seq_len=2048,
    experts=Experts(count=16, top_k=2, ffn=4096),
)  # fmt: skip
PROFILE = transformer_profile(SHAPE)


def planned(**knobs):
    return plan_for(subject_of(PROFILE, None, CLUSTER), CLUSTER, global_batch=16, verify=0, **knobs)


def test_by_default_a_plan_can_be_applied_and_tells_what_experts_would_gain():
    plain, split = planned(), planned(included=["expert_parallel"])
    assert "expert_parallel" not in plain.strategy.names()
    size = split.strategy.get(ExpertParallel).size
    assert split.estimate.step_s < plain.estimate.step_s
    assert f"expert_parallel(size={size})" in plain.notes[-1]
    assert "only for plans, a step would take" in plain.notes[-1]
    assert split.notes[-1].startswith(
        "expert_parallel is only for plans: atorch cannot apply it yet; the best that it can: "
    )
    assert str(plain.strategy) in split.notes[-1]
    assert not [note for note in planned(excluded=["expert_parallel"]).notes if "expert" in note]


def test_a_given_size_is_kept():
    strategy = Strategy.of([("expert_parallel", {"size": 4})])
    assert planned(extend=strategy).strategy.get(ExpertParallel).size == 4
    with pytest.raises(StrategyError, match="over 5 does not divide 16 experts"):
        planned(extend=Strategy.of([("expert_parallel", {"size": 5})]))


@pytest.mark.parametrize(
    ("size", "axes", "splits_norms", "told"),
    [
        (8, {"data": 16}, False, None),
        (16, {"tensor": 2, "data": 8}, True, None),
        (8, {"tensor": 2, "data": 8}, False, "needs tokens split over tensor"),
        (2, {"tensor": 4, "data": 4}, True, "into groups of all tensor ranks"),
        (16, {"data": 8, "pipeline": 2}, False, "does not divide 8 replicas"),
        (8, {"context": 4, "data": 4}, False, None),
        (1, {"data": 16}, False, "over 1 does not divide"),
        (3, {"data": 16}, False, "over 3 does not divide 16 experts"),
    ],
)
def test_it_divides_experts_and_replicas(size, axes, splits_norms, told):
    cost = plain_cost(PROFILE, 16).replace(axes=axes, splits_norms=splits_norms)
    reason = ExpertParallel(size=size).unfit(cost)
    assert reason is None if told is None else told in reason


def test_a_model_without_experts_is_refused():
    dense = transformer_profile(replace(SHAPE, experts=None))
    assert ExpertParallel(size=2).unfit(plain_cost(dense, 16)) == (
        "expert_parallel divides experts, and the model has none"
    )
    with pytest.raises(StrategyError, match="the model has none"):
        plan_for(subject_of(dense, None, CLUSTER), CLUSTER, included=["expert_parallel"], verify=0)


def test_nothing_applies_it():
    told = "only for plans: .* Leave it out, which leaves checkpoint; or train with Megatron-LM or torchtitan"
    with pytest.raises(StrategyError, match=told):
        auto_accelerate(make_model(), load_strategy=["checkpoint", ("expert_parallel", {"size": 2})], **arguments())
    with pytest.raises(CapabilityError, match="plan with it for a cluster"):
        compositions(PROFILE, CLUSTER, included=["expert_parallel"])
    with pytest.raises(CapabilityError, match="expert_parallel is only for plans"):
        compositions(PROFILE, CLUSTER, fixed=Strategy.of([("expert_parallel", {"size": 2})]))


def test_what_fits_with_it_alone_is_a_remedy():
    few = [name for name in METHODS if name not in ("parallel_mode", "ddp", "expert_parallel", "checkpoint")]
    deep = transformer_profile(replace(SHAPE, layers=24))
    with pytest.raises(
        NoFeasiblePlanError, match="train with a program that has expert_parallel, which is only for plans"
    ):
        plan_for(subject_of(deep, None, CLUSTER), CLUSTER, global_batch=16, verify=0, excluded=few, host_memory=False)
