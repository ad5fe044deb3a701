"""The documented configurations of amp_native, and what they do to a training loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from atorch import clip_grad_norm
from atorch.auto.opt_lib.amp_native import AmpNative
from atorch.cluster.spec import ClusterSpec
from atorch.runtime.precision.amp import ScaledOptimizer
from tests.auto.training import accelerate, run_each
from tests.pool import Pool


@pytest.mark.parametrize(
    ("config", "dtype", "skips"),
    [
        (None, "fp16", False),
        ("fp16", "fp16", False),
        ("bf16", "bf16", False),
        (torch.bfloat16, "bf16", False),
        ({"dtype": torch.float16}, "fp16", False),
        ({"dtype": "bfloat16"}, "bf16", False),
        ({"dtype": torch.bfloat16, "skip_if_nonfinite": True}, "bf16", True),
    ],
)
def test_documented_configurations(config: Any, dtype: str, skips: bool) -> None:
    method = AmpNative.of(config)
    assert (method.dtype, method.skip_if_nonfinite) == (dtype, skips)
    assert AmpNative.of(method.model_dump(mode="json")) == method


def test_bf16_needs_the_hardware() -> None:
    old, new = ClusterSpec.load("v100_32g"), ClusterSpec.load("a100_80g")
    reason = AmpNative.of("bf16").unmet(old)
    assert "7.0" in reason
    assert AmpNative.of("fp16").unmet(old) is None
    assert AmpNative.of("bf16").unmet(new) is None

    assert type(accelerated("bf16").optim) is torch.optim.SGD
    assert isinstance(accelerated("fp16").optim, ScaledOptimizer)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def mse(batch: Any, output: torch.Tensor) -> Any:
    return nn.functional.mse_loss(output.float(), batch[1]), output.dtype


def accelerated(config: Any, **more: Any) -> Any:
    return accelerate(make_model(), [("amp_native", config)], None, mse, **more)


def step(result: Any, x: torch.Tensor, clip: float | None = None) -> tuple[float, Any]:
    batch = result.prepare_input((x, torch.ones(len(x), 2)), torch.device("cpu"))
    loss, dtype = result.loss_func(batch, result.model(batch[0]))
    loss.backward()
    norm = None if clip is None else float(clip_grad_norm(result.model, clip))
    result.optim.step()
    result.optim.zero_grad()
    return loss.item(), norm if clip is not None else dtype


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


FP16 = {"dtype": "fp16", "init_scale": 2.0**8}  # few numbers here, so gradients are large: the usual scale would skip


@pytest.mark.parametrize(("config", "dtype"), [(FP16, torch.float16), ("bf16", torch.bfloat16)])
def test_the_loop_trains_in_16_bits_with_fp32_weights(config: Any, dtype: torch.dtype) -> None:
    result, plain = accelerated(config), make_model()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(5):
        loss, computed_in = step(result, X)
        expected = nn.functional.mse_loss(plain(X), torch.ones(6, 2))
        expected.backward()
        optim.step()
        optim.zero_grad()
        assert computed_in == dtype
        assert loss == pytest.approx(expected.item(), rel=2e-2)  # the true loss, not the scaled one
    for mine, theirs in zip(result.model.parameters(), plain.parameters(), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_the_scale() -> None:
    result, plain = accelerated(FP16), accelerated("bf16")
    assert step(result, X, clip=1e-3)[1] == pytest.approx(step(plain, X, clip=1e-3)[1], rel=2e-2)
    moved = [(p - q).norm().item() for p, q in zip(result.model.parameters(), make_model().parameters(), strict=True)]
    assert math.hypot(*moved) == pytest.approx(1e-4, rel=1e-2)

    result = accelerated({"init_scale": 8.0, "growth_factor": 4.0, "growth_interval": 2})
    for _ in range(2):
        step(result, X)
    assert result.optim.scale() == 32.0
    result = accelerated({"loss_scale": 64.0})
    step(result, torch.full((2, 4), math.nan))
    assert result.optim.scale() == 64.0

    result = accelerated("fp16", optim_func=None, optim_args=None)
    loss, _ = result.loss_func((X, torch.ones(6, 2)), result.model(X))
    loss.backward()
    assert float(next(result.model.parameters()).grad.norm()) < 10


@pytest.mark.parametrize("config", ["fp16", {"dtype": "bf16", "skip_if_nonfinite": True}])
def test_steps_that_are_not_finite_are_skipped(config: Any) -> None:
    result = accelerated(config, lr_scheduler_cls=torch.optim.lr_scheduler.StepLR, lr_scheduler_args={"step_size": 1})
    before = [parameter.detach().clone() for parameter in result.model.parameters()]
    step(result, torch.full((2, 4), math.inf))
    assert result.optim.step_was_skipped
    assert all(torch.equal(p, q) for p, q in zip(result.model.parameters(), before, strict=True))
    result.lr_scheduler.step()
    step(result, X)
    assert not result.optim.step_was_skipped
    assert result.optim.param_groups[0]["lr"] == pytest.approx(0.01)
    assert result.optim.scale() == (2.0**15 if config == "fp16" else 1.0)


def one_overflows(rank: int, size: int, strategy: Any) -> tuple[bool, list[float]]:
    result = accelerate(make_model(), strategy, None, mse)
    before = [parameter.detach().clone() for parameter in result.model.parameters()]
    step(result, torch.full((2, 4), math.inf if rank == 1 else 1.0))
    same = all(bool((p == q).all()) for p, q in zip(result.model.parameters(), before, strict=True))
    return result.optim.step_was_skipped and same, [result.optim.scale()]


def test_ranks_skip_together(pool: Pool) -> None:
    shardings = ("ddp", "zero1", ("fsdp", {"atorch_wrap_cls": ("Linear",)}))
    cases = [([precision, sharding],) for precision in ("amp_native", "half") for sharding in shardings]
    assert run_each(pool, one_overflows, cases) == [[(True, [2.0**15])] * 2] * len(cases)
