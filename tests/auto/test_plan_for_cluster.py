"""Plans for clusters that are not here: models in numbers, and arguments that do not hold."""

import json
import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import atorch
from atorch.auto.plan_for_cluster import cluster_of, plan_for, subject_of
from atorch.auto.simulated_candidates import SimulationLimits, simulated
from atorch.auto.strategy import Strategy
from atorch.cluster.spec import ClusterSpec
from atorch.cost.transformer import Experts, TransformerShape, transformer_profile
from atorch.errors import ArgumentError
from atorch.report.figures import simulations

FOUR = ClusterSpec.load("4xH100-80GB")
DDP = Strategy.of([("parallel_mode", [("data", 4)]), "ddp"])
TENSOR = Strategy.of([("parallel_mode", [("tensor", 4)]), "tensor_parallel"])


@pytest.fixture(scope="module")
def subject():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    return subject_of(
        model, torch.zeros(4, 32), FOUR, loss_func=lambda batch, output: output.sum(), optim_func=torch.optim.SGD
    )


def outcome(subject, strategy, allowance):
    (found,) = simulated(subject, [(strategy, 1.0)], 4, 16, allowance)
    return found


@pytest.mark.slow
def test_what_is_allowed_is_simulated(subject):
    assert outcome(subject, DDP, SimulationLimits())["peak_bytes"] > 0
    assert outcome(subject, DDP, SimulationLimits(until=math.inf, real_bytes=0.0))["peak_bytes"] > 0, "of fakes alone"

    assert "no time left" in outcome(subject, DDP, SimulationLimits(until=time.monotonic() - 1))["why_not"]

    told = outcome(subject, TENSOR, SimulationLimits(real_bytes=1000.0))["why_not"]
    assert "tensor_parallel would watch a few real blocks of the model at work, which takes" in told


def test_a_simulation_is_given_up_where_it_takes_too_long(subject, monkeypatch):
    began = time.monotonic()
    later = iter([began, began])  # asked before it begins, then by every operation
    monkeypatch.setattr("atorch.auto.simulated_candidates.time.monotonic", lambda: next(later, began + 100))
    assert "no time left" in outcome(subject, DDP, SimulationLimits(until=began + 50))["why_not"]


def test_what_is_done_is_said(subject):
    said = []
    plan_for(subject, FOUR, global_batch=16, verify=1, doing=lambda what: nullcontext(said.append(what)))
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
        model, torch.zeros(4, 64), FOUR, loss_func=lambda batch, output: output.sum(), optim_func=torch.optim.SGD
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


@pytest.mark.slow
def test_where_nothing_fits_by_simulation_the_choice_stays_and_that_is_told():
    plan = plan_for(keeping(2**12), small(2**20), global_batch=8, host_memory=False, verify=1)
    assert not plan.simulated[0]["fits"]
    assert "nothing was found that fits" in plan.notes[-1]
    assert any("which does not fit" in line for line in simulations(plan.to_json_data()["simulated"]))


CLUSTER = ClusterSpec.load("8xH100-80GB")
BATCH = torch.zeros(4, 16)


class Plain(nn.Module):
    """Traces anywhere."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, batch):
        return self.layer(batch)


class Born(Plain):
    """Reads values while it is made."""

    def __init__(self):
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()


class Branching(Plain):
    """Goes where the values lead."""

    def forward(self, batch):
        return super().forward(batch) * (2 if float(batch.sum()) >= 0 else 3)


class Huge(Branching):
    """Has no room here for values."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2**30, 1024)


def loss_func(batch, output):
    return output.pow(2).mean()


def test_a_plan_for_experts_says_what_it_leaves_out():
    shape = {
        "layers": 2,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 512,
        "vocab": 512,
        "seq_len": 128,
        "head_dim": 64,
    }
    for experts, num_notes in ((None, 0), (Experts(count=4, top_k=2, ffn=512), 1)):
        profile = transformer_profile(TransformerShape(**shape, experts=experts))
        plan = plan_for(subject_of(profile, None, CLUSTER), CLUSTER, global_batch=8)
        assert len([note for note in plan.notes if "expert_parallel, which is only for plans" in note]) == num_notes
        assert "expert_parallel" not in plan.strategy.names()
    one = ClusterSpec.load("1xH100-80GB")
    assert not plan_for(subject_of(profile, None, one), one, global_batch=8).notes


