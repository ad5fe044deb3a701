"""Plans for clusters that are not here: models in numbers, and arguments that do not hold."""

import json
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import atorch
from atorch.auto.plan_for_cluster import cluster_of, plan_for, subject_of
from atorch.cluster.spec import ClusterSpec
from atorch.cost.transformer import Experts, TransformerShape, transformer_profile
from atorch.errors import ArgumentError

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
        notes = plan_for(subject_of(profile, None, CLUSTER), CLUSTER, global_batch=8).notes
        assert len([note for note in notes if "expert parallelism" in note]) == num_notes
    one = ClusterSpec.load("1xH100-80GB")
    assert not plan_for(subject_of(profile, None, one), one, global_batch=8).notes


def test_a_function_is_called_under_the_meta_device():
    made = []

    def make():
        made.append(Plain())
        return made[-1]

    profile = subject_of(make, BATCH, CLUSTER, loss_func=loss_func).profile
    assert [each.layer.weight.is_meta for each in made] == [True]
    assert (profile.num_params, profile.batch_size, profile.traced) == (272, 4, True)


@pytest.mark.parametrize(("kind", "is_traced"), [(Born, True), (Branching, False)])
def test_what_asks_for_values_is_made_for_real_and_that_is_said(kind, is_traced, caplog):
    with caplog.at_level("INFO", logger="atorch"):
        profile = subject_of(kind, BATCH, CLUSTER, loss_func=loss_func).profile
    assert (profile.num_params, profile.traced) == (272, is_traced)
    assert "the model is made for real" in caplog.text


def test_what_is_too_large_for_that_is_refused_with_its_size():
    with pytest.raises(ArgumentError, match=r"made for real it would take 4,096 GiB of "):
        subject_of(Huge, BATCH, CLUSTER, loss_func=loss_func)


def test_a_module_is_traced_as_it_is():
    model = Plain()
    subject = subject_of(model, BATCH, CLUSTER, loss_func=loss_func, optim_func=torch.optim.SGD, optim_args={"lr": 0.1})
    assert subject.profile.optim_state_per_param == 0
    assert subject.ctx is not None
    assert subject.ctx.root is model
    assert not hasattr(model, "_atorch")


def test_a_profile_is_taken_as_it_is():
    profile = subject_of(Plain(), BATCH, CLUSTER).profile
    assert subject_of(profile, None, CLUSTER).profile is profile


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


def test_a_profile_takes_no_batch():
    profile = subject_of(Plain(), BATCH, CLUSTER).profile
    with pytest.raises(ArgumentError, match="sample_batch is given with a profile"):
        subject_of(profile, BATCH, CLUSTER)


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
