"""A few runs of one's own bring a cluster's constants nearer to what made them, and a single one does not run away."""

import math
from dataclasses import replace
from functools import cache

import pytest

from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost, step_seconds
from atorch.cost.transformer import Implementation, TransformerShape, transformer_profile
from atorch.cost.uncertainty import KINDS, OWN, Uncertainty
from atorch.profiler.curve_fit import TimedRun, calibrated

SHIPPED = ClusterSpec.load("8xH100-80GB")


def slower(matmul=1.0, traffic=1.0, links=1.0):
    """A machine that reaches other shares than the file says."""
    shares = SHIPPED.device.efficiency
    shares = replace(shares, matmul=shares.matmul * matmul, traffic=shares.traffic * traffic)
    return replace(
        SHIPPED,
        device=replace(SHIPPED.device, efficiency=shares),
        intra_node=replace(SHIPPED.intra_node, efficiency=SHIPPED.intra_node.efficiency * links),
    )


def runs_on(true):
    """Steps of several models and splits as long as they take on a machine."""
    runs = []
    for hidden, split in ((2048, 1), (4096, 1), (4096, 2), (8192, 4), (2048, 8)):
        shape = TransformerShape(
            layers=8, hidden=hidden, heads=32, kv_heads=8, ffn=4 * hidden, vocab=32000, seq_len=4096,
            head_dim=hidden // 32,
        )  # fmt: skip
        mesh = [("tensor", split), ("data", 8 // split)] if split > 1 else [("data", 8)]
        methods = [("parallel_mode", (mesh, None)), ("half", "bf16"), *(["tensor_parallel"] if split > 1 else [])]
        strategy = Strategy.of([*methods, *(["zero2"] if split < 8 else [])])
        start = plain_cost(transformer_profile(shape, implementation=Implementation(itemsize=4.0)), 16)
        cost = strategy.cost(start)
        runs.append(TimedRun(str(strategy), cost, SHIPPED, step_seconds(cost, true)))
    return runs


def width(band):
    """A band's factor from one end to the other, as a logarithm."""
    return math.log(band[1] / band[0])


def shared(uncertainty, shares):
    return math.sqrt(uncertainty.spread(shares) ** 2 - OWN**2)


@cache
def fitted(true):
    """The constants fitted to the runs of a machine, which several tests look at."""
    return calibrated(SHIPPED, runs_on(true))


SLOW = slower(matmul=0.75)


@pytest.mark.parametrize("true", [SLOW, slower(links=0.4), slower(0.85, 0.8, 0.7)])
def test_the_estimates_come_nearer_to_the_runs(true):
    found = fitted(true)
    assert found.error_before > 0.04
    assert found.error_after < 0.6 * found.error_before


def test_what_runs_have_told_is_known_better_and_the_rest_is_not():
    told = fitted(SLOW)
    low, high = told.band_after
    assert told.band_before[0] < low < 1 < high < told.band_before[1]
    assert width(told.band_after) < 0.7 * width(told.band_before)
    before, after = Uncertainty(SHIPPED), Uncertainty(told.cluster)
    one = {kind: float(kind in ("products", "common")) for kind in KINDS}
    alone, host = tuple(one.values()), tuple((one | {"products": 0.0, "host": 1.0}).values())
    assert shared(after, alone) < 0.6 * shared(before, alone)
    assert shared(after, host) > 0.9 * shared(before, host)

    found = fitted(SLOW)
    assert 0.7 < found.factors["device.efficiency.matmul"] < 0.85
    said = found.cluster.source_of("device.efficiency.matmul")
    assert said.startswith("fitted by atorch calibrate on 5 runs, whose median error fell from")
    assert SHIPPED.source_of("device.efficiency.matmul") in said
    assert found.cluster.source_of("inter_node.efficiency") == SHIPPED.source_of("inter_node.efficiency")
    assert found.cluster.inter_node == SHIPPED.inter_node
    assert ClusterSpec.of_json_data(found.cluster.to_json_data()) == found.cluster


def test_strange_runs_do_not_run_away_with_constants():
    runs = [run._replace(seconds=run.seconds * (0.5 + place % 2)) for place, run in enumerate(runs_on(SHIPPED))]
    steady, wild = fitted(SHIPPED), calibrated(SHIPPED, runs)
    assert width(wild.band_after) > 1.5 * width(steady.band_after)

    runs = runs_on(SHIPPED)
    runs[0] = runs[0]._replace(seconds=20 * runs[0].seconds)
    found = calibrated(SHIPPED, runs)
    assert all(0.6 < factor < 1.7 for factor in found.factors.values())
    assert found.error_after < 0.1

    found = calibrated(SHIPPED, runs_on(slower(links=2.0)))
    assert found.cluster.intra_node.efficiency <= 1.0

    found = fitted(SHIPPED)
    assert replace(found.cluster, uncertainty={}) == SHIPPED
    assert found.factors == {}
