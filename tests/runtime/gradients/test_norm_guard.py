"""Gradients of a part refuse to become a number, and are as ever element by element."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import atorch
from atorch.errors import ArgumentError
from atorch.runtime.optimizer.wrapped_optimizer import OwnPart
from tests.auto.training import accelerate
from tests.pool import on_ranks
from tests.zoo import Residual

Gradients = list[Tensor]
WIDTH = 8


def block() -> nn.Module:
    return Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), *(block() for _ in range(4)), nn.Linear(WIDTH, 1))


def loss_func(batch: Any, output: Tensor) -> Tensor:
    return output.square().mean()


STRATEGIES: Mapping[str, list[Any]] = {
    "tensor": [("parallel_mode", ([("tensor", 2)], None)), "tensor_parallel"],
    "pipeline": [("parallel_mode", ([("pipeline", 2)], None)), ("pipeline_parallel", {"micro_batches": 4})],
    "chunk": ["chunk"],
}


def accelerated(strategy: str, optim: Any = torch.optim.AdamW, **optim_args: Any) -> Any:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(8, 4))
    more: dict[str, Any] = {"optim_func": optim, "optim_args": {"lr": 0.01, **optim_args}}
    more["prepare_input"] = lambda batch, device: batch[0]
    return accelerate(model(), STRATEGIES[strategy], data, loss_func, batch_size=8, **more)


def backward(result: Any) -> Gradients:
    result.optim.zero_grad()
    for batch in result.dataloader:
        x = result.prepare_input(batch, "cpu")
        result.loss_func(x, result.model(x)).backward()
    return [each.grad for each in result.model.parameters() if each.grad is not None]


def averages(grads: Gradients) -> Any:
    kept = [torch.zeros_like(each) for each in grads]
    for each, grad in zip(kept, grads, strict=True):
        each.mul_(0.5).add_(grad, alpha=0.5)
    return sum(each.norm() for each in kept)


def flattened(grads: Gradients) -> Any:
    flat, at = torch.zeros(sum(each.numel() for each in grads)), 0
    for each in grads:
        flat[at : at + each.numel()].copy_(each.flatten())
        at += each.numel()
    return flat.norm()


NUMBERS: Mapping[str, Callable[[Gradients], Any]] = {
    "norms, read": lambda grads: sum(each.norm().item() ** 2 for each in grads),
    "norms, stacked": lambda grads: torch.stack([each.norm() for each in grads]).norm().item(),
    "products": lambda grads: sum((each * each).sum() for each in grads),
    "powers": lambda grads: sum(each.pow(2).sum() for each in grads) ** 0.5,
    "dot": lambda grads: torch.cat([each.flatten() for each in grads]) @ torch.cat([each.ravel() for each in grads]),
    "get_total_norm": nn.utils.get_total_norm,
    "foreach": lambda grads: torch.stack(torch._foreach_norm(torch._foreach_mul(grads, 2.0))).norm(),
    "vector": lambda grads: nn.utils.parameters_to_vector(grads).norm(),
    "largest": lambda grads: max(each.abs().max() for each in grads),
    "on the host": lambda grads: sum(float((each.detach().numpy() ** 2).sum()) for each in grads),
    "finite": lambda grads: all(each.isfinite().all() for each in grads),
    "averages": averages,
    "flattened": flattened,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks()
def test_numbers_of_parts_are_refused(rank: int, size: int, strategy: str) -> None:
    result, wrong = accelerated(strategy), []

    def check(when: str, grads: Gradients) -> None:
        for name, compute in NUMBERS.items():
            try:
                wrong.append(f"{name} {when}: {compute(grads)}")
            except ArgumentError as error:
                wrong.extend([str(error)] if "atorch.clip_grad_norm(model, max_norm)" not in str(error) else [])

    check("after backward", backward(result))
    result.optim.step()
    check(
        "after a step", [each.grad for each in result.model.parameters() if each.grad is not None] or backward(result)
    )
    if strategy != "chunk":
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        loss = result.loss_func(x, result.model(x))
        check("of autograd", list(torch.autograd.grad(loss, list(result.model.parameters()))))
    assert wrong == []


def edit(grads: Gradients) -> None:
    """What a loop does with gradients element by element."""
    for each in grads:
        each.mul_(2.0).clamp_(-0.05, 0.05)
        each.copy_(each.clone().add(torch.ones_like(each), alpha=1e-3) / 2)
        each[each.abs() < 1e-4] = 0.0
        repr(each), f"{each}"
    torch._foreach_mul_(grads, 0.5)
    kept = io.BytesIO()
    torch.save(grads, kept)
    kept.seek(0)
    for each in (*torch.load(kept, weights_only=True), *copy.deepcopy(grads)):
        assert type(each) is Tensor
        each.sum().item()


def plainly(optim: Any, optim_args: Any, own: bool) -> list[Tensor]:
    torch.manual_seed(1)
    x, plain = torch.randn(8, 4), model()
    optimizer = optim(plain.parameters(), lr=0.01, **optim_args)
    for step in range(3):
        optimizer.zero_grad()
        loss_func(x, plain(x)).backward()
        edit([each.grad for each in plain.parameters() if each.grad is not None])
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        (torch.optim.AdamW(plain.parameters(), lr=0.01) if own and step == 2 else optimizer).step()
    return list(plain.state_dict().values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("optim", "optim_args"),
    [
        pytest.param(torch.optim.SGD, {"momentum": 0.9}, id="SGD"),
        pytest.param(torch.optim.AdamW, {"foreach": True}, id="AdamW", marks=pytest.mark.nightly),
    ],
)
@on_ranks()
def test_elements_are_edited_as_ever(
    rank: int, size: int, strategy: str, optim: Any, optim_args: dict[str, Any]
) -> None:
    """The whole model after steps in which a loop edited gradients, some of them an optimizer's of its own."""
    result = accelerated(strategy, optim, **optim_args)
    for step in range(3):
        edit(backward(result))
        assert float(atorch.clip_grad_norm(result.model, 0.05)) > 0.05
        if strategy != "chunk" and step == 2:
            torch.optim.AdamW(result.model.parameters(), lr=0.01).step()
        else:
            result.optim.step()
    states = result.optim.state_dict()["state"].values()
    assert {type(value) for state in states for value in state.values() if isinstance(value, Tensor)} <= {
        Tensor,
        OwnPart,
    }
    found = list(atorch.whole_state(result.model).values())
    if rank == 0:
        expected = plainly(optim, optim_args, own=strategy != "chunk")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
