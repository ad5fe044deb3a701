"""The documented configurations of half, and training in 16 bits that loses nothing small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atorch import auto_accelerate
from atorch.auto.opt_lib.half import Half
from atorch.cluster.spec import ClusterSpec
from tests.auto.training import accelerate, run_each
from tests.contract.job import deviation
from tests.pool import Pool


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(None, "fp16"), ("fp16", "fp16"), ("bf16", "bf16"), (torch.bfloat16, "bf16"), ({"dtype": "bf16"}, "bf16")],
)
def test_documented_configurations(config: Any, dtype: str) -> None:
    assert Half.of(config).dtype == dtype


def test_16_bits_by_hardware_model_and_optimizer() -> None:
    assert Half.of("bf16").unmet(ClusterSpec.load("v100_32g")) is not None

    assert Half().settled(Net().bfloat16()).dtype == "bf16"
    assert Half().settled(Net()).dtype == "fp16"
    assert Half(dtype="fp16").settled(Net().bfloat16()).dtype == "fp16"

    _, result, _ = auto_accelerate(Net(), load_strategy=["half"])
    assert result.optim is None
    assert next(result.model.parameters()).dtype == torch.float16

    result, _ = train([("half", "bf16")])
    x, places = torch.randn(2, 4), torch.tensor(1)
    expected = result.model(x.bfloat16(), places)
    assert torch.equal(result.model(x, places=places), expected), "as under fsdp"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        assert places.dtype == torch.int64
        output: torch.Tensor = self.body(x)
        return output


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=generator), "places": torch.tensor(index)}


def loss_func(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, torch.ones_like(output))


def train(strategy: Any, lr: float = 0.1, steps: int = 4) -> Any:
    more = {"optim_args": {"lr": lr}, "model_input_format": "unpack_dict"}
    result = accelerate(Net(), strategy, Rows(), loss_func, batch_size=4, **more)
    losses = [result.step(batch) for _ in range(steps // 4) for batch in result.dataloader]
    return result, losses


FP16 = {"dtype": "fp16", "init_scale": 2.0**8}  # few numbers here, so gradients are large: the usual scale would skip


@pytest.mark.parametrize(("config", "dtype"), [(FP16, torch.float16), ("bf16", torch.bfloat16)])
def test_the_loop_trains_in_16_bits(config: Any, dtype: torch.dtype) -> None:
    result, losses = train([("half", config)])
    plain, expected = train([])
    assert {parameter.dtype for parameter in result.model.parameters()} == {dtype}
    assert losses[0].dtype == torch.float32  # losses are computed under autocast
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=2e-2, atol=2e-2)
    batch = result.prepare_input(next(iter(result.dataloader)), torch.device("cpu"))
    assert batch["x"].dtype == dtype
    for mine, theirs in zip(result.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=2e-2, atol=2e-2)


def test_a_learning_rate_too_small_for_bf16_still_learns() -> None:
    result, losses = train([("half", "bf16")], lr=2e-3, steps=200)
    _, expected = train([], lr=2e-3, steps=200)
    assert float(expected[-1]) < 0.9 * float(expected[3])
    assert float(losses[-1]) == pytest.approx(float(expected[-1]), rel=2e-2)
    plain = Net().bfloat16()
    optim = torch.optim.SGD(plain.parameters(), lr=1e-5)
    before = plain.body[0].weight.detach().clone()
    for _ in range(10):
        loss_func(None, plain(torch.ones(2, 4).bfloat16(), torch.tensor(0))).backward()
        optim.step()
    assert torch.equal(plain.body[0].weight, before)  # which is what masters are for


@pytest.mark.slow
def test_ranks_train_together(pool: Pool) -> None:
    bands: list[tuple[Any, float]] = [("amp_native", 1e-2), (("half", "fp16"), 1e-2), (("half", "bf16"), 5e-2)]
    cases = [([precision, *sharding],) for precision, _ in bands for sharding in ([], ["zero1"])]
    for case, by_rank in zip(cases, run_each(pool, deviation, cases), strict=True):
        for update_error, loss_error in by_rank:
            assert update_error < dict(bands)[case[0][0]], case
            assert loss_error < 1e-2, case

    first, second = pool.run(differing_ranks)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def differing_ranks(rank: int, size: int) -> list[torch.Tensor]:
    """Ranks that start from other weights: rank 0's must be everybody's, the masters' low bits included."""
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * rank
    result = accelerate(model, [("half", "bf16")], None, loss_func)
    for _ in range(10):
        loss_func(None, result.model(torch.ones(2, 4).bfloat16(), torch.tensor(0))).backward()
        result.optim.step()
        result.optim.zero_grad()
    return [parameter.detach().float() for parameter in result.model.parameters()]
