"""Backward under a loss scale: `loss.backward()` is `model.backward(loss)`, and what bypasses both is told."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import atorch
from atorch.errors import ArgumentError
from atorch.patrickstar.ops import FP16Adam
from atorch.patrickstar.runtime import PatrickStarEngine, initialize_engine
from tests.patrickstar.test_engine import SCALED, SHARED, assert_equal, batches, config, loss_of, make, of_rank, small
from tests.pool import Pool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these bits are a CPU's")

SMOOTH = {"params": {"lr": 0.1, "eps": 1.0}}  # a step of Adam is nearly one along the gradient

Backward = Callable[[PatrickStarEngine, Tensor], None]
Loss = Callable[[PatrickStarEngine, Tensor, Tensor], Tensor]


def by_engine(model: PatrickStarEngine, loss: Tensor) -> None:
    model.backward(loss)


def by_loss(model: PatrickStarEngine, loss: Tensor) -> None:
    loss.backward()


def outside(model: PatrickStarEngine, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss_of(model(tokens), labels)


def added(model: PatrickStarEngine, tokens: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens)
    auxiliary = [logits.float().pow(2).mean(), logits.float().abs().mean()]
    return loss_of(logits, labels) + 0.1 * torch.stack(auxiliary).sum()


def in_place(model: PatrickStarEngine, tokens: Tensor, labels: Tensor) -> Tensor:
    loss = outside(model, tokens, labels)
    loss *= 0.5
    loss += 1.0
    return loss


def with_weights(model: PatrickStarEngine, tokens: Tensor, labels: Tensor) -> Tensor:
    """A penalty on weights, which no output reaches."""
    return outside(model, tokens, labels) + 0.01 * model.module.block[1].weight.float().pow(2).sum()


def trained(
    backward: Backward, loss: Loss, mode: bool = True, **sections: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a few steps of two accumulated batches, and the state after them."""
    model, optimizer = initialize_engine(make, 0, config(optimizer=SMOOTH, **sections))
    model.train(mode)
    losses = []
    for tokens, labels in batches(3):
        optimizer.zero_grad()
        for _ in range(2):
            value = loss(model, tokens, labels)
            backward(model, value)
        optimizer.step()
        losses.append(value.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("loss", "mode", "sections"),
    [
        (added, True, {"fp16": SCALED}),
        (in_place, False, {"fp16": {"enabled": True, "loss_scale": 128}}),
        (with_weights, True, {"fp16": SCALED, "gradient_clipping": 0.05}),
        (outside, True, {}),
    ],
)
def test_the_losss_backward_is_the_engines(loss: Loss, mode: bool, sections: dict[str, Any]) -> None:
    expected, state = trained(by_engine, loss, mode, **sections)
    losses, other = trained(by_loss, loss, mode, **sections)
    assert losses == expected
    assert losses[-1] < losses[0] or "gradient_clipping" in sections
    assert_equal(other, state)


def test_both_forms_in_one_script_and_the_keywords_of_backward() -> None:
    def both(model: PatrickStarEngine, loss: Tensor) -> None:
        loss.backward(torch.full_like(loss, 0.5), retain_graph=True)
        torch.stack([0.25 * loss]).sum().backward(retain_graph=True)
        model.backward(0.25 * loss)

    expected, state = trained(by_engine, outside, fp16=SCALED)
    losses, other = trained(both, outside, fp16=SCALED)
    assert losses == pytest.approx(expected, rel=1e-3)
    values, others = (torch.cat([value.float().flatten() for value in each.values()]) for each in (state, other))
    assert (values - others).norm() <= 1e-4 * values.norm()  # halves are rounded as halves


def test_gradients_are_clipped_by_their_true_norm() -> None:
    norms = []
    for sections in ({}, {"fp16": SCALED}):
        model, optimizer = initialize_engine(make, 0, config(optimizer=SMOOTH, **sections))
        tokens, labels = batches(1)[0]
        model(tokens, labels=labels).backward()
        clips = (atorch.clip_grad_norm(model, 0.05), model.clip_grad_norm_(1.0), atorch.clip_grad_norm(model, 1.0))
        norms.append([float(norm) for norm in clips])
        optimizer.step()
    assert norms[0][1:] == [pytest.approx(0.05, rel=1e-2)] * 2
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def past_both(model: PatrickStarEngine, loss: Tensor) -> None:
    torch.autograd.backward(loss)


def lost(model: PatrickStarEngine, loss: Tensor) -> None:
    loss.as_subclass(Tensor).backward()