def test_a_function_is_called_under_the_meta_device_and_a_module_traced_as_it_is():
    made = []

    def make():
        made.append(Plain())
        return made[-1]

    profile = subject_of(make, BATCH, CLUSTER, loss_func=loss_func).profile
    assert [each.layer.weight.is_meta for each in made] == [True]
    assert (profile.num_params, profile.batch_size, profile.traced) == (272, 4, True)

    model = Plain()
    subject = subject_of(model, BATCH, CLUSTER, loss_func=loss_func, optim_func=torch.optim.SGD, optim_args={"lr": 0.1})
    assert subject.profile.optim_state_per_param == 0
    assert subject.ctx is not None
    assert subject.ctx.root is model
    assert not hasattr(model, "_atorch")

    with pytest.raises(ArgumentError, match=r"made for real it would take 4,096 GiB of "):
        subject_of(Huge, BATCH, CLUSTER, loss_func=loss_func)


@pytest.mark.parametrize(("kind", "is_traced"), [(Born, True), (Branching, False)])
def test_what_asks_for_values_is_made_for_real_and_that_is_said(kind, is_traced, caplog):
    with caplog.at_level("INFO", logger="atorch"):
        profile = subject_of(kind, BATCH, CLUSTER, loss_func=loss_func).profile
    assert (profile.num_params, profile.traced) == (272, is_traced)
    assert "the model is made for real" in caplog.text


def test_an_optimizer_that_exists_already_is_planned_as_its_class():
    model = nn.Linear(8, 8)
    kinds = (torch.optim.Adam, torch.optim.Adam(model.parameters()))
    made = [subject_of(model, torch.zeros(4, 8), FOUR, optim_func=kind, loss_func=loss_func) for kind in kinds]
    assert made[0].profile == made[1].profile
    with pytest.raises(ArgumentError, match="that the model does not have"):
        subject_of(nn.Linear(8, 8), torch.zeros(4, 8), FOUR, optim_func=kinds[1], loss_func=loss_func)


def test_a_profile_is_taken_as_it_is_and_no_batch():
    profile = subject_of(Plain(), BATCH, CLUSTER).profile
    assert subject_of(profile, None, CLUSTER).profile is profile

    profile = subject_of(Plain(), BATCH, CLUSTER).profile
    with pytest.raises(ArgumentError, match="sample_batch is given with a profile"):
        subject_of(profile, BATCH, CLUSTER)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((Plain(), None), "needs a sample_batch"),
        ((3, BATCH), "model is 3; give a torch.nn.Module or a function"),
        ((lambda: 3, BATCH), "the model's function returned 3"),
    ],
)
def test_what_is_no_model_is_named(arguments, told):
    with pytest.raises(ArgumentError, match=told):
        subject_of(*arguments, CLUSTER)


CONFIG = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 128,
    "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip


