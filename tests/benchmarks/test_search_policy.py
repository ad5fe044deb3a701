"""Searches on drawn machines, in short: the policy keeps what the long form of the benchmark measures."""

import json
import statistics
from pathlib import Path

import pytest

from atorch.cost.uncertainty import KINDS
from benchmarks import search_policy
from benchmarks.search_policy import Machine, Searched, llama

SMALL = {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "vocab": 32000, "seq": 1024, "batch": 8}


@pytest.fixture(scope="module")
def job() -> Searched:
    return llama({**SMALL, "cluster": "1xA100-80GB"})


@pytest.mark.parametrize("limit", [30.0, None])
def test_what_is_chosen_is_near_the_best_of_what_runs(job: Searched, limit: float | None) -> None:
    found = [Machine.drawn(job, seed).searched(limit, seed) for seed in range(8)]
    first = statistics.mean(each["first_by_estimate_regret"] for each in found)
    assert statistics.mean(each["regret"] for each in found) <= max(0.06, first + 0.02)
    assert statistics.mean(each["runs"] for each in found) <= 9


def test_machines_without_errors_of_the_estimate_take_the_estimated_steps(job: Searched) -> None:
    estimates = [scored.estimate.step_s for scored in job.candidates]
    assert job.steps(dict.fromkeys(KINDS, 1.0)) == pytest.approx(estimates)


def test_a_quick_host_makes_offloading_no_quicker_than_computing(job: Searched) -> None:
    steps = job.steps({**dict.fromkeys(KINDS, 1.0), "host": 1e-3})
    slow = job.steps({**dict.fromkeys(KINDS, 1.0), "host": 2.0})
    offloads = [index for index, scored in enumerate(job.candidates) if "chunk" in scored.strategy.names()]
    assert any(slow[index] > 1.1 * steps[index] for index in offloads)
    assert steps.min() > 0.9 * min(scored.estimate.step_s for scored in job.candidates)


def test_a_limit_holds_to_within_a_start(job: Searched) -> None:
    for seed in range(4):
        machine = Machine.drawn(job, seed)
        machine.failures = {}
        assert machine.searched(30.0, seed)["seconds"] <= 30.0 + max(machine.start_s)


def test_a_slow_baseline_is_no_toll(job: Searched) -> None:
    """What is certainly ten times slower is not run first, nor taken."""
    machine = Machine.drawn(job, 0)
    machine.failures = {}
    plain = next(index for index, each in enumerate(job.candidates) if not each.strategy.methods)
    ran = []
    trial = machine.trial
    machine.trial = lambda strategy, limit_s: ran.append(strategy) or trial(strategy, limit_s)  # type: ignore[assignment,func-returns-value]
    machine.searched(60.0, 0)
    assert ran
    assert job.candidates[plain].strategy not in ran


def test_the_replay_chooses_near_the_best_that_was_measured() -> None:
    for row in search_policy.replay([60.0, 100.0, None, 600.0]):
        assert row["regret"] <= 0.05, row


def test_other_jobs_are_taken_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps([{**SMALL, "cluster": "2xH100-80GB"}]))
    given = ["--jobs", str(tmp_path / "jobs.json"), "--seeds", "3:5", "--limits", "60", "--json", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["search_policy.py", *given])
    search_policy.main()
    found = json.loads((tmp_path / "out").read_text())
    assert [each["seed"] for each in found] == [3, 4]
    expected = {"job", "limit", "seed", "regret", "runs", "seconds", "chosen", "first_by_estimate_regret"}
    assert all(set(each) == expected for each in found)


@pytest.mark.parametrize("limit", [12.0, 60.0, None])
def test_nothing_that_is_slower_than_a_cheap_baseline_is_chosen(limit: float | None) -> None:
    """On machines where every method makes a step slower, whatever the estimate says; compilers take 40 s."""
    job = llama({**SMALL, "layers": 1, "hidden": 64, "ffn": 128, "vocab": 256, "seq": 32, "cluster": "1xcpu"})
    plain = next(index for index, each in enumerate(job.candidates) if not each.strategy.methods)
    for seed in range(4):
        machine = Machine.drawn(job, seed)
        machine.failures = {}
        machine.step_s = [
            machine.step_s[plain] * (1.0 if index == plain else 1.4) for index in range(len(job.candidates))
        ]
        machine.start_s = [40.0 if "compile" in each.strategy.names() else 0.2 for each in job.candidates]
        assert machine.searched(limit, seed)["chosen"] == "plain"