def test_gradients_without_the_scale_are_told_and_can_be_cleared() -> None:
    model, optimizer = initialize_engine(make, 0, config(fp16=SCALED))
    tokens, labels = batches(1)[0]
    before = copy.deepcopy(model.state_dict())
    for clear, backward in ((optimizer.zero_grad, past_both), (model.zero_grad, lost)):
        backward(model, model(tokens, labels=labels))
        with pytest.raises(ArgumentError, match=r"without the loss scale of 256.*model\.backward\(loss\)"):
            optimizer.step()
        before |= {name: before[name].half() for name in ("offset", "more.1.bias")}
        assert_equal(model.state_dict(), before)
        clear()
        model.backward(model(tokens, labels=labels))
        optimizer.step()
        before = copy.deepcopy(model.state_dict())
    unscaled, second = initialize_engine(make, 0, config())
    backward(unscaled, unscaled(tokens, labels=labels))
    second.step()  # there is no scale to miss


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"image": [self.layer(x)]}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def pair(one: Any, other: Any) -> list[tuple[PatrickStarEngine, FP16Adam]]:
    torch.manual_seed(0)
    given = [config(optimizer=SMOOTH, client=small(10**6)) for _ in range(2)]
    for sections, fp16 in zip(given, (one, other), strict=True):
        sections |= {} if fp16 is None else {"fp16": fp16}
    return [initialize_engine(kind, 0, each) for kind, each in zip((Generator, Critic), given, strict=True)]


@pytest.mark.parametrize("critics", [SCALED, {"enabled": True, "loss_scale": 64}])
def test_a_loss_through_two_engines(critics: Any) -> None:
    """Both are stepped by one loss where their scales are one; else the engine that is stepped runs backward."""
    (generator, first), (critic, second) = pair(SCALED, critics)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    before = generator.state_dict()["layer.weight"].clone()

    def loss() -> Tensor:
        return critic(generator(x)["image"][0]).float().mean()

    if critics is SCALED:
        loss().backward()
        first.step(), second.step()
    else:
        with pytest.raises(ArgumentError, match="their loss scales differ"):
            loss().backward()
        generator.backward(loss())
        first.step()
        with pytest.raises(ArgumentError, match="zero_grad"):
            second.step()
        second.zero_grad()
        critic.backward(critic(generator(x)["image"][0].detach()).float().mean())
        second.step()
    (plain, third), (other, fourth) = pair(None, None)
    other(plain(x)["image"][0]).float().mean().backward()
    third.step(), fourth.step()
    weight = plain.state_dict()["layer.weight"]
    assert (weight - before).norm() > 1e-3
    torch.testing.assert_close(generator.state_dict()["layer.weight"], weight, rtol=1e-3, atol=1e-4)


def test_outputs_are_tensors_as_others_are() -> None:
    model, _ = initialize_engine(make, 0, config(fp16=SCALED))
    tokens, labels = batches(1)[0]
    loss, logits = model(tokens, labels=labels), model(tokens)
    assert f"{loss:.1f}" == f"{loss.item():.1f}"
    assert repr(loss).startswith("tensor(")
    assert type(loss.detach()) is Tensor
    assert type(logits.argmax(-1) == labels) is Tensor
    file = io.BytesIO()
    torch.save({"loss": loss, "kept": copy.deepcopy(loss.detach())}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["loss"].item() == loss.item()
    with torch.no_grad():
        assert type(model(tokens)) is Tensor
    plain, _ = initialize_engine(make, 0, config())
    assert type(plain(tokens)) is Tensor


def two_losses(rank: int, size: int) -> tuple[list[float], str]:
    given = config(optimizer=SMOOTH, fp16=SCALED, client=small(SHARED))
    model, optimizer = initialize_engine(make, 0, given)
    losses = []
    for tokens, labels in of_rank(rank, batches(3)):
        optimizer.zero_grad()
        loss = loss_of(model(tokens), labels)
        loss.backward() if rank else model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    loss = model(tokens, labels=labels)
    torch.autograd.backward(loss) if rank else loss.backward()
    try:
        optimizer.step()
    except ArgumentError as error:
        return losses, str(error)
    return losses, ""


def test_two_processes_may_use_one_form_each_and_fail_together(pool: Pool) -> None:
    (ours, told), (others, also) = pool.run(two_losses)
    losses = [sum(each) / 2 for each in zip(ours, others, strict=True)]
    expected = []
    model, optimizer = initialize_engine(make, 0, config(optimizer=SMOOTH, fp16=SCALED))
    for tokens, labels in batches(3):
        optimizer.zero_grad()
        loss = loss_of(model(tokens), labels)
        model.backward(loss)
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-2)
    assert "without the loss scale" in told
    assert "without the loss scale" in also
