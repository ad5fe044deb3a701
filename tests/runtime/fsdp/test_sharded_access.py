"""Between passes a sharded model's parameters are those that its optimizer has, whatever is kept for backward."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from atorch.errors import ArgumentError, StrategyError
from atorch.runtime.fsdp.groups import FsdpUnit
from atorch.runtime.fsdp.shard import shard
from atorch.runtime.fsdp.sharded_access import ModelShard, step_as_ordinary
from tests.auto.training import assert_trains_like_plain
from tests.pool import Pool, on_ranks
from tests.runtime.sharing import whole

WIDTH = 5
both = pytest.mark.parametrize("reshard", [True, False])


class Model(nn.Module):
    """Layers that are freed after forward, between two that are kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def made(size: int = 0, reshard: int | None = None, **options: Any) -> Model:
    """The same model every time, sharded over `size` ranks if that is not 0."""
    torch.manual_seed(0)
    model = Model()
    if size:
        groups = [*(FsdpUnit((each,)) for each in model.layers), FsdpUnit((model.head,), keep=True)]
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
        shard(model, mesh, groups, reshard_after_forward=reshard, **options)
    return model


def penalty(model: nn.Module) -> Any:
    return 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


def written(model: Model, optim: torch.optim.Optimizer, x: Tensor) -> None:
    model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        model.head.weight.data.clamp_(-0.1, 0.1)
    model(x).square().mean().backward()


def frozen(model: Model, optim: torch.optim.Optimizer, x: Tensor) -> None:
    loss = model(x).square().mean()
    model.head.bias.requires_grad = False
    model.layers[0].bias.requires_grad_(False)
    loss.backward()


def another_optimizer(model: Model, optim: torch.optim.Optimizer, x: Tensor) -> None:
    loss = model(x).square().mean()
    other = torch.optim.SGD(model.head.parameters(), lr=0.3)
    loss.backward()
    other.step()


LOOPS: Mapping[str, Callable[[Any, torch.optim.Optimizer, Tensor], object]] = {
    "penalty after": lambda model, optim, x: (model(x).square().mean() + penalty(model)).backward(),
    "penalty before": lambda model, optim, x: (penalty(model) + model(x).square().mean()).backward(),
    "penalty alone": lambda model, optim, x: [model(x).square().mean().backward(), penalty(model).backward()],
    "norms": lambda model, optim, x: (model(x).mean() + sum(map(torch.norm, model.layers.parameters()))).backward(),
    "head by hand": lambda model, optim, x: F.linear(model(x), model.head.weight).square().mean().backward(),
    "written": written,
    "frozen": frozen,
    "another optimizer": another_optimizer,
}


