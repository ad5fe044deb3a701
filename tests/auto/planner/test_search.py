"""Searches on one process and on two: what they find, what they survive, and what they leave as it was."""

import ctypes
import json
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.planner.dry_runs import trial as trials
from atorch.auto.planner.dry_runs.dry_run_loop import MAX_CONTENDERS, MAX_RUNS, relative_time
from atorch.auto.planner.dry_runs.fault_barrier import Coordinator
from atorch.auto.planner.dry_runs.step_timing import measure
from atorch.auto.planner.dry_runs.trial import BatchCache, Trial, candidate
from atorch.auto.planner.estimate import RESERVE
from atorch.auto.planner.planner import dry_run, search, starting_point
from atorch.auto.planner.ranking import SearchLimits, ranked
from atorch.auto.reference_step import ReferenceStep
from atorch.auto.strategy import Strategy
from atorch.errors import ArgumentError, NoFeasiblePlanError, StrategyError
from atorch.model.pytree import local_part, tensor_bytes
from tests.auto.planner.jobs import SLOW, cluster, context, net, sabotage


def ignore(progress):
    """Show nothing."""


FEW = (*SLOW, "fsdp", "zero2", "checkpoint", "half")  # methods that are left out for a small space


def find(ctx, **arguments):
    return search(ctx, **{"excluded": SLOW, "progress": ignore, **arguments})


