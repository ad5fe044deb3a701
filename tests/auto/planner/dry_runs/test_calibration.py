"""What is kept of dry runs: whole or not at all, for this machine alone, and worth dry runs of the next search."""

import json
import math

import numpy as np
import pytest
import torch

from atorch.auto.planner.dry_runs.surrogate_model import DRIFT, Surrogate, tokens_of
from atorch.auto.planner.dry_runs.time_budget import KEPT, Calibration, Observation, Past, job_of
from atorch.auto.planner.dry_runs.trial import BatchCache
from atorch.auto.planner.planner import search, starting_point
from atorch.auto.strategy import Strategy
from tests.auto.planner.dry_runs.test_surrogate_model import made_up, scored
from tests.auto.planner.jobs import SLOW, cluster, context, net

VERSIONS = {"torch": "2", "atorch": "1"}
FEW = (*SLOW, "half", "amp_native", "zero2", "fsdp")


def ignore(progress):
    """Show nothing."""


def observation(methods=("a",), step_s=1.0, **changes):
    given = {"job": "job", "search": "search", "methods": frozenset(methods), "estimate_s": 1.0, "step_s": step_s}
    return Observation(**given | changes)


def calibration(path, world_size=1):
    return Calibration.of(path, cluster(world_size), VERSIONS)


def test_what_is_added_is_read_again_the_newest_counts_and_few_are_kept(tmp_path):
    kept = calibration(tmp_path / "deep" / "kept.json")
    assert kept.read() == ()
    first, second = observation("a", 1.0), observation("b", 2.0)
    kept.add([first, second])
    assert kept.read() == (first, second)
    again = observation("a", 3.0, search="later")
    kept.add([again, observation("a", 4.0, job="another")])
    assert kept.read() == (second, again, observation("a", 4.0, job="another"))
    assert [path.name for path in kept.path.parent.iterdir()] == ["kept.json"]

    kept = calibration(tmp_path / "kept.json")
    many = [observation([f"method {number}"]) for number in range(KEPT + 10)]
    kept.add(many)
    assert kept.read() == tuple(many[10:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff\xfe",
        lambda data: b"[]",
        lambda data: data.replace(b'"step_s": 1.0', b'"step_s": -1.0'),
        lambda data: data.replace(b'"step_s": 1.0', b'"step_s": "fast"'),
        lambda data: data.replace(b'"format": 1', b'"format": 2'),
    ],
)
def test_a_damaged_file_is_told_and_written_over(tmp_path, caplog, damage):
    kept = calibration(tmp_path / "kept.json")
    kept.add([observation()])
    broken = damage(kept.path.read_bytes())
    assert broken != kept.path.read_bytes()
    kept.path.write_bytes(broken)
    assert kept.read() == ()
    assert "kept.json is ignored, and a new one begun" in caplog.text
    kept.add([observation("b")])
    assert kept.read() == (observation("b"),)


def test_a_file_of_another_machine_is_told_and_written_over(tmp_path, caplog):
    path = tmp_path / "kept.json"
    calibration(path, world_size=2).add([observation()])
    assert calibration(path).read() == ()
    assert "another machine" in caplog.text
    calibration(path).add([observation("b")])
    assert calibration(path).read() == (observation("b"),)


def test_where_nothing_can_be_written_the_search_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    calibration(tmp_path / "file" / "kept.json").add([observation()])
    assert "no calibration is kept" in caplog.text


def test_each_machine_has_a_file_of_its_own_in_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = (Calibration.of(True, cluster(size), VERSIONS) for size in (1, 2))
    assert one.path != two.path
    assert (
        one.path == Calibration.of(True, cluster(1, memory_bytes=1.0), VERSIONS).path
    )  # what is free changes by the hour
    assert Calibration.of(False, cluster(), VERSIONS) is None


def test_a_job_is_its_model_and_its_batch():
    def job(ctx):
        return job_of(starting_point(ctx, BatchCache(ctx))[1])

    assert job(context()) == job(context())
    assert job(context()) != job(context(net(layers=4)))
    assert job(context()) != job(context(sample_batch=[torch.randn(6, 16), torch.randn(6, 4)]))


def observed(space, indices, truth, job, speed=1.0):
    return tuple(
        observation(
            tokens_of(space[i].strategy), speed * truth[i], job=job, estimate_s=space[i].estimate.step_s, search=job
        )
        for i in indices
    )


def test_a_job_that_ran_or_another_one_is_where_a_search_starts():
    for seed in range(8):
        space, _ = made_up(seed, wrong_by=0.5, together=0.15)
        candidates, truth = [each for each, _ in space], [seconds for _, seconds in space]
        order = sorted(range(len(space)), key=truth.__getitem__)
        ran = sorted({*order[:6], *range(18)})
        guide = Surrogate(candidates, Past("job", observed(candidates, ran, truth, "job", speed=1.2)), "cpu")
        assert int(guide.expected(np.zeros(1)).argmin()) in order[:3]

    candidates = [scored(methods, 1.0) for methods in ((), ("a",), ("b",), ("a", "b"))]
    earlier = observed(candidates, (0, 1, 2), (1.0, 2.0, 0.5), "another")
    guide = Surrogate(candidates, Past("job", earlier), "cpu")
    mean, deviation = guide.predictions
    assert int(np.argmin(mean)) == 2
    assert mean[1] > mean[3] > mean[2]
    assert 0 < mean[1] < math.log(2)  # not all of it carries over
    assert deviation.min() > 0.3

    then, now = [scored(("a",), 1.0)], [scored(("a",), 5.0), scored((), 5.0)]
    guide = Surrogate(now, Past("job", observed(then, (0,), (2.0,), "job")), "cpu")
    mean, deviation = guide.predictions
    assert mean[0] == pytest.approx(math.log(2.0), abs=0.1)
    assert DRIFT < deviation[0] < 1.5 * DRIFT + 0.1
    guide.observe(0, 2.2)
    assert guide.predictions[1][0] < 0.05


def searches(rank, size, path):
    """Two searches of one job: how much each ran, what it took, and of how many."""
    kept = calibration(path, size)
    plans = [search(context(), excluded=FEW, progress=ignore, calibration=kept) for _ in range(2)]
    return [(plan.num_dry_runs, str(plan.strategy), plan.num_compositions) for plan in plans]


@pytest.mark.nightly
def test_a_second_search_runs_less_and_all_ranks_agree(pool, tmp_path):
    path = str(tmp_path / "kept.json")
    one, two = pool.run(searches, path)
    assert one == two
    (cold, _, compositions), (warm, _, _) = one
    assert 3 < cold < compositions
    assert warm <= max(3, compositions // 4 - cold)
    data = json.loads((tmp_path / "kept.json").read_text())
    assert data["machine"]["devices_per_node"] == 2
    assert cold <= len(data["observations"]) <= cold + warm
    assert len({each["job"] for each in data["observations"]}) == 1


@pytest.mark.slow
def test_without_a_calibration_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fixed = Strategy.of(["checkpoint"])
    search(context(), fixed=fixed, progress=ignore)
    assert list(tmp_path.iterdir()) == []
    search(context(), fixed=fixed, progress=ignore, calibration=calibration(True))
    assert len(list((tmp_path / "atorch" / "calibration").iterdir())) == 1