def trained(rank: int, size: int, loop: str, reshard: int | None) -> float:
    """The largest difference from plain training."""
    models = made(size, reshard), made()
    data = torch.randn(3, size * 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for model, mine in zip(models, (data.chunk(size, 1)[rank], data), strict=True):
        optim = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        for x in mine:
            LOOPS[loop](model, optim, x)
            optim.step()
            optim.zero_grad()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(float((whole(mine) - theirs.detach()).abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize(("reshard", "ranks"), [(None, 2), (False, 2), (2, 4)])  # 2: kept on fewer processes
def test_loops_that_touch_parameters_train_as_plain_ones(pool: Pool, reshard: int | None, ranks: int) -> None:
    loops = LOOPS if ranks == 2 else ["penalty before", "written"]
    assert_trains_like_plain(pool, trained, [(loop, reshard) for loop in loops], ranks, band=1e-6)


@on_ranks()
def test_what_cannot_be_outside_of_forward_is_named(rank: int, size: int) -> None:
    model, x = made(size), torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"embed.weight is sharded while its model does not run.*linear takes"):
            model.features(x)
        with pytest.raises(ArgumentError, match=r"embed.weight is sharded, and its shards cannot be laid out.*view"):
            parameters_to_vector(model.parameters())
        out = model(x)
        with pytest.raises(ArgumentError, match=r"torch.autograd.grad was asked for the gradient of embed.weight"):
            torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True)
        with pytest.raises(ArgumentError, match=r"create_graph=True.*beyond fsdp and zero2"):
            torch.autograd.grad(out.sum(), x, create_graph=True)
        out.sum().backward()
    assert torch.equal(x.grad, 2 * torch.autograd.grad(made()(x).sum(), x)[0])


@on_ranks(1)
def test_in_a_step_parameters_are_ordinary_and_16_bits_that_are_kept_read_as_they_are(rank: int, size: int) -> None:
    model = made(size)
    optim, kinds = step_as_ordinary(torch.optim.SGD(model.parameters(), lr=0.1)), []
    optim.register_step_pre_hook(lambda *_: kinds.append({type(each) for each in model.parameters()}))
    model(torch.ones(2, WIDTH)).sum().backward()
    optim.step()
    assert [*kinds, {type(each) for each in model.parameters()}] == [{DTensor}, {ModelShard}]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = made(size, False, mp_policy=policy)
    plain, before = made(), list(model.parameters())
    loss = model(torch.ones(2, WIDTH)).float().sum()
    between = list(model.parameters())
    for mine, held, theirs in zip(between, before, plain.parameters(), strict=True):
        assert (mine.dtype, mine.shape, mine.is_leaf) == (torch.float32, theirs.shape, True)
        assert float(mine.sum()) == pytest.approx(float(theirs.sum()), abs=1e-6)
        assert torch.equal(whole(mine), theirs.detach())
        assert type(copy.deepcopy(mine)) is type(copy.deepcopy(held)) is DTensor
        mine.grad = torch.zeros_like(mine)
        assert held.grad is mine.grad
        stored = io.BytesIO()
        torch.save([mine.detach(), held.detach()], stored)
    loss.backward()
    assert all(isinstance(each.grad, DTensor) and each.grad.abs().sum() for each in model.head.parameters())


def numbers(model: nn.Module) -> list[float]:
    """What scripts read of gradients and parameters, in the ways that they do."""
    held = list(model.parameters())
    gradients = [each.grad for each in held if each.grad is not None]
    total = torch.zeros(())
    for each in gradients:
        total += each.norm() ** 2
    unit = held[1].detach().norm().clamp_(min=1e-3).mul_(0.01)
    steps = torch.where(gradients[1].norm() < unit, gradients[1], gradients[1] * (unit / gradients[1].norm()))
    norms = torch.stack([each.norm() for each in gradients])
    return [
        *(each.norm().item() for each in (*held, *gradients)),
        *(float(each.abs().max()) for each in gradients),
        float((gradients[0] * held[0].data).sum() < 0),
        float(f"{gradients[1].mean():.6f}"),
        *gradients[1].tolist(),
        float(total),
        norms.norm().item(),
        float(torch.nn.utils.clip_grad_norm_(held, 1e9, norm_type=float("inf"))),
        steps.square().sum().item(),
    ]


def narrow() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


@both
@on_ranks()
def test_numbers_that_a_script_reads_are_those_of_the_whole(rank: int, size: int, reshard: bool) -> None:
    plain, model = narrow(), narrow()
    shard(model, init_device_mesh("cpu", (size,), mesh_dim_names=("data",)), [], reshard_after_forward=reshard)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for each in (plain, model):
        each(x).square().sum().backward()
    assert numbers(model) == pytest.approx(numbers(plain), rel=1e-4, abs=1e-6)
    assert model[0].weight.grad.to_local().norm() < plain[0].weight.grad.norm()  # what is asked for, is given


@on_ranks()
def test_one_process_that_reads_alone_is_told_on_all(rank: int, size: int) -> None:
    model = made(size)
    x = torch.randn(4, WIDTH)
    model(x).sum().backward()
    with pytest.raises(StrategyError, match="reads what is sharded"):
        model.head.weight.grad.norm().item() if rank == 0 else model(x)


class Mixed(nn.Module):
    """A block with weights of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x.bfloat16()).float()


@on_ranks()
def test_a_block_may_have_two_dtypes(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(Mixed(), Mixed()), torch.randn(size, 4, WIDTH)
    model = copy.deepcopy(plain)
    shard(model, init_device_mesh("cpu", (size,)), [FsdpUnit((each,)) for each in model])
    plain(x.flatten(0, 1)).square().mean().backward()
    model(x[rank]).square().mean().backward()
    assert not isinstance(model[0].scale, DTensor)
    assert isinstance(model[0].inner.weight, DTensor)
    for mine, held in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad).float(), held.grad.float(), rtol=3e-2, atol=1e-3)
