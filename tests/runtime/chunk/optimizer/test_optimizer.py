"""Any optimizer on chunks is that optimizer: the same bits, groups, schedules and saved states."""

import copy
import errno
import os

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import CosineAnnealingLR

from atorch.errors import ArgumentError, CheckpointError, OutOfBudgetError
from atorch.profiler.memory_tracker import LiveBytes
from atorch.runtime.chunk import optimizer_slices
from atorch.runtime.chunk.chunk_optimizer import ChunkOptimizer
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer
from atorch.runtime.precision.master_weights import to_half, with_master_weights
from tests.pool import on_ranks
from tests.runtime.chunk.stand_in import chunks_of, give_gradients, random_gradients, values
from tests.runtime.sharing import clear, replace

STEPS = 4


class Scaled(nn.Module):
    """A parameter without dimensions: its state looks like a number of steps."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.scale


def make_net():
    torch.manual_seed(7)
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    net = nn.Sequential(conv, nn.Tanh(), nn.Linear(9, 23), Scaled(), nn.Linear(23, 2))
    for parameter in net[4].parameters():
        parameter.requires_grad = False
    return net


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Parameters of several pieces, and several calls a step, whose lengths are those of vectors all the same."""
    monkeypatch.setattr(optimizer_slices, "NUMEL", 64)
    monkeypatch.setattr(optimizer_slices, "FUSED_NUMEL", 128)


def train(make, groups_of=lambda net: net.parameters(), missing=(), steps=STEPS, capacity=150, **settings):
    """A net by itself and one in chunks, stepped alike; `missing` has the gradients that a step lacks."""
    plain, net = make_net(), make_net()
    chunks = chunks_of(net, capacity, **settings)
    reference, optim = make(groups_of(plain)), ChunkOptimizer(make, groups_of(net), chunks)
    for number in range(steps):
        step_both(plain, reference, net, chunks, optim, number, missing)
    return plain, reference, net, chunks, optim


def step_both(plain, reference, net, chunks, optim, number, missing=()):
    gradients = random_gradients(plain, number, missing[number] if number < len(missing) else ())
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients[name].clone() if name in gradients else None
    optim.zero_grad()
    give_gradients(net, chunks, gradients)
    reference.step()
    optim.step()


def assert_alike(plain, net, chunks):
    mine = values(net, chunks)
    for name, parameter in plain.named_parameters():
        assert torch.equal(mine[name], parameter), name


