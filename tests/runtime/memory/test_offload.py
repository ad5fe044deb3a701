"""An optimizer on the host: plain training bit for bit, whole parameters by share, to users one of the model."""

import copy
import logging
import os
from collections import defaultdict

import pytest
import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.runtime.memory.offload import HostOptimizer, host_threads, on_host, within
from atorch.runtime.precision.amp import LossScale, ScaledOptimizer, scale_loss
from atorch.runtime.precision.master_weights import MasterWeights, to_half, with_master_weights


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


MAKERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
}


def batches(count=4, rows=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 10, (rows,), generator=generator) for _ in range(count)]


def train(net, optim, data, schedule=None):
    losses = []
    for tokens in data:
        loss = net(tokens).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def same(net, twin):
    return all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))


def test_states_that_are_taken_away_are_gone():
    net, make = make_net(), MAKERS["adam"]
    twin = copy.deepcopy(net)
    optims = make(net.parameters()), HostOptimizer(make, twin.parameters())
    for _ in range(2):
        for each, optim in zip((net, twin), optims, strict=True):
            train(each, optim, batches())
            optim.state = defaultdict(dict)
    assert same(net, twin)
    assert len(optims[1].state) == len(optims[1].inner.state) == 0


@pytest.mark.parametrize(("name", "share"), [("sgd", 0.2), ("momentum", 0.7), ("adam", 1.0), ("adamw", 0.7)])
def test_training_is_the_plain_one_bit_for_bit(name, share):
    net, make = make_net(), MAKERS[name]
    twin = copy.deepcopy(net)
    optim = HostOptimizer(make, twin.parameters(), share)
    assert optim.shadows
    assert train(net, make(net.parameters()), batches()) == train(twin, optim, batches())
    assert same(net, twin)
    assert all(copied.grad is None for copied in optim.shadows.values())
    assert all(torch.equal(parameter, copied) for parameter, copied in optim.shadows.items())


@pytest.mark.parametrize(
    ("share", "taken", "chosen"),
    [
        (1.0, 0, [4, 1, 2, 3]),
        (0.0, 0, []),
        (0.5, 0, [4, 1]),
        (0.7, 0, [4, 1, 2]),
        (0.35, 0, [1, 2]),  # the first does not fit
        (0.5, 10, []),  # half of 20 are taken already
        (0.6, 10, [1]),
    ],
)
def test_whole_items_are_taken_in_order_each_that_still_fits(share, taken, chosen):
    sizes = [4, 1, 2, 0, 3]
    assert [size for size, is_chosen in zip(sizes, within(share, sizes, taken), strict=True) if is_chosen] == chosen


def test_what_waits_already_counts_and_is_left_alone():
    net = make_net()
    first, *others = net.parameters()
    optim = HostOptimizer(MAKERS["sgd"], net.parameters(), 0.5, away=[first])
    total = sum(p.numel() for p in net.parameters())
    assert first not in optim.shadows
    assert 40 + sum(p.numel() for p in optim.shadows) <= total / 2
    assert [id(each) for each in optim.shadows] == [id(others[1])], "a bias; 32 weights do not fit beside 40 of 98"


def test_what_is_frozen_or_without_a_gradient_stays_and_a_closure_is_refused():
    net = make_net()
    net[1].weight.requires_grad_(False)
    optim = HostOptimizer(MAKERS["adam"], net.parameters())
    assert net[1].weight not in optim.shadows
    before = net[3].bias.detach().clone()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    optim.step()
    assert torch.equal(net[3].bias, before)
    assert len(optim.state) == 1
    with pytest.raises(ArgumentError, match="leave out offload's optimizer"):
        optim.step(lambda: 0.0)


