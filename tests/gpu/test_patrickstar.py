"""PatrickStar's engine on a CUDA device: a tight budget and a wide one train alike."""

import pytest
import torch
from torch import nn

from atorch.patrickstar.profiler import profiler
from atorch.patrickstar.runtime import initialize_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MiB = 2**20


class Net(nn.Module):
    """Blocks of 8 MiB in fp16, a table of its own, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 1024)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)) for _ in range(8)
        )
        self.head = nn.Linear(1024, 1000)
        self.register_buffer("offset", torch.full((1024,), 0.1))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) + self.offset
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def train(budget_bytes: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses of the guide's loop, the state after it, and the bytes that were fetched."""
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 10},
        "gradient_clipping": 1.0,
        "client": {"mem_tracer": {"gpu_memory_bytes": budget_bytes, "overall_gpu_mem_ratio": 1.0}},
    }
    profiler.start()
    model, optimizer = initialize_engine(make, 0, config)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 16), generator=generator)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(tokens, labels=tokens)
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    profiler.end()
    assert profiler.recorded().device == "cuda:0"
    assert model.module.table.weight.device.type == "cpu"
    assert model.residency is not None
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}, model.residency.fetched_bytes


def test_a_tight_budget_and_a_wide_one_train_alike() -> None:
    wide, expected, none = train(4096 * MiB)
    tight, state, fetched = train(48 * MiB)
    assert none == 0
    assert fetched > 6 * 64 * MiB
    assert wide[-1] < wide[0]
    assert tight == pytest.approx(wide, rel=1e-2, abs=1e-2)
    before = make().state_dict()
    names = [name for name, _ in make().named_parameters()]
    one, other = (torch.cat([(each[name] - before[name]).flatten() for name in names]) for each in (state, expected))
    assert (one - other).norm() <= 0.1 * other.norm()  # Adam enlarges what rounding differs by
