"""What waits on the host is taken where it is told to save more than the estimate may be wrong."""

from dataclasses import replace

import pytest

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.planner.cluster_search import WORTH, answer
from atorch.cluster.spec import ClusterSpec
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile

SHAPE = TransformerShape(
    layers=16, hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000, seq_len=4096, head_dim=128
)  # fmt: skip
PROFILE = transformer_profile(SHAPE, 1, Implementation(itemsize=4.0))
SLOW = (
    "micro_batch", "zero1", "zero2", "chunk", "compile", "pipeline_parallel", "tensor_parallel", "sequence_parallel",
)  # fmt: skip


def plans(link):
    """With host memory and without, on devices that would recompute where activations cannot wait on the host."""
    cluster = ClusterSpec.load("2xA100-40GB")
    cluster = replace(cluster, host_link=replace(cluster.host_link, bandwidth=link), host=None)
    return [
        answer(PROFILE, cluster, global_batch=16, excluded=(*SLOW, "context_parallel"), host_memory=allowed)
        for allowed in (True, False)
    ]


def test_what_saves_more_than_the_estimate_may_be_wrong_is_taken(monkeypatch):
    with_host, without = plans(link=1e12)
    assert with_host.estimate.on_host_bytes > 0
    saved = without.estimate.step_s / with_host.estimate.step_s
    assert saved > 1 + WORTH, "nothing is recomputed, which takes a quarter of the time"
    monkeypatch.setattr("atorch.auto.planner.cluster_search.WORTH", 1.01 * (saved - 1))
    with_host, without = plans(link=1e12)
    assert with_host.estimate.on_host_bytes == 0
    assert with_host.strategy == without.strategy


@pytest.mark.parametrize("allowed", [None, True])
def test_405b_on_1024_keeps_no_activations_on_the_host(allowed):
    whole = TransformerShape(
        layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq_len=8192, head_dim=128
    )  # fmt: skip
    profile = transformer_profile(whole, 1, Implementation(itemsize=4.0))
    splits = ("context_parallel", "sequence_parallel", "zero1", "zero2", "chunk")  # a smaller space: seconds
    cluster = ClusterSpec.load("128x8xH100-80GB")
    plan = answer(profile, cluster, global_batch=1024, host_memory=allowed, excluded=splits, advise=False)
    assert plan.estimate.on_host_bytes == 0