def snapshot(model):
    """Everything of a model that a search could have changed."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return (
        [(name, tensor.detach().clone(), tensor.grad) for name, tensor in tensors],
        [(name, type(module), len(module._forward_hooks), module.training) for name, module in model.named_modules()],
    )


def assert_same(before, after):
    assert before[1] == after[1]
    for (name, old, grad), (new_name, new, new_grad) in zip(before[0], after[0], strict=True):
        assert name == new_name
        assert torch.equal(old, new), name
        assert grad is new_grad is None


def test_a_search_chooses_what_ran_fastest_and_leaves_all_as_it_was():
    model = net()
    before = snapshot(model)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    ctx, seen = context(model), []
    torch.set_rng_state(states[0])
    plan = find(ctx, progress=seen.append)
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert plan.measured is not None
    assert plan.baseline.expected_s >= 0.99 * plan.measured.step_s
    assert plan.num_dry_runs == len(seen) <= MAX_RUNS + MAX_CONTENDERS
    assert len(plan.rejected) == plan.num_compositions - 1 + sum(each.why == "hardware" for each in plan.rejected)
    assert all(each.reason for each in plan.rejected)
    shares = [each for each in plan.rejected if re.search(r"\d(%|×)", each.reason)]
    assert shares
    for each in shares:  # all are of the chosen one's step, whether measured or expected
        known = each.measured or each.estimate
        assert relative_time(known.step_s / plan.measured.step_s) in each.reason
    data = json.loads(json.dumps(plan.to_json_data(), allow_nan=False))
    assert data["measured"]["memory_kind"] == "resident set growth"
    assert seen[-1].best_s is not None


def test_numbers_are_no_less_exact_than_allowed():
    out = [*SLOW, "micro_batch", "checkpoint", "module_replace"]
    for arguments in ({}, {"precision": "fp32"}, {"precision": "half"}):
        plan = find(context(), excluded=out, time_limit=1e-3, **arguments)
        tried = {name for each in (plan, *plan.rejected) for name in each.strategy.names()}
        assert ("half" in tried) == (arguments.get("precision") == "half")
        assert ("amp_native" in tried) == (arguments.get("precision") != "fp32")
        assert plan.to_json_data()["numbers"]
    included = find(context(), excluded=out, included=["half"], time_limit=1e-3)
    assert "bf16" in included.numbers
    assert not [note for note in included.notes[1:] if "fused" not in note]


def test_less_exact_numbers_come_in_where_nothing_else_fits():
    ctx = context(nn.Sequential(*(nn.Tanh() for _ in range(200)), nn.Linear(16, 4)))  # autocast leaves them in fp32
    out = [*SLOW, "micro_batch", "checkpoint", "module_replace"]
    every = ranked(*starting_point(ctx, BatchCache(ctx)), ctx.cluster, SearchLimits(excluded=out), "half").fitting
    exact = min(each.estimate.peak_bytes for each in every if "half" not in each.strategy)
    room = replace(ctx, cluster=cluster(memory_bytes=(exact - 1) / (1 - RESERVE)))
    plan = find(room, excluded=out, time_limit=1e-3)
    assert "half" in plan.strategy.names()
    assert any("nothing more exact than half fits" in each for each in plan.notes)
    with pytest.raises(NoFeasiblePlanError, match="precision='autocast'"):
        find(room, excluded=out, precision="autocast")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"included": ["fsdp"]}, "fsdp has no axis of several processes .* [Ll]eave out some of what is included"),
        ({"included": ["zero1", "checkpoint"]}, "zero1 has no axis of several processes"),
        ({"included": ["tensor_parallel"]}, "tensor_parallel has no axis of several processes"),
    ],
)
def test_where_nothing_is_left_the_message_names_what_to_change(arguments, match):
    with pytest.raises(NoFeasiblePlanError, match=match):
        find(context(), **arguments)


def test_a_job_that_cannot_be_searched_is_told():
    ctx = replace(context(), cluster=cluster(memory_bytes=1000.0))
    with pytest.raises(NoFeasiblePlanError, match=r"none of \d+ compositions fits in 950 B.*needs") as none:
        find(ctx)
    assert all(each["estimate"]["peak_bytes"] > 920 for each in none.value.rejected if each["why"] == "memory")
    assert any(each["why"] == "memory" for each in none.value.rejected)

    model = net()
    model.lock = __import__("threading").Lock()
    with pytest.raises(ArgumentError, match="cannot be copied"):
        find(context(model))

    with pytest.raises(RuntimeError, match="shapes"):
        find(context(nn.Linear(17, 4)))

    with pytest.raises(ArgumentError, match="no full batch"):
        BatchCache(replace(context(), make_loader=lambda rank, size: [])).batches(0, 1)

    with sabotage("check", 0), pytest.raises(NoFeasiblePlanError, match=r"none of 0 dry runs .*goes with no check"):
        find(context(), included=["sabotage"])


def test_a_candidate_steps_beside_the_model():
    model = net()
    ctx = context(model)
    made = candidate(ctx)
    before = snapshot(model)
    result = made.build()
    for batch in BatchCache(ctx).batches(0, 1)[:3]:
        result.step(batch)
    assert not torch.equal(model[0].linear.weight, made.root[0].linear.weight)
    assert made.root[0].seen == 3
    assert_same(before, snapshot(model))


def test_a_candidate_in_parts_starts_on_the_meta_device_and_gets_the_models_values():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    model[2].weight = model[0].weight
    model[1].running_mean.normal_()
    before = snapshot(model)
    made = candidate(context(model), in_parts=True)
    assert all(tensor.is_meta for tensor in [*made.root.parameters(), made.root[1].running_mean])
    built = made.build().model
    assert built[0].weight is built[2].weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(built.state_dict()[name], tensor), name
    assert_same(before, snapshot(model))

    model.transposed = model[0].weight.detach().T  # memory that `build` would leave without values
    assert not candidate(context(model), in_parts=True).root[0].weight.is_meta


@pytest.mark.parametrize(
    ("strategy", "size", "shards"),
    [
        ([], 1, 1),
        (["ddp"], 2, 1),
        (["fsdp"], 4, 4),
        (["chunk"], 2, 2),
        ([("parallel_mode", ([("tensor", 2), ("data", 4)], None)), "tensor_parallel", "zero2"], 8, 8),
        ([("parallel_mode", ([("context", 2), ("data", 2)], None)), "context_parallel", "fsdp"], 4, 1),
    ],
)
def test_a_process_starts_with_its_part_where_parameters_are_sharded(strategy, size, shards):
    assert complete(Strategy.of(strategy), size).num_parameter_shards == shards


class ByAddress(torch.optim.SGD):
    """Writes where parameters lie, as kernels for many tensors do on accelerators; copies on write do not see that."""

    step_depends_on = "element"

    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            values = local_part(parameter.detach())
            memory = (ctypes.c_char * tensor_bytes(values)).from_address(torch._C._data_address(values))
            torch.frombuffer(memory, dtype=values.dtype).sub_(0.1 * local_part(parameter.grad).reshape(-1))


def dry_run_all(rank, size, strategies):
    model = net()
    for strategy in strategies:
        before = snapshot(model)
        try:
            ctx = replace(context(model), make_optimizer=lambda given: ByAddress(given, lr=0.1))
            dry_run(ctx, complete(Strategy.of(strategy), size))
        finally:
            assert_same(before, snapshot(model))


@pytest.mark.slow
def test_dry_runs_write_to_no_memory_of_the_model(pool):
    dry_run_all(0, 1, [[], ["half"], ["chunk"], ["fsdp"]])

    pool.run(dry_run_all, [["zero1"], ["fsdp"]])


def test_a_candidate_keeps_ties_is_real_and_takes_few_steps():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    made = candidate(context(model)).root
    assert made[0].weight is made[1].weight is not model[0].weight

    with torch.device("meta"):
        model = nn.Linear(16, 4)
    assert not candidate(context(model)).root.weight.is_meta
    assert model.weight.is_meta

    ctx = context()
    trial = Trial(ctx, Strategy(), Coordinator(ctx.world), BatchCache(ctx), 30.0)
    outcome = measure(trial, 0.0, None)
    trial.close()
    assert outcome.num_steps <= 2  # the first step, if the second takes as long


@pytest.mark.parametrize(("steps", "taken"), [((1.0, 1.02), 2), ((1.0, 1.05, 1.0), 3), ((1.0, 2.0, 1.99), 2)])
def test_two_long_steps_that_are_close_are_enough(steps, taken):
    left = iter(steps)
    trial = SimpleNamespace(
        start=lambda: True, first_step_s=next(left), step=lambda: next(left), peak_bytes=lambda: 1.0, elapsed_s=0.0,
        startup_s=0.0, memory_kind="none",
    )  # fmt: skip
    assert measure(trial, math.inf, None).num_steps == taken


def test_a_candidate_that_cannot_be_evaluated_fails_before_its_first_pass_compiles():
    ctx = replace(context(), plain_pass=ReferenceStep())
    trial = Trial(ctx, Strategy(), Coordinator(ctx.world), BatchCache(ctx), 30.0)
    with (
        mock.patch.object(trials, "cannot_evaluate", return_value="it cannot be evaluated"),
        mock.patch.object(trials, "check") as first_pass,
    ):
        assert not trial.start()
    trial.close()
    assert "cannot be evaluated" in trial.failure
    first_pass.assert_not_called()


def test_a_dry_run_of_one_strategy_leaves_samplers_where_they_were():
    generator = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(64, 1))
    sampler = torch.utils.data.RandomSampler(data, generator=generator)
    loader = torch.utils.data.DataLoader(data, sampler=sampler, batch_size=4)
    ctx = replace(context(), make_loader=lambda rank, size: loader)
    before = generator.get_state()
    first = BatchCache(ctx).batches(0, 1)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(next(iter(loader))[0], first[0][0])

    assert math.isfinite(dry_run(context(), Strategy.of(["checkpoint"])).step_s)
    with sabotage("step", 0), pytest.raises(StrategyError, match="sabotage.*broke in the third step"):
        dry_run(context(), Strategy.of([("sabotage", {"how": "step"})]))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param("apply", "ValueError: cannot be applied here", marks=pytest.mark.nightly),
        pytest.param("step", "RuntimeError: broke in the third step", marks=pytest.mark.nightly),
        pytest.param("memory", "MemoryError: a terabyte", marks=pytest.mark.nightly),
        pytest.param("nan", "its first pass has loss nan", marks=pytest.mark.nightly),
        ("wrong", "does not compute what plain training does"),
    ],
)
def test_what_goes_wrong_is_recorded_and_the_search_goes_on(how, reason):
    with sabotage(how, 0):
        plan = find(context(), excluded=FEW)
        broken = [each for each in plan.rejected if "sabotage" in each.strategy.names()]
        assert "sabotage" not in plan.strategy.names()
        assert any(each.why == "failed" and reason in each.reason for each in broken)


@pytest.mark.parametrize("how", ["check", "optimizer"])
def test_what_is_known_to_be_refused_takes_no_dry_run(how):
    runs = []
    with sabotage(how, 0):
        plan = find(context(), excluded=FEW, progress=lambda state: runs.append(state.strategy))
        refused = [each for each in plan.rejected if each.why == "refused"]
        assert refused
        assert all("sabotage goes with no" in each.reason for each in refused)
        assert all("sabotage" in each.strategy.names() for each in refused)
        assert not any("sabotage" in each for each in runs)
        assert plan.num_dry_runs == len(runs) > 1
        assert not any(each.why == "failed" for each in plan.rejected)


def searched(rank, size, how, where):
    """A search on all ranks in which a method goes wrong on rank `where`: what the ranks must agree on."""
    model = net()
    ctx = context(model)
    before = snapshot(model)
    state = torch.get_rng_state()
    with sabotage(how, where):
        plan = find(ctx, excluded=FEW)
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), state)
    # The default group still works: nothing is left waiting in it.
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    reasons = [each.reason for each in plan.rejected if each.why == "failed"]
    return str(plan.strategy), plan.num_dry_runs, reasons, total.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "where", "reason"),
    [
        pytest.param("none", 0, None, marks=pytest.mark.nightly),
        ("step", 1, "broke in the third step (on rank 1)"),
        pytest.param("apply", 1, "cannot be applied here (on rank 1)", marks=pytest.mark.nightly),
        pytest.param("memory", 0, "MemoryError: a terabyte is not here (on rank 0)", marks=pytest.mark.nightly),
    ],
)
def test_two_processes_decide_the_same_whatever_happens_to_one(pool, how, where, reason):
    found = pool.run(searched, how, where)
    assert found[0] == found[1]
    assert found[0][3] == 2.0
    if reason is None:
        assert not found[0][2]
    else:
        assert any(reason in each for each in found[0][2])
        assert "sabotage" not in found[0][0]


def groups_left_behind(rank, size):
    """How many process groups a dry run leaves where a method fails on rank 1 after fsdp has made some."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    methods = [("parallel_mode", [("data", 2)]), "fsdp", ("sabotage", {"how": "apply", "rank": 1})]
    with sabotage("apply", 1), pytest.raises(StrategyError, match="cannot be applied here"):
        dry_run(context(), Strategy.of(methods))
    return len(groups) - before


def test_an_error_of_one_rank_is_everyones_and_leaves_no_group(pool):
    assert pool.run(groups_left_behind) == [0, 0]

    first, second = pool.run(broken_on_rank_zero)
    assert first.startswith("RuntimeError")
    assert second.startswith("ArgumentError: rank 0 failed: RuntimeError")


def broken_on_rank_zero(rank, size):
    """A job whose model fails in the trace, which rank 0 alone does."""
    try:
        find(context(nn.Linear(17, 4)))
    except (RuntimeError, ArgumentError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"
