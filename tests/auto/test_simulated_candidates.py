"""What simulations may take of a machine: time and memory, and that a plan says what was left out for it."""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from atorch.auto.plan_for_cluster import plan_for, subject_of
from atorch.auto.simulated_candidates import Allowance, simulated
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.report.figures import simulations

CLUSTER = ClusterSpec.load("4xH100-80GB")
DDP = Strategy.of([("parallel_mode", [("data", 4)]), "ddp"])
TENSOR = Strategy.of([("parallel_mode", [("tensor", 4)]), "tensor_parallel"])


@pytest.fixture(scope="module")
def subject():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    return subject_of(
        model, torch.zeros(4, 32), CLUSTER, loss_func=lambda batch, output: output.sum(), optim_func=torch.optim.SGD
    )


def outcome(subject, strategy, allowance):
    (found,) = simulated(subject, [(strategy, 1.0)], 4, 16, allowance)
    return found


def test_what_is_allowed_is_simulated(subject):
    assert outcome(subject, DDP, Allowance())["peak_bytes"] > 0
    assert outcome(subject, DDP, Allowance(until=math.inf, real_bytes=0.0))["peak_bytes"] > 0, "of fakes alone"


def test_time_that_is_over_is_told(subject):
    assert "no time left" in outcome(subject, DDP, Allowance(until=time.monotonic() - 1))["why_not"]


def test_a_simulation_is_given_up_where_it_takes_too_long(subject, monkeypatch):
    began = time.monotonic()
    later = iter([began, began])  # asked before it begins, then by every operation
    monkeypatch.setattr("atorch.auto.simulated_candidates.time.monotonic", lambda: next(later, began + 100))
    assert "no time left" in outcome(subject, DDP, Allowance(until=began + 50))["why_not"]


def test_what_needs_a_real_copy_that_is_too_large_is_not_tried(subject):
    told = outcome(subject, TENSOR, Allowance(real_bytes=1000.0))["why_not"]
    assert "tensor_parallel would watch a few real blocks of the model at work, which takes" in told


def test_what_is_done_is_said(subject):
    from contextlib import nullcontext

    said = []
    plan_for(subject, CLUSTER, global_batch=16, verify=1, doing=lambda what: nullcontext(said.append(what)))
    assert said[0] == "searching for the best strategy"
    assert any(each.startswith("simulating ") for each in said[1:])


class Keeper(nn.Module):
    """Keeps what no trace of saved tensors tells: many times what it takes, until its next call."""

    def __init__(self, times):
        super().__init__()
        self.linear, self.times, self.kept = nn.Linear(64, 64), times, None

    def forward(self, x):
        self.kept = x.detach().repeat(self.times, 1)
        return torch.relu(self.linear(x))


def keeping(times):
    model = nn.Sequential(*(Keeper(times) for _ in range(8)))
    return subject_of(
        model, torch.zeros(4, 64), CLUSTER, loss_func=lambda batch, output: output.sum(), optim_func=torch.optim.SGD
    )


def small(memory_bytes):
    one = ClusterSpec.load("1xH100-80GB")
    return replace(one, device=replace(one.device, memory_bytes=memory_bytes))


def test_what_does_not_fit_by_its_simulation_is_not_chosen():
    subject, cluster = keeping(64), small(2**20)
    blind = plan_for(subject, cluster, global_batch=16, host_memory=False, verify=0)
    plan = plan_for(subject, cluster, global_batch=16, host_memory=False, verify=1)
    assert blind.simulated == ()
    assert not [note for note in blind.notes if "fused kernel" not in note]
    assert plan.strategy != blind.strategy
    assert plan.simulated[0]["fits"]
    assert plan.simulated[0]["needed_bytes"] <= plan.usable_bytes == blind.usable_bytes
    assert f"{blind.strategy}, simulated, needs" in plan.notes[0]
    assert "what is chosen in its place is estimated to need less" in plan.notes[0]


def test_where_nothing_fits_by_simulation_the_choice_stays_and_that_is_told():
    plan = plan_for(keeping(2**12), small(2**20), global_batch=8, host_memory=False, verify=1)
    assert not plan.simulated[0]["fits"]
    assert "nothing was found that fits" in plan.notes[-1]
    assert any("which does not fit" in line for line in simulations(plan.to_json_data()["simulated"]))
