"""Models and losses that communicate are held to training on one process, and are never waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from atorch import auto_accelerate
from atorch.errors import StrategyError
from tests.pool import Pool

WIDTH, ROWS = 6, 8
PIPELINE = [("parallel_mode", ([("pipeline", 2)], None)), "pipeline_parallel"]


class Gathered(torch.autograd.Function):
    """Of all processes that there are, as CLIP's loss has it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def gathered(own: Tensor) -> Tensor:
    return Gathered.apply(own) if dist.is_initialized() and dist.get_world_size() > 1 else own


def loss_func(batch: Any, output: Tensor) -> Tensor:
    logits = 4 * gathered(output) @ gathered(F.normalize(batch[1], dim=-1)).T
    return F.cross_entropy(logits, torch.arange(len(logits)))


class Codes(nn.Module):
    """A block that counts over all processes in its forward pass, whether there are several or not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return x + torch.tanh(self.inner(x - mean))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = Codes if block is Codes else lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.blocks = nn.Sequential(*[make() for _ in range(4)])

    def forward(self, batch: Any) -> Tensor:
        return F.normalize(self.blocks(batch[0]), dim=-1)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(2 * ROWS, WIDTH, generator=generator) for _ in range(2)))


def trained(block: type[nn.Module], **given: Any) -> tuple[list[float], str]:
    """The losses of two steps, and the strategy."""
    _, result, best = auto_accelerate(
        Net(block), torch.optim.SGD, samples(), loss_func, optim_args={"lr": 0.5}, dataloader_args={"batch_size": ROWS},
        **given,
    )  # fmt: skip
    return [float(result.step(batch)) for batch in result.dataloader], str(best)


def over_two(rank: int, size: int, block: type[nn.Module]) -> dict[str, Any]:
    found: dict[str, Any] = {"ddp": trained(block, load_strategy=["ddp"])[0]}
    losses, best = trained(block, time_limit=5, calibration=False, verify=block is Codes, excluded=["compile"])
    found["automatic"], found["chosen"] = losses, best
    for verify in (True, False):
        with pytest.raises(StrategyError) as error:
            trained(block, load_strategy=PIPELINE, verify=verify)
        found[f"pipeline, verify={verify}"] = str(error.value)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("block", [nn.Linear, Codes], ids=["in the loss", "in forward, too"])
def test_what_communicates_trains_as_on_one_process(pool: Pool, block: type[nn.Module]) -> None:
    expected = trained(block, load_strategy=[])[0]
    for each in pool.run(over_two, block):
        assert each["ddp"] == pytest.approx(expected, rel=1e-4)
        assert each["automatic"] == pytest.approx(expected, rel=1e-2)
        assert "pipeline" not in each["chosen"]
        for verify in (True, False):
            assert "calls collectives" in each[f"pipeline, verify={verify}"]
