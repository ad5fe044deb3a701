"""Fits find the constants that made the times, as far as runs tell, and no run leads them far astray."""

from dataclasses import replace

import numpy as np
import pytest

from atorch.cluster.spec import ClusterSpec
from atorch.cost import plain_cost, step_seconds
from atorch.cost.transformer import TransformerShape, transformer_profile
from benchmarks.published.fit import TimedRun, drawn, fitted, gauss_newton, with_constants

CLUSTER = ClusterSpec.load("8xH100-80GB")
PLACE = "device.efficiency.matmul"


def costs(count):
    """Steps of models that are more and more bound by their products."""
    for index in range(count):
        hidden = 2048 + 1024 * index
        shape = TransformerShape(
            layers=4, hidden=hidden, heads=16, kv_heads=16, ffn=4 * hidden, vocab=32000, seq_len=2048, head_dim=128
        )
        yield replace(plain_cost(transformer_profile(shape, 4)), dtype="bfloat16")


def runs(count, **factors):
    machine = with_constants(CLUSTER, {PLACE: 1.0, **factors})
    return [TimedRun(f"run {i}", cost, CLUSTER, step_seconds(cost, machine)) for i, cost in enumerate(costs(count))]


def test_a_constant_is_found_from_the_times_it_made():
    found = fitted(runs(6, **{PLACE: 0.8}), {PLACE: 1.0})
    assert found == {PLACE: pytest.approx(0.8, rel=0.01)}

    tight, wide = (fitted(runs(1, **{PLACE: 0.7}), {PLACE: width})[PLACE] for width in (0.02, 1.0))
    assert 0.7 < wide < 0.75 < tight < 1.0

    table = runs(6)
    table[0] = table[0]._replace(seconds=20 * table[0].seconds)
    assert fitted(table, {PLACE: 0.2})[PLACE] == pytest.approx(1.0, abs=0.05)

    assert fitted([]) == {}


def test_runs_are_drawn_by_name_and_constants_multiplied():
    table = runs(8)
    few = [run.name for run in drawn(table, 3)]
    assert few == [run.name for run in drawn(table[::-1], 3)]
    assert len(set(few)) == 3

    moved = with_constants(CLUSTER, {PLACE: 10.0, "inter_node.latency_s": 2.0, "inter_node.efficiency": 0.5})
    assert moved.device.efficiency.matmul == 1.0
    assert moved.inter_node.latency_s == 2 * CLUSTER.inter_node.latency_s
    assert moved.inter_node.efficiency == CLUSTER.inter_node.efficiency / 2
    assert with_constants(CLUSTER, {}) == CLUSTER


def test_gauss_newton_finds_the_minimum_of_a_curve():
    """Rosenbrock's valley, whose minimum is at (1, 1), as a sum of squares."""
    found = gauss_newton(lambda x: np.asarray([10 * (x[1] - x[0] ** 2), 1 - x[0]]), 2)
    assert found == pytest.approx([1, 1], abs=1e-2)