def test_what_the_command_takes_is_taken(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = transformers.GPT2Config(**{name: value for name, value in CONFIG.items() if name != "model_type"})
    few = {"cluster": "8xH100-80GB", "seq": 64, "verify": 0, "included": ["ddp"], "excluded": ["compile", "checkpoint"]}
    plans = [atorch.plan(model, **few) for model in (tmp_path, str(tmp_path / "config.json"), config)]
    assert {plan.strategy for plan in plans} == {plans[0].strategy}
    assert len({plan.num_params for plan in plans}) == 1
    assert config.use_cache is True, "it is the user's"
    plan = plans[0]
    assert re.fullmatch(
        r"<ClusterPlan parallel_mode\(data 8\) .*ddp, [\d.]+ m?s a step, [\d.]+ .iB a device>", repr(plan)
    )
    assert plan._repr_html_().startswith("<table><tr><td>step</td>")
    plan.save_html(tmp_path / "plan.html", "GPT2")
    assert "<title>Plan: GPT2</title>" in (tmp_path / "plan.html").read_text()
    with pytest.raises(ArgumentError, match="no/such/folder"):
        plan.save_html("no/such/folder/plan.html")


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"cluster": "8xL4"}, "there is no file or folder 'no.json'"),
        ({}, "cluster is None; give a description such as"),
        ({"cluster": "8xL4", "sample_batch": BATCH}, "has no argument 'sample_batch'"),
        ({"cluster": "8xL4", "loss_func": print}, "has no argument 'loss_func'"),
        ({"cluster": "8xL4", "sequence": 8}, "no argument 'sequence'"),
    ],
)
def test_what_does_not_go_with_a_config_is_named(keywords, told):
    with pytest.raises(ArgumentError, match=re.escape(told)):
        atorch.plan("no.json", **keywords)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 2.5}, "global_batch is 2.5"),
        ({"reserve": 1.0}, "reserve is 1.0"),
        ({"verify": 33}, "verify is 33; it is how many are simulated, from 0 to 32"),
    ],
)
def test_numbers_that_do_not_hold_are_named(arguments, told):
    subject = subject_of(Plain(), BATCH, CLUSTER)
    with pytest.raises(ArgumentError, match=told):
        plan_for(subject, CLUSTER, **arguments)


@pytest.mark.parametrize(
    ("positional", "keywords", "told"),
    [
        ((), {"cluster": "8xH10"}, "there is no cluster named 'H10'"),
        ((), {"cluster": 8}, "cluster is 8; give a description"),
        ((BATCH,), {"cluster": "8xH100-80GB", "global_bach": 8}, "did you mean 'global_batch'?"),
        ((BATCH,), {"cluster": "8xH100-80GB", "dataset": []}, "plan for a cluster has no argument 'dataset'"),
        ((DataLoader([]),), {"cluster": "8xH100-80GB"}, "sample_batch is a DataLoader; give one batch"),
        ((BATCH, 8), {"cluster": "8xH100-80GB"}, "3 arguments by position; these are model, sample_batch"),
        ((BATCH,), {"cluster": "8xH100-80GB", "sample_batch": BATCH}, "sample_batch twice"),
        ((), {"global_batch": 8}, "global_batch is for a plan for a cluster; give one"),
        ((), {"optim_fun": 8}, "did you mean 'optim_func'?"),
        ((torch.optim.SGD, [], loss_func, 1), {}, "5 arguments by position; these are model, optim_func"),
        ((torch.optim.SGD,), {}, "so they need dataset and loss_func"),
    ],
)
def test_the_door_names_what_does_not_hold(positional, keywords, told):
    with pytest.raises(ArgumentError) as error:
        atorch.plan(Plain(), *positional, **keywords)
    assert told in str(error.value)


def test_a_cluster_is_a_description_a_file_or_a_value(tmp_path):
    CLUSTER.save(tmp_path / "mine.json")
    assert cluster_of(CLUSTER) is CLUSTER
    assert cluster_of("8xH100-80GB") == cluster_of(tmp_path / "mine.json") == CLUSTER


@pytest.mark.parametrize("strategy", [["ddp"], ["fsdp", ("half", "bf16")]])
def test_a_plan_tells_the_bytes_of_a_checkpoint(tmp_path, strategy):
    """Of each of two processes; its format adds little."""
    model, job = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), {"optim_func": torch.optim.AdamW}
    job |= {"loss_func": lambda batch, output: output.float().mean()}
    two, batch = ClusterSpec.load("2xH100-80GB"), torch.zeros(4, 256)
    plan = plan_for(subject_of(model, batch, two, **job), two, fixed=strategy, verify=0)
    result = atorch.auto_accelerate(model, dataset=[batch], load_strategy=strategy[1:], **job)[1]
    result.step(batch)
    folder = atorch.save_checkpoint(tmp_path, result, 1)
    assert sum(file.stat().st_size for file in folder.iterdir()) == pytest.approx(
        2 * plan.estimate.checkpoint_bytes, rel=0.01
    )
