"""Fused kernels by default train alike, and leave alone what the user chose; a group is of the model."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from atorch.errors import ArgumentError
from atorch.runtime.optimizer.user_optimizer import keep_to
from atorch.runtime.optimizer.wrapped_optimizer import fuse, fused_by_default


class Taking(nn.Sequential):
    def take_parameters(self, parameters):
        self.taken = list(parameters)


def kept(kind=Taking):
    model = kind(nn.Linear(2, 2), nn.Linear(2, 2))
    optim = torch.optim.SGD(model[0].parameters(), lr=0.1)
    keep_to(model, optim)
    return model, optim


GROUPS = [lambda module: module.parameters(), lambda module: module.weight, lambda module: [("w", module.weight)]]


@pytest.mark.parametrize("group", GROUPS[:2])
def test_parameters_of_the_model_are_taken(group):
    model, optim = kept()
    model.append(nn.Linear(2, 3))
    for module in (model[1], model[2]):
        optim.add_param_group({"params": group(module), "lr": 0.2})
    assert optim.param_groups[2]["params"][0] is model.taken[0] is model[2].weight
    assert [each["lr"] for each in optim.param_groups] == [0.1, 0.2, 0.2]


@pytest.mark.parametrize("group", GROUPS)
def test_other_parameters_are_refused_but_by_a_copy(group):
    _, optim = kept()
    with pytest.raises(ArgumentError, match="optim.add_param_group was given a parameter of shape .* submodule of it"):
        optim.add_param_group({"params": group(nn.Linear(2, 3))})
    for what_torch_refuses in ({"params": [3]}, [3]):
        with pytest.raises(TypeError):
            optim.add_param_group(what_torch_refuses)
    assert len(optim.param_groups) == 1
    twin = copy.deepcopy(optim)
    twin.add_param_group({"params": nn.Linear(2, 3).parameters()})
    assert len(twin.param_groups) == 2


def test_later_ones_are_refused_where_nothing_reduces_them():
    model, optim = kept(nn.Sequential)
    model.append(nn.Linear(2, 3))
    optim.add_param_group({"params": model[1].parameters()})
    with pytest.raises(ArgumentError, match="did not have when it was accelerated"):
        optim.add_param_group({"params": model[2].parameters()})


KINDS = {
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.1),
    "amsgrad": partial(Adam, lr=0.02, amsgrad=True, maximize=True),
    "tensor": partial(Adam, lr=torch.tensor(0.02)),
    "momentum": partial(SGD, lr=0.02, momentum=0.9, nesterov=True),
    "sgd": partial(SGD, lr=torch.tensor(0.02), weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=0.02, lr_decay=0.1),
}
STEPS = 5


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in ((33, 17), (65,), (), (4, 3, 2, 2))]
    made.append(made[-1].clone(memory_format=torch.channels_last))
    return [nn.Parameter(each.bfloat16().to(dtype)) for each in made]


def train(optimizer: Optimizer, mine: list[nn.Parameter], seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        for each in mine:
            each.grad = torch.empty_like(each).copy_(torch.randn(each.shape, generator=generator).bfloat16())
        optimizer.step()


def error(mine: list[nn.Parameter], theirs: list[nn.Parameter], start: list[nn.Parameter]) -> float:
    """The norm of the updates' difference, against the update's."""
    with torch.no_grad():
        apart = [(a.double() - b.double()).square().sum() for a, b in zip(mine, theirs, strict=True)]
        moved = [(b.double() - c.double()).square().sum() for b, c in zip(theirs, start, strict=True)]
    return float((sum(apart) / sum(moved)).sqrt())


def made(make: object, mine: list[nn.Parameter]) -> Optimizer:
    optimizer = make(mine)
    fuse(optimizer)
    assert optimizer.param_groups[0]["fused"]
    return optimizer


@pytest.mark.parametrize("name", KINDS)
def test_the_same_training(name: str) -> None:
    plain, twin, start = parameters(), parameters(), parameters()
    train(KINDS[name](plain), plain)
    optimizer = made(KINDS[name], twin)
    train(optimizer, twin)
    assert optimizer.param_groups[0]["fused"]
    assert fused_by_default(optimizer) == type(optimizer).__name__
    assert error(twin, plain, start) < 2e-6


@pytest.mark.parametrize("name", KINDS)
def test_16_bits_are_rounded_once_a_step_instead_of_at_every_operation(name: str) -> None:
    exact, start = parameters(torch.float64), parameters(torch.float64)
    train(KINDS[name](exact), exact)
    errors = []
    for choose in (lambda optimizer: None, fuse):
        mine = parameters(torch.bfloat16)
        optimizer = KINDS[name](mine)
        choose(optimizer)
        train(optimizer, mine)
        errors.append(error(mine, exact, start))
    assert errors[1] < 1.05 * errors[0] < 0.5  # also where torch's kernel is known to be wrong


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_fused", [False, True], ids=["from fused", "into fused"])
def test_states_go_both_ways(name: str, is_fused: bool) -> None:
    plain, start = parameters(), parameters()
    straight = KINDS[name](plain)
    train(straight, plain, 1)
    train(straight, plain, 2)
    mine = parameters()
    first = KINDS[name](mine) if is_fused else made(KINDS[name], mine)
    train(first, mine, 1)
    second = made(KINDS[name], mine) if is_fused else KINDS[name](mine)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.param_groups[0]["fused"]  # without us, by what was loaded
    train(second, mine, 2)
    assert error(mine, plain, start) < 3e-6


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("what", ["gradient", "state", "parameter"])
def test_what_lies_in_another_order_is_stepped_right(name: str, what: str) -> None:
    def turned(tensor: Tensor) -> Tensor:
        return tensor.detach().t().contiguous().t()

    def begin(make: object) -> tuple[nn.Parameter, Optimizer]:
        mine = nn.Parameter(torch.arange(12.0).view(3, 4) / 12)
        optimizer = make([mine])
        mine.grad = (torch.arange(12.0).view(3, 4) - 5).sin()
        optimizer.step()
        return mine, optimizer

    ends = []
    for make in (KINDS[name], lambda groups: made(KINDS[name], groups)):
        mine, optimizer = begin(make)
        if what == "parameter":
            mine.data = torch.zeros(3, 8)[:, ::2].copy_(mine.data)  # with gaps, as its gradient
            mine.grad = torch.zeros(3, 8)[:, ::2].copy_(mine.grad)
        elif what == "gradient":
            mine.grad = turned(mine.grad)
        else:
            saved = optimizer.state_dict()
            for state in saved["state"].values():
                state.update({k: turned(v) for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 2})
            optimizer.load_state_dict(saved)
        for _ in range(2):
            optimizer.step()
        ends.append(mine.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", [partial(SGD, lr=0.1), partial(Adagrad, lr=0.1)], ids=["sgd", "adagrad"])
def test_sparse_gradients_are_stepped_as_before(make: object) -> None:
    ends = []
    for make_one in (make, lambda groups: made(make, groups)):
        torch.manual_seed(0)
        table = nn.Embedding(7, 3, sparse=True)
        optimizer = make_one(table.parameters())
        for _ in range(2):
            table(torch.tensor([1, 1, 4])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(table.weight.detach())
    assert torch.equal(*ends)
    assert fused_by_default(optimizer) is None


def test_closures_late_gradients_and_grad_scalers_work_as_before() -> None:
    ends, closed = [], []
    for choose in (lambda make: make, lambda make: partial(made, make)):
        mine = parameters()
        optimizer = choose(KINDS["momentum"])(mine)
        for each in (mine[:1], mine, mine):
            train(optimizer, each)
        ends.append(mine)
        only = nn.Parameter(torch.arange(12.0).view(3, 4))

        def closure(only: nn.Parameter = only) -> float:
            only.grad = (torch.arange(12.0).view(4, 3) - 5).t()
            return 0.0

        choose(KINDS["adamw"])([only]).step(closure)
        closed.append(only.detach())
    assert error(*reversed(ends), parameters()) < 2e-6
    torch.testing.assert_close(*closed)
    plain, twin = parameters(), parameters()
    for mine, optimizer in ((plain, KINDS["adamw"](plain)), (twin, made(KINDS["adamw"], twin))):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            for each in mine:
                each.grad = None
            scaler.scale(sum((factor * each.sin()).sum() for each in mine)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert error(twin, plain, parameters()) < 2e-6


@pytest.mark.parametrize("said", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}])
def test_users_who_said_how_to_step_are_heard(said: dict[str, bool]) -> None:
    optimizer = AdamW(parameters(), **said)
    before = copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    fuse(optimizer)
    assert {k: v for k, v in optimizer.param_groups[0].items() if k != "params"} == before
    assert fused_by_default(optimizer) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_simulated_parameters_are_fused_as_real_ones(device: str) -> None:
    with FakeTensorMode():
        mine = nn.Parameter(torch.zeros(3, 5, device=device))
        optimizer = made(KINDS["adamw"], [mine])
        mine.grad = torch.zeros_like(mine)
        optimizer.step()
    assert optimizer.param_groups[0]["fused"]


class Own(AdamW):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamW([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]),
        lambda: AdamW([nn.Parameter(torch.zeros(3, device="meta"))]),
        lambda: Own(parameters()),
        lambda: RMSprop(parameters()),
    ],
    ids=["complex", "meta", "inherits", "no kernel"],
)
def test_what_no_kernel_takes_is_left_alone(make: object) -> None:
    optimizer = make()
    fuse(optimizer)
    assert not optimizer.param_groups[0].get("fused")
    assert fused_by_default(optimizer) is None


def test_groups_choose_by_themselves() -> None:
    first, *others = parameters()
    optimizer = AdamW([{"params": [first], "foreach": False}, {"params": others}])
    fuse(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [None, True]
    assert optimizer.defaults["fused"] is None
