"""amp_native and half: the hardware that they need, their knobs, and steps that all processes skip or take."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from atorch import auto_accelerate
from atorch.auto.opt_lib.amp_native import AmpNative
from atorch.auto.opt_lib.half import Half
from atorch.cluster.spec import ClusterSpec
from atorch.errors import ArgumentError
from atorch.runtime.precision.amp import ScaledOptimizer
from tests.auto.training import accelerate, run_each
from tests.pool import Pool


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def mse(batch: Any, output: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), batch[1])


def accelerated(*strategy: Any, **more: Any) -> Any:
    return accelerate(make_model(), list(strategy), None, mse, **more)


def step(result: Any, x: torch.Tensor) -> None:
    batch = result.prepare_input((x, torch.ones(len(x), 2)), torch.device("cpu"))
    result.loss_func(batch, result.model(batch[0])).backward()
    result.optim.step()
    result.optim.zero_grad()


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def test_bf16_needs_the_hardware() -> None:
    old, new = ClusterSpec.load("v100_32g"), ClusterSpec.load("a100_80g")
    for kind in (AmpNative, Half):
        assert "7.0" in kind.of("bf16").unmet(old)
        assert kind.of("fp16").unmet(old) is None
        assert kind.of("bf16").unmet(new) is None


def test_only_fp16_scales_the_loss_as_the_knobs_say() -> None:
    assert type(accelerated(("amp_native", "bf16")).optim) is torch.optim.SGD
    assert isinstance(accelerated(("amp_native", "fp16")).optim, ScaledOptimizer)

    result = accelerated(("amp_native", {"init_scale": 8.0, "growth_factor": 4.0, "growth_interval": 2}))
    for _ in range(2):
        step(result, X)
    assert result.optim.scale() == 32.0
    result = accelerated(("amp_native", {"loss_scale": 64.0}))
    step(result, torch.full((2, 4), math.nan))
    assert result.optim.scale() == 64.0

    result = accelerated(("amp_native", "fp16"), optim_func=None, optim_args=None)
    result.loss_func((X, torch.ones(6, 2)), result.model(X)).backward()
    assert float(next(result.model.parameters()).grad.norm()) < 10, "nothing would scale it back"


@pytest.mark.parametrize("config", ["fp16", {"dtype": "bf16", "skip_if_nonfinite": True}])
def test_steps_that_are_not_finite_are_skipped(config: Any) -> None:
    scheduler = {"lr_scheduler_cls": torch.optim.lr_scheduler.StepLR, "lr_scheduler_args": {"step_size": 1}}
    result = accelerated(("amp_native", config), **scheduler)
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
    result = accelerated(*strategy)
    before = [parameter.detach().clone() for parameter in result.model.parameters()]
    step(result, torch.full((2, 4), math.inf if rank == 1 else 1.0))
    same = all(bool((p == q).all()) for p, q in zip(result.model.parameters(), before, strict=True))
    return result.optim.step_was_skipped and same, [result.optim.scale()]


def weights_after_steps(rank: int, size: int) -> list[torch.Tensor]:
    """Of ranks that start from other weights: rank 0's must be everybody's, the masters' low bits included."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-4 * rank
    result = accelerate(model, [("half", "bf16")], None, mse)
    for _ in range(10):
        step(result, torch.ones(2, 4))
    return [parameter.detach().float() for parameter in result.model.parameters()]


def test_ranks_start_alike_and_skip_together(pool: Pool) -> None:
    shardings = ("ddp", "zero1", ("fsdp", {"atorch_wrap_cls": ("Linear",)}))
    cases = [([precision, sharding],) for precision in ("amp_native", "half") for sharding in shardings]
    assert run_each(pool, one_overflows, cases) == [[(True, [2.0**15])] * 2] * len(cases)

    first, second = pool.run(weights_after_steps)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Counted(nn.Module):
    """Takes a number of its own kind beside features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        assert places.dtype == torch.int64
        return self.body(x)


def test_half_follows_the_model_and_casts_what_it_is_given() -> None:
    assert Half().settled(Counted().bfloat16()).dtype == "bf16"
    assert Half().settled(Counted()).dtype == "fp16"
    assert Half(dtype="fp16").settled(Counted().bfloat16()).dtype == "fp16"

    _, result, _ = auto_accelerate(Counted(), load_strategy=["half"])
    assert result.optim is None
    assert next(result.model.parameters()).dtype == torch.float16

    model = accelerate(Counted(), [("half", "bf16")], None, mse).model
    x, places = torch.randn(2, 4), torch.tensor(1)
    assert torch.equal(model(x, places=places), model(x.bfloat16(), places)), "as under fsdp"


class Structured(nn.Module):
    """Returns its output in containers, with the hidden state and a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()

    def forward(self, x: torch.Tensor) -> Any:
        output = self.body(x)
        return {"loss": output.mean(), "logits": (output, output.argmax(-1)), "states": [self.body[0](x)], "count": 3}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_model_under_autocast_returns_fp32(dtype: str) -> None:
    model = accelerate(Structured(), [("amp_native", dtype)], None, mse).model
    output = model(X)
    with torch.no_grad():
        evaluated = model(X)["logits"][0].numpy()  # NumPy has no bf16
    rounded = output["logits"][0]
    assert rounded.dtype == output["loss"].dtype == output["states"][0].dtype == torch.float32
    assert (output["logits"][1].dtype, output["count"]) == (torch.int64, 3)
    assert torch.equal(rounded, torch.from_numpy(evaluated))
    short = torch.bfloat16 if dtype == "bf16" else torch.float16
    assert torch.equal(rounded, rounded.to(short).float()), "products are in 16 bits"


@pytest.mark.parametrize("strategies", [("amp_native", "module_replace"), ("module_replace", "amp_native")])
def test_models_of_a_script_may_differ_in_precision(strategies: tuple[str, str]) -> None:
    """As in GANs: the output of one model is the input of the other, outside of loss functions."""
    first, second = (
        accelerate(nn.Linear(4, 4), [(name, "bf16") if name == "amp_native" else name], None, mse).model
        for name in strategies
    )
    second(first(X)).sum().backward()
    assert all(parameter.grad is not None for parameter in first.parameters())


def test_scaled_gradients_are_written_into_no_parameter() -> None:
    """As sharpness-aware minimization does in a loop."""
    result, batch = accelerated(("amp_native", "fp16")), (X, torch.ones(len(X), 2))
    result.loss_func(batch, result.model(X)).backward()
    parameter = next(result.model.parameters())
    with torch.no_grad(), pytest.raises(ArgumentError, match="add_ would write it into a parameter"):
        parameter.add_(0.05 * parameter.grad)
    kept = torch.zeros_like(parameter).add_(parameter.grad)  # of the same scale
    parameter.grad = 0.5 * kept
    result.optim.step()