def adam(groups, **settings):
    return Adam(groups, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


def momentum(groups):
    return SGD(groups, lr=1e-2, momentum=0.9)


KINDS = [
    (Adam, {"weight_decay": 0.1}),
    (Adam, {"amsgrad": True, "foreach": True}),
    (Adam, {"weight_decay": 0.1, "fused": True}),
    (AdamW, {"fused": True}),
    (SGD, {"foreach": True}),
    (SGD, {"momentum": 0.9, "fused": True}),
    *((kind, {}) for kind in (ASGD, Adadelta, Adagrad, Adamax, NAdam, RAdam, RMSprop, Rprop, Adafactor)),
]


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_same_bits(kind, settings):
    plain, _, net, chunks, _ = train(lambda groups: kind(groups, lr=1e-2, **settings))
    assert_alike(plain, net, chunks)


class Foreign(SGD):
    """Not torch's own: it looks at all parameters, in their order."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        total = sum((index + 1) * p.grad.flatten()[0] for index, p in enumerate(params) if p.grad is not None)
        for parameter in params:
            parameter.add_(total, alpha=-1e-3)


def test_a_foreign_optimizer_sees_all_parameters_at_once():
    plain, _, net, chunks, _ = train(lambda groups: Foreign(groups, lr=1.0), but=["0.bias"])
    assert_alike(plain, net, chunks)


def grouped(net, named=False):
    """Two groups, the second of which has no weight decay, and parameters by name or bare."""
    listed = list(net.named_parameters())
    decayed = [entry if named else entry[1] for entry in listed if "weight" in entry[0]]
    others = [entry if named else entry[1] for entry in listed if "weight" not in entry[0]]
    return [{"params": others, "lr": 3e-3, "weight_decay": 0.0}, {"params": decayed}]


def test_what_has_no_gradient_is_not_stepped_and_what_is_zero_is():
    missing = [(), ("0.bias", "2.weight"), ("2.weight",), ()]
    plain, reference, net, chunks, optim = train(adam, missing=missing)
    assert_alike(plain, net, chunks)
    steps = [int(entry["step"]) for entry in optim.state_dict()["state"].values()]
    assert steps == [int(state["step"]) for state in reference.state.values()] == [4, 3, 2, 4, 4]
    plain, reference, net, chunks, optim = train(adam, steps=1)
    for each in (reference, optim):
        each.zero_grad(set_to_none=False)
        each.step()
    assert_alike(plain, net, chunks)
    optim.zero_grad()
    assert not any(chunk.has_gradient for chunk in chunks.chunks)


def test_schedulers_and_settings_reach_it():
    plain, reference, net, chunks, optim = train(adam, steps=0)
    schedulers = [CosineAnnealingLR(each, 5) for each in (reference, optim)]
    for number in range(STEPS):
        step_both(plain, reference, net, chunks, optim, number)
        for scheduler in schedulers:
            scheduler.step()
    optim.param_groups[0]["betas"] = reference.param_groups[0]["betas"] = (0.8, 0.9)
    step_both(plain, reference, net, chunks, optim, STEPS)
    assert optim.param_groups[0]["lr"] == reference.param_groups[0]["lr"] != 1e-2
    assert_alike(plain, net, chunks)


@pytest.mark.parametrize("named", [False, True])
def test_groups_keep_their_settings_and_one_more_is_taken(named):
    plain, reference, net, chunks, optim = train(adam, lambda net: grouped(net, named)[:1])
    for each, model in ((reference, plain), (optim, net)):
        each.add_param_group(grouped(model, named)[1])
    for number in range(STEPS):
        step_both(plain, reference, net, chunks, optim, number)
    assert_alike(plain, net, chunks)
    for theirs, mine in zip(reference.param_groups, optim.param_groups, strict=True):
        assert {**theirs, "params": 0} == {**mine, "params": 0}
    own = set(net.parameters())
    assert all(parameter in own for group in optim.param_groups for parameter in group["params"])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.add_param_group(grouped(net, named)[1])


@pytest.mark.parametrize("make", [adam, momentum, Adagrad, Adafactor, NAdam])
def test_states_travel_to_and_from_plain_optimizers(make):
    plain, reference, net, chunks, optim = train(make)
    theirs, mine = reference.state_dict(), optim.state_dict()
    assert_same_state(theirs["state"], mine["state"])
    assert theirs["param_groups"] == mine["param_groups"]
    again, other = train(make, steps=0)[:2]
    again.load_state_dict(plain.state_dict())
    other.load_state_dict(copy.deepcopy(mine))
    _, _, net, chunks, optim = train(make, steps=0, capacity=500)
    for name, parameter in net.named_parameters():
        memory, slot = chunks.place(parameter)
        memory.write(slot, plain.state_dict()[name])
    optim.load_state_dict(theirs)
    for number in range(STEPS):  # the loaded states are copies: three optimizers step
        step_both(again, other, net, chunks, optim, number)
    assert_alike(again, net, chunks)
    assert int(next(iter(reference.state.values())).get("step", STEPS)) == STEPS


def assert_same_state(theirs, mine):
    assert theirs.keys() == mine.keys()
    for number, entry in theirs.items():
        assert entry.keys() == mine[number].keys()
        for key, value in entry.items():
            assert value == mine[number][key] if not isinstance(value, torch.Tensor) else True
            if isinstance(value, torch.Tensor):
                assert value.shape == mine[number][key].shape
                assert torch.equal(value, mine[number][key])


def put(optim):
    for state in optim.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@pytest.mark.parametrize("wipe", [clear, replace, put])
def test_states_that_are_taken_away_are_gone(wipe):
    plain, reference, net, chunks, optim = train(adam, steps=2)
    for each in (reference, optim):
        wipe(each)
    for number in (2, 3):
        step_both(plain, reference, net, chunks, optim, number)
    assert_alike(plain, net, chunks)
    for each in (reference, optim):
        wipe(each)
    expected, got = reference.state_dict()["state"], optim.state_dict()["state"]
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[number]["exp_avg"], expected[number]["exp_avg"]) for number in expected)


def test_what_does_not_hold_is_refused():
    optim, other = train(adam, grouped)[4], train(adam)[4]
    with pytest.raises(CheckpointError, match=r"groups of \[4, 3\] parameters, and the optimizer has groups of \[7\]"):
        other.load_state_dict(optim.state_dict())
    with pytest.raises(ArgumentError, match="LBFGS may call in the middle of its step"):
        train(LBFGS, steps=0)[4].step(lambda: 1.0)
    net = make_net()
    chunks = chunks_of(net, group=Share(0))
    with pytest.raises(ArgumentError, match=r"Adafactor .* 2 processes.*use one of ASGD, Adadelta"):
        ChunkOptimizer(Adafactor, net.parameters(), chunks)


def test_a_closure_is_called_before_the_step():
    plain, reference, net, chunks, optim = train(adam, steps=1)
    gradients = random_gradients(plain, 1)

    def of_plain():
        assert torch.is_grad_enabled()
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients.get(name)
        return 1.0

    def of_chunks():
        assert torch.is_grad_enabled()
        optim.zero_grad()
        give_gradients(net, chunks, gradients)
        return 1.0

    assert reference.step(of_plain) == optim.step(of_chunks) == 1.0
    assert_alike(plain, net, chunks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_stepped_as_by_master_weights(dtype):
    plain, net = make_net(), make_net()
    values_before = to_half([plain], dtype)
    reference = with_master_weights(adam, lambda: 8.0, values_before)(plain.parameters())
    chunks = chunks_of(net, 150, dtype=dtype)
    optim = ChunkOptimizer(adam, net.parameters(), chunks, loss_scale=lambda: 8.0)
    for number in range(STEPS):
        gradients = {name: value.to(dtype) for name, value in random_gradients(plain, number).items()}
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients.get(name)
        optim.zero_grad()
        give_gradients(net, chunks, gradients)
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        reference.step()
        optim.step()
        mine = {name: chunks.place(p)[0].gradient_of(chunks.place(p)[1]) for name, p in net.named_parameters()}
        assert all(torch.equal(mine[name], gradient) for name, gradient in kept.items())
    compute = values(net, chunks, "compute")
    for name, parameter in plain.named_parameters():
        assert torch.equal(compute[name], parameter), name
    assert_same_state(reference.state_dict()["state"], optim.state_dict()["state"])
    fresh = chunks_of(make_net(), 1000, dtype=dtype)
    other = ChunkOptimizer(adam, list(fresh._places), fresh)
    other.load_state_dict(optim.state_dict())
    assert_same_state(reference.state_dict()["state"], other.state_dict()["state"])
    loaded = {slot.name: chunk.part(chunk.compute, slot) for chunk, slot in fresh._places.values()}
    assert all(torch.equal(loaded[name], value) for name, value in compute.items())


def test_an_overflow_is_seen_and_unscaled_gradients_are_stepped():
    plain, reference, net, chunks, optim = train(adam, steps=0)
    scaled = ScaledOptimizer(optim, LossScale(4.0))
    gradients = random_gradients(plain, 0)
    give_gradients(net, chunks, {**gradients, "0.bias": torch.full((5,), torch.inf)})
    scaled.step()
    assert scaled.step_was_skipped
    assert_alike(plain, net, chunks)
    scaled.zero_grad()
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients.get(name)
    give_gradients(net, chunks, {name: gradient * 2.0 for name, gradient in gradients.items()})
    reference.step()
    scaled.step()
    assert not scaled.step_was_skipped
    assert_alike(plain, net, chunks)


class Share:
    """A group of two, as far as it is asked who is who."""

    def __init__(self, rank):
        self._rank = rank

    def rank(self):
        return self._rank

    def size(self):
        return 2


def test_shares_of_chunks_are_stepped_as_the_whole():
    plain = make_net()
    reference = adam(plain.parameters())
    nets = [make_net(), make_net()]
    shared = [chunks_of(net, 150, group=Share(rank)) for rank, net in enumerate(nets)]
    optims = [ChunkOptimizer(adam, net.parameters(), chunks) for net, chunks in zip(nets, shared, strict=True)]
    for number in range(STEPS):
        for net, chunks, optim in zip(nets, shared, optims, strict=True):
            step_both(copy.deepcopy(plain), adam([torch.ones(1)]), net, chunks, optim, number)
        for name, parameter in plain.named_parameters():
            parameter.grad = random_gradients(plain, number).get(name)
        reference.step()
    for one, two in zip(*(chunks.chunks for chunks in shared), strict=True):
        flat = torch.cat([one.master, two.master])
        for slot in one.spec.slots:
            assert torch.equal(one.whole(flat, slot), plain.get_parameter(slot.name))
    states = [optim.state_dict()["state"] for optim in optims]
    assert optims[0].state_dict()["share"][:3] == [(0, 70), (0, 0), (0, 104)]
    with pytest.raises(CheckpointError, match="a process's share, and not of what this one has"):
        optims[0].load_state_dict(optims[1].state_dict())
    optims[1].load_state_dict(reference.state_dict())
    assert_same_state(states[1], optims[1].state_dict()["state"])


@on_ranks()
def test_the_whole_state_is_gathered(rank, size):
    net = make_net()
    chunks = chunks_of(net, 150, group=torch.distributed.group.WORLD)
    optim = ChunkOptimizer(adam, net.parameters(), chunks)
    give_gradients(net, chunks, random_gradients(make_net(), 0))
    optim.step()
    saved = optim.full_state_dict(to_rank=1)
    optim.load_state_dict(optim.state_dict())
    if rank == 0:
        assert saved is None
    else:
        assert_same_state(train(adam, steps=1)[1].state_dict()["state"], saved["state"])


def test_states_in_files(tmp_path):
    plain, net = make_net(), make_net()
    chunks = chunks_of(net, 150)
    tier = chunks.host
    before = tier.used_bytes
    reference, optim = adam(plain.parameters()), ChunkOptimizer(adam, net.parameters(), chunks, disk=tmp_path)
    for number in range(STEPS):
        step_both(plain, reference, net, chunks, optim, number)
    assert_alike(plain, net, chunks)
    assert_same_state(reference.state_dict()["state"], optim.state_dict()["state"])
    assert tier.used_bytes == before
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    net = make_net()
    chunks = chunks_of(net, 150)
    optim = ChunkOptimizer(adam, net.parameters(), chunks, disk=tmp_path)
    give_gradients(net, chunks, random_gradients(make_net(), 0))
    with pytest.raises(OutOfBudgetError, match=r"exp_avg of chunk 0 takes 560 B in .*No space left"):
        optim.step()
    assert not list(tmp_path.iterdir())


def test_states_are_entered_in_the_ledger():
    net = make_net()
    chunks = chunks_of(net, 150, dtype=torch.bfloat16)
    tier = chunks.host
    optim = ChunkOptimizer(adam, net.parameters(), chunks)
    before = tier.used_bytes
    give_gradients(net, chunks, random_gradients(make_net(), 0))
    optim.step()
    trained = sum(len(chunk.master) for chunk in chunks.chunks if chunk.spec.trainable)
    assert tier.used_bytes - before == 8 * trained
    assert tier.peak_bytes > tier.used_bytes  # widened gradients


@pytest.mark.parametrize(("in_place", "most", "way"), [(False, 16.5, {}), (True, 14.5, {"fused": True})])
def test_host_bytes_in_mixed_precision(way, in_place, most, monkeypatch):
    monkeypatch.setattr(optimizer_slices, "NUMEL", 2**14)
    monkeypatch.setattr(optimizer_slices, "FUSED_NUMEL", 2**14)
    with LiveBytes() as live:
        net = nn.Sequential(nn.Embedding(2000, 128), *(nn.Linear(256, 512) for _ in range(8)))
        count = sum(parameter.numel() for parameter in net.parameters())
        chunks = chunks_of(net, 2**18, dtype=torch.bfloat16, in_place=in_place)
        optim = ChunkOptimizer(lambda groups: Adam(groups, **way), net.parameters(), chunks)
        live.forget()
        for _ in range(3):
            for parameter in net.parameters():
                memory, slot = chunks.place(parameter)
                memory.accumulate(slot, torch.ones(1, dtype=torch.bfloat16).expand(parameter.shape))
            optim.step()
            optim.zero_grad()
        live.mark("training")
    assert most - 1 < live.moments[0].total_bytes / count <= most
