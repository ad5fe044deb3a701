"""Half precision with fp32 masters: nothing small is lost, and the optimizer looks like one of the model's weights."""

import pytest
import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.runtime.precision.master_weights import cast_inputs, to_half, with_master_weights

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def sgd(groups, **more):
    return torch.optim.SGD(groups, **{"lr": 0.1, **more})


def make_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def halved(dtype=torch.bfloat16, make=sgd, scale=lambda: 1.0, net=None):
    net = net or make_net()
    values = to_half([net], dtype)
    return net, with_master_weights(make, scale, values)(net.parameters())


def masters(optim):
    return list(optim.shadows.values())


def set_gradients(net, value=1.0):
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, value)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.ones(3))
        self.register_buffer("places", torch.arange(3))
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))


@HALVES
def test_only_floating_point_is_cast_and_values_go_with_their_parameters(dtype):
    module = Odd()
    weight = module.weight
    values = to_half([module], dtype)
    assert module.weight is weight
    assert module.weight.dtype == module.table.dtype == dtype
    assert module.places.dtype == torch.int64
    assert module.turns.dtype == torch.complex64
    assert values[weight].dtype == torch.float32
    del weight, module.weight
    assert not values


def test_inputs_are_cast_wherever_they_are():
    prepare = cast_inputs(lambda data, device: {**data, "device": device}, torch.bfloat16)
    tokens, pixels = torch.arange(3), torch.ones(2, dtype=torch.float64)
    made = prepare({"tokens": tokens, "more": [(pixels, "name")]}, "cpu")
    assert made["tokens"] is tokens
    assert made["more"][0][0].dtype == torch.bfloat16
    assert made["more"][0][1] == "name"
    assert made["device"] == "cpu"


@HALVES
def test_masters_start_from_what_was_there_before_rounding_or_what_was_written_since(dtype):
    net, before = make_net(), list(make_net().parameters())
    values = to_half([net], dtype)
    with torch.no_grad():
        net[0].weight.fill_(0.5)
        before[0].fill_(0.5)
    for master, value in zip(masters(with_master_weights(sgd, values=values)(net.parameters())), before, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(master, value)


@HALVES
def test_training_is_the_fp32_one_on_rounded_weights(dtype):
    net, optim = halved(dtype, make=lambda groups: torch.optim.AdamW(groups, lr=0.01))
    theirs = make_net()
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        for mine, other in zip(net.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).to(dtype)
            other.grad = mine.grad.float()
        optim.step()
        reference.step()
    for mine, master, other in zip(net.parameters(), masters(optim), theirs.parameters(), strict=True):
        assert torch.equal(master, other)
        assert torch.equal(mine, other.to(dtype))
    assert all(master.grad is None for master in masters(optim))


def test_gradients_are_unscaled_in_fp32_and_a_closure_is_refused():
    net, optim = halved(torch.float16, scale=lambda: 2.0**16)
    before = masters(optim)[0].detach().clone()
    set_gradients(net, 2.0**-10)  # un-scaled it is 2⁻²⁶, which fp16 does not hold
    optim.step()
    moved = (before.double() - 0.1 * 2.0**-26).float()
    assert torch.equal(masters(optim)[0], moved)
    with pytest.raises(ArgumentError, match="closure"):
        halved()[1].step(lambda: 1.0)


def test_groups_show_the_models_parameters_and_reach_the_inner_optimizer():
    net = make_net()
    values = to_half([net], torch.bfloat16)
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    optim = with_master_weights(sgd, values=values)(groups)
    assert isinstance(optim, torch.optim.Optimizer)
    assert [group["lr"] for group in optim.param_groups] == [0.5, 0.1]
    assert [p for group in optim.param_groups for p in group["params"]] == list(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 0.0)
    before = [master.detach().clone() for master in masters(optim)]
    set_gradients(net)
    optim.step()
    scheduler.step()
    assert all(torch.equal(master, value) for master, value in zip(masters(optim), before, strict=True))
    optim.param_groups[1]["lr"] = 1.0
    optim.step()
    moved = [not torch.equal(master, value) for master, value in zip(masters(optim), before, strict=True)]
    assert moved == [False, False, True, True]
    optim.zero_grad()
    assert all(parameter.grad is None for parameter in net.parameters())


def test_named_parameters_and_added_groups():
    net = make_net()
    to_half([net], torch.bfloat16)
    optim = with_master_weights(sgd)(net.named_parameters())
    assert optim.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    extra = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optim.add_param_group({"params": [("extra", extra)], "lr": 2.0**-10})
    assert optim.param_groups[1]["params"] == [extra]
    extra.grad = torch.ones_like(extra)
    for _ in range(4):
        optim.step()
    assert (masters(optim)[-1] == 1 - 2.0**-8).all()


def test_frozen_and_fp32_parameters_have_no_master():
    net = make_net()
    net[0].requires_grad_(False)
    values = to_half([net], torch.bfloat16)
    temperature = nn.Parameter(torch.ones(1))
    optim = with_master_weights(sgd, lambda: 4.0, values)([*net.parameters(), temperature])
    assert len(masters(optim)) == 2
    temperature.grad = torch.tensor([4.0])
    optim.step()
    assert temperature.item() == pytest.approx(0.9)
    frozen = net[0].weight.requires_grad_()
    nn.init.ones_(frozen)
    for _ in range(8):
        frozen.grad = torch.full_like(frozen, 4 * 2.0**-8)
        temperature.grad = None
        optim.step()
    torch.testing.assert_close(masters(optim)[-1], torch.full((8, 4), 1 - 0.1 * 2.0**-5))


def test_written_weights_are_not_overwritten_by_old_masters():
    net, optim = halved()
    set_gradients(net)
    optim.step()
    kept = masters(optim)[2].detach().clone()
    with torch.no_grad():
        net[0].weight.fill_(0.25)
        net[2].weight.copy_(net[2].weight.clone())  # written, not changed
    optim.zero_grad()
    net[0].bias.grad = torch.ones_like(net[0].bias)
    optim.step()
    assert (net[0].weight == 0.25).all()
    assert (masters(optim)[0] == 0.25).all()
    assert torch.equal(masters(optim)[2], kept)
    net, optim = halved()
    for _ in range(2):  # as in loops that clip weights after each step, or put back those that they had
        set_gradients(net)
        optim.step()
        net[0].weight.data[1, 2] += 0.5
        net[2].weight.data = net[2].weight.data * 0.5
    before = [net[0].weight.detach().float(), net[2].weight.detach().float()]
    set_gradients(net, 0.0)
    optim.step()
    assert all(torch.equal(a, b.detach().float()) for a, b in zip(before, (net[0].weight, net[2].weight), strict=True))
