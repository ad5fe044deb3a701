"""Small jobs to plan, and methods that go wrong on purpose."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.job import make_context
from atorch.auto.strategy import METHODS, Method, Phase, method
from atorch.cluster.spec import ClusterSpec, DeviceSpec, LinkSpec
from atorch.distributed import world as worlds
from atorch.errors import StrategyError

# Methods that need seconds to start; what is tested here is the search.
SLOW = ("compile",)


class Layer(nn.Module):
    """A linear layer, batch norm, and a non-persistent count of what it saw."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x + self.drop(torch.relu(self.norm(self.linear(x))))


def net(width: int = 16, layers: int = 3) -> nn.Module:
    """A stack of layers with a head."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers)), nn.Linear(width, 4))


def cluster(world_size: int = 1, memory_bytes: float = 2.0**33) -> ClusterSpec:
    """A CPU with round figures."""
    link = LinkSpec(bandwidth=1e9, latency_s=1e-4)
    device = DeviceSpec(
        type="cpu", name="toy", memory_bytes=memory_bytes, memory_bandwidth=1e10, launch_s=5e-6,
        peak_flops={"float32": 1e11, "bfloat16": 4e11, "float16": 1e11},
    )  # fmt: skip
    return ClusterSpec(device=device, devices_per_node=world_size, intra_node=link, inter_node=link)


def context(model: nn.Module | None = None, **changes):
    """A job of regression on noise, on all processes there are."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 4))
    size = dist.get_world_size() if dist.is_initialized() else 1
    ctx = make_context(
        net() if model is None else model, torch.optim.AdamW, data,
        lambda batch, output: nn.functional.mse_loss(output, batch[1]),
        dataloader_args={"batch_size": 8, "shuffle": True}, world=worlds.init("cpu"), cluster=cluster(size),
    )  # fmt: skip
    return replace(ctx, call_model=lambda module, batch: module(batch[0]), **changes)


@contextmanager
def sabotage(how: str, rank: int) -> Iterator[None]:
    """While inside, a method `sabotage` exists, fast by its own account, that goes wrong on one rank."""

    @method("sabotage", phase=Phase.STEP)
    class Sabotage(Method):
        how: Literal["check", "optimizer", "apply", "step", "memory", "late", "nan", "wrong", "stuck", "none"] = "none"
        rank: int = 0

        def cost(self, cost):
            return replace(cost, traffic_scale=0.0, ops_scale=0.0)

        def check(self, ctx):
            _refuse(self, "check", ctx)

        def check_optimizer(self, ctx):
            _refuse(self, "optimizer", ctx)

        def apply(self, ctx):
            mine = ctx.world.rank == self.rank
            if self.how == "apply" and mine:
                raise ValueError("cannot be applied here")
            while self.how == "stuck" and mine:
                calls = []  # as a compiler that does not come to an end
            inner, calls = ctx.loss_func, []

            def loss_func(batch, output):
                calls.extend([None] * torch.is_grad_enabled())
                loss = inner(batch, output)
                if self.how == "step" and mine and len(calls) == 3:
                    raise RuntimeError("broke in the third step")
                if self.how == "memory" and mine:
                    raise MemoryError("a terabyte is not here")
                factor = {"nan": float("nan"), "wrong": 0.5}.get(self.how, 1.0) if mine else 1.0
                return loss * factor

            return replace(ctx, loss_func=loss_func)

        @classmethod
        def choices(cls, profile, cluster):
            yield cls(how=how, rank=rank)

    try:
        yield
    finally:
        METHODS.remove("sabotage")


def _refuse(method, how, ctx):
    if method.how == how and ctx.world.rank == method.rank:
        raise StrategyError(f"sabotage goes with no {how}; leave it out")