def test_overflows_are_skipped_and_sparse_gradients_are_stepped_as_sparse_ones():
    net, twin = (nn.Embedding(10, 4, sparse=True) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    plain = torch.optim.SparseAdam(net.parameters())
    hosted = HostOptimizer(torch.optim.SparseAdam, twin.parameters())
    for optim, table in ((plain, net), (hosted, twin)):
        table(torch.tensor([1, 1, 7])).square().sum().backward()
        optim.step()
    assert same(net, twin)
    net = make_net()
    scale = LossScale(2.0**16)
    optim = ScaledOptimizer(HostOptimizer(MAKERS["adam"], net.parameters()), scale)
    loss = scale_loss(lambda batch, output: output.square().mean(), scale)
    loss(None, net(batches(1)[0])).backward()
    net[3].bias.grad.fill_(float("inf"))
    before = copy.deepcopy(net)
    optim.step()
    assert optim.step_was_skipped
    assert same(net, before)


def test_groups_schedules_and_zero_grad_are_those_of_the_models_parameters():
    net = make_net()
    twin = copy.deepcopy(net)

    def groups(model):
        return [{"params": model[0].parameters(), "lr": 0.5}, {"params": [*model[1].parameters()]}]

    plain = torch.optim.SGD(groups(net), lr=0.1, momentum=0.9)
    hosted = HostOptimizer(lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), groups(twin))
    assert list(map(id, hosted.param_groups[1]["params"])) == list(map(id, twin[1].parameters()))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (plain, hosted)]
    train(net, plain, batches(), schedules[0])
    train(twin, hosted, batches(), schedules[1])
    assert same(net, twin)
    assert all(p.grad is None for p in twin[:2].parameters())
    hosted.add_param_group({"params": twin[3].parameters(), "lr": 0.2})
    assert list(map(id, hosted.param_groups[2]["params"])) == list(map(id, twin[3].parameters()))
    assert twin[3].weight in hosted.shadows


def test_states_are_exchanged_with_the_plain_optimizer_both_ways():
    net = make_net()
    twin, third = copy.deepcopy(net), copy.deepcopy(net)
    plain, hosted = MAKERS["adam"](net.parameters()), HostOptimizer(MAKERS["adam"], twin.parameters())
    train(net, plain, batches(2))
    train(twin, hosted, batches(2))
    resumed = HostOptimizer(MAKERS["adam"], third.parameters(), 0.5)
    third.load_state_dict(net.state_dict())
    resumed.load_state_dict(copy.deepcopy(plain.state_dict()))
    plain.load_state_dict(copy.deepcopy(hosted.state_dict()))
    for model, optim in ((net, plain), (twin, hosted), (third, resumed)):
        train(model, optim, batches(4)[2:])
    assert same(net, twin)
    assert same(net, third)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: nn.init.constant_(weight, 2.0),
        lambda weight: weight.data.fill_(2.0),
        lambda weight: setattr(weight, "data", torch.full_like(weight, 2.0)),
    ],
)
def test_weights_that_are_written_are_where_the_next_step_starts(write):
    net = make_net()
    optim = HostOptimizer(MAKERS["sgd"], net.parameters())
    write(net[1].weight)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    assert torch.equal(net[1].weight, torch.full_like(net[1].weight, 2.0) - 0.1)


def halved(net):
    values = to_half([net], torch.bfloat16)
    return with_master_weights(MAKERS["adam"], values=values), values


def test_masters_are_on_the_host_and_start_from_what_was_not_rounded():
    net = make_net()
    twin = copy.deepcopy(net)
    make, _ = halved(net)
    plain = make(net.parameters())
    make, values = halved(twin)
    hosted = HostOptimizer(make, twin.parameters(), values=values)
    assert isinstance(hosted.inner, MasterWeights)
    assert not set(hosted.inner.shadows) & set(twin.parameters())
    for optim, model in ((plain, net), (hosted, twin)):
        train(model, optim, batches())
    assert same(net, twin)
    masters = zip(plain.shadows.values(), hosted.inner.shadows.values(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in masters)
    saved = hosted.state_dict()
    assert saved["state"][0]["master"].dtype == torch.float32

    late = make_net()
    make, values = halved(late)
    resumed = HostOptimizer(make, late.parameters(), values=values)
    resumed.load_state_dict(saved)
    assert same(late, twin), "masters bring the weights with them"


def test_what_is_on_the_host_is_told():
    net = make_net()
    make, values = halved(net)
    scale = LossScale(1.0)
    optim = ScaledOptimizer(HostOptimizer(make, net.parameters(), values=values), scale, unscale=False)
    train(net, optim, batches(1))
    kept = list(on_host(optim))
    elements = sum(p.numel() for p in net.parameters())
    assert sum(each.nbytes for each in kept) == elements * (2 + 4 + 8) + 4 * 5  # and five counters of steps
    assert not list(on_host(MAKERS["adam"](net.parameters())))


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "cores", "processes", "before", "inside"),
    [(CUDA, 64, 8, 1, 8), (CUDA, 4, 8, 1, 1), (CUDA, 64, 8, 3, 3), (CPU, 64, 8, 1, 1)],
)
def test_a_share_of_the_cores_while_the_host_steps(device, cores, processes, before, inside, monkeypatch, caplog):
    had, seen = torch.get_num_threads(), []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    torch.set_num_threads(before)
    try:
        with caplog.at_level(logging.INFO, "atorch"), host_threads(device):
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(had)
    assert seen == [inside, before]
    assert ("the host steps with 8 threads" in caplog.text) == (inside > before)
