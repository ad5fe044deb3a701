"""How far off an estimate may be: shares of kinds of work, and what bands and differences follow from them."""

import math
from dataclasses import replace

import pytest

from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost, step_time
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.cost.uncertainty import HIGH, KINDS, LOW, OWN, SIGMA, SLOWER, Uncertainty

CLUSTER = ClusterSpec.load("2x8xH100-80GB")


def cost(*methods, hidden=4096):
    shape = TransformerShape(
        layers=8, hidden=hidden, heads=32, kv_heads=8, ffn=4 * hidden, vocab=32000, seq_len=4096, head_dim=128
    )  # fmt: skip
    profile = transformer_profile(shape, 1, Implementation(itemsize=4.0))
    start = plain_cost(profile, 64, CLUSTER.device.memory_bytes)
    return Strategy.of([*methods, "half"]).cost(start)


SHARDED = cost(("parallel_mode", [("data", 16)]), "fsdp")
SPLIT = cost(("parallel_mode", [("tensor", 16)]), "tensor_parallel")
PIPED = cost(
    ("parallel_mode", [("data", 8), ("pipeline", 2)]), "pipeline_parallel", "fsdp", ("micro_batch", {"count": 4})
)


def shares(of, cluster=CLUSTER):
    return dict(zip(KINDS, Uncertainty(cluster).shares(of), strict=True))


def test_shares_of_a_step_are_what_it_takes_longer():
    plain = shares(SHARDED)
    alone = step_time(SHARDED, CLUSTER)
    assert plain["products"] + plain["attention"] == pytest.approx(alone.matmul_s / alone.total_s, abs=0.05)
    assert 0.9 <= sum(plain.values()) - plain["common"] <= 1.1
    assert plain["splits"] == plain["pipeline"] == plain["host"] == 0.0
    assert plain["common"] == 1.0


def test_links_count_for_who_sends_over_them():
    split, piped = shares(SPLIT), shares(PIPED)
    assert split["splits"] > 0.3 > split["sharding"]
    assert piped["pipeline"] > step_time(PIPED, CLUSTER).bubble_s / step_time(PIPED, CLUSTER).total_s
    assert piped["splits"] == 0.0


def test_what_waits_on_the_host_is_of_the_host():
    waiting = cost(("parallel_mode", [("data", 16)]), "fsdp", ("offload", {"optimizer": 1.0}))
    assert shares(waiting)["host"] > 0.1


def test_quicker_work_has_no_share_where_it_is_hidden():
    slower = shares(SHARDED)
    quicker = dict(zip(KINDS, Uncertainty(CLUSTER, slower=1 / SLOWER).shares(SHARDED), strict=True))
    exposed = step_time(SHARDED, CLUSTER)
    assert quicker["sharding"] <= exposed.exposed_comm_s / exposed.total_s + 1e-9
    assert quicker["products"] <= slower["products"] + 0.05


def test_the_variance_is_a_sum_over_kinds():
    found = Uncertainty(CLUSTER)
    some = found.shares(SPLIT)
    by_hand = math.hypot(OWN, *(SIGMA[kind] * share for kind, share in zip(KINDS, some, strict=True)))
    assert found.spread(some) == pytest.approx(by_hand)
    assert found.band(10.0, some) == pytest.approx((10 * math.exp(LOW * by_hand), 10 * math.exp(HIGH * by_hand)))


def test_what_is_known_less_well_is_expected_to_take_longer():
    found = Uncertainty(CLUSTER)
    sharded, split = found.shares(SHARDED), found.shares(SPLIT)
    assert found.expected(10.0, split) > found.expected(10.0, sharded) > 10.0


def test_plans_differ_by_the_kinds_of_which_they_have_different_shares():
    found = Uncertainty(CLUSTER)
    sharded, split = found.shares(SHARDED), found.shares(SPLIT)
    assert found.of_difference(sharded, sharded) == pytest.approx(OWN * math.sqrt(2))
    assert found.of_difference(sharded, split) == found.of_difference(split, sharded)
    apart = math.hypot(OWN * math.sqrt(2), *(found.of_kind(kind, sharded, split) for kind in KINDS))
    assert found.of_difference(sharded, split) == pytest.approx(apart)


def test_a_cluster_that_knows_better_has_narrower_bands_of_what_it_knows():
    covariance = {one: {other: SIGMA[one] ** 2 * (one == other) for other in KINDS} for one in KINDS}
    for kind in ("products", "common"):
        covariance[kind][kind] = 1e-4
    known, as_published = Uncertainty(replace(CLUSTER, uncertainty=covariance)), Uncertainty(CLUSTER)
    sharded, split = known.shares(SHARDED), known.shares(SPLIT)
    assert known.spread(sharded) < 0.75 * as_published.spread(sharded)
    assert known.spread(split) / as_published.spread(split) > known.spread(sharded) / as_published.spread(sharded)
