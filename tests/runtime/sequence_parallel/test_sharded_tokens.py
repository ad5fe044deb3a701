"""Logits of which each rank has some tokens are whole ones to whoever computes with them: values, gradients, errors."""

from __future__ import annotations

import copy
import logging.handlers
from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.distributed import collectives
from atorch.errors import ArgumentError
from atorch.logs import logger, speaking
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.sequence_parallel import TokenPartition
from atorch.runtime.sequence_parallel.sharded_tokens import SplitTokens, split_tokens
from tests.pool import Pool

ROWS, TOKENS, WIDTH, CLASSES = 2, 8, 6, 11


def noise(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(2))


LABELS = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
LABELS[0, 1] = LABELS[1, 5] = LABELS[1, 7] = -100
FLAT = LABELS.flatten()
WEIGHT, FACTORS = noise(CLASSES).abs() + 0.1, noise(ROWS, TOKENS, CLASSES)


def mean(x: Tensor) -> Tensor:
    return F.cross_entropy(x.view(-1, CLASSES), FLAT)


def shifted(x: Tensor) -> Tensor:
    return F.cross_entropy(x.float()[..., :-1, :].contiguous().view(-1, CLASSES), LABELS[..., 1:].contiguous().view(-1))


def shifted_twice(x: Tensor) -> Tensor:
    x = x[:, 1:][:, :-2]
    return F.cross_entropy(x.reshape(ROWS * (TOKENS - 3), -1), LABELS[:, 3:].reshape(-1))


def of_module(x: Tensor) -> Tensor:
    loss: Tensor = nn.CrossEntropyLoss(ignore_index=9, weight=WEIGHT)(x.flatten(end_dim=1), FLAT.clamp(min=0))
    return loss


def not_reduced(x: Tensor) -> Tensor:
    return (F.cross_entropy(x.permute(0, 2, 1), LABELS, reduction="none", weight=WEIGHT) * FACTORS[..., 0]).sum()


def smoothed(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.size(-1))
    return F.cross_entropy(x, FLAT, label_smoothing=0.1) + F.cross_entropy(x, FLAT, WEIGHT, label_smoothing=0.2)


def summed(x: Tensor) -> Tensor:
    return F.cross_entropy(x[:, 1:].transpose(1, 2), LABELS[:, 1:], reduction="sum") / 3


def by_tokens_first(x: Tensor) -> Tensor:
    return F.cross_entropy(x.transpose(0, 1).reshape(-1, CLASSES), LABELS.t().reshape(-1))


def of_one_sample(x: Tensor) -> Tensor:
    return F.cross_entropy(x[1] / 2.0, LABELS[1]) + F.cross_entropy(x[:1].squeeze(0)[:-1], LABELS[0, 1:])


def capped(x: Tensor) -> Tensor:
    return F.cross_entropy((3.0 * torch.tanh(x / 3.0)).unsqueeze(1).flatten(0, 2), FLAT)


def with_z_loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), FLAT) + 0.1 * x.logsumexp(-1).square().mean()


def of_log_softmax(x: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.flatten(0, 1), -1), FLAT, weight=WEIGHT)


def of_preferences(x: Tensor) -> Tensor:
    picked = x.log_softmax(-1).gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * FACTORS[..., 0]).sum()


def accuracy_first(x: Tensor) -> Tensor:
    with torch.no_grad():
        accuracy = (x.argmax(-1) == LABELS).float().mean()
    return F.cross_entropy(x.flatten(0, 1), FLAT) * (1.0 + accuracy)


def of_transformers(x: Tensor) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(x, LABELS, CLASSES)  # type: ignore[no-any-return]


def without_labels(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), torch.full((ROWS * TOKENS,), -100), reduction="sum")


NUMBERS = ROWS * TOKENS
SPLIT: Mapping[Callable[[Tensor], Tensor], int] = {
    mean: NUMBERS,
    shifted: NUMBERS,
    shifted_twice: NUMBERS,
    of_module: NUMBERS,
    not_reduced: NUMBERS,
    smoothed: 2 * NUMBERS,
    summed: NUMBERS,
    by_tokens_first: NUMBERS,
    of_one_sample: NUMBERS,
    capped: NUMBERS,
    with_z_loss: 2 * NUMBERS,
    of_log_softmax: NUMBERS,
    of_preferences: NUMBERS,
    accuracy_first: 3 * NUMBERS,  # the first of them are integers of 64 bits
    of_transformers: NUMBERS,
    without_labels: NUMBERS,
}
"""Losses that gather no logits, and the numbers of 32 bits that all ranks together give to all-gathers."""


def of_logits(x: Tensor) -> Tensor:
    return (x * FACTORS).sum()


def of_probabilities(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), FACTORS.softmax(-1).flatten(0, 1))


def picked_rows(x: Tensor) -> Tensor:
    kept = LABELS != -100
    return F.cross_entropy(x[kept], LABELS[kept])


def last_alone(x: Tensor) -> Tensor:
    return F.cross_entropy(x[:, -1], LABELS[:, 0].clamp(min=0))


def both(x: Tensor) -> Tensor:
    return shifted(x) + (x * FACTORS).sum() + x.topk(2).values.sum()


def both_of_a_window(x: Tensor) -> Tensor:
    x = x[:, 2:]
    return F.cross_entropy(x.flatten(0, 1), LABELS[:, 2:].flatten()) + (x * FACTORS[:, 2:]).sum()


def masked_in_place(x: Tensor) -> Tensor:
    x = x * 1.0
    x[..., 8:] = -3.0
    return F.cross_entropy(x.flatten(0, 1), FLAT.clamp(max=7))


def views_in_place(x: Tensor) -> Tensor:
    x = x * 1.0
    first, last = x[:, :3], x[:, 5:]
    last[last < 0] = 0.5
    last.mul_(FACTORS[:, 5:])
    first += 1.0
    return (x * FACTORS).sum() + last.square().sum() + first.square().sum()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * grad.norm())
    return mean(x)


def of_a_copy(x: Tensor) -> Tensor:
    apart = x.detach().requires_grad_()
    for _ in range(2):
        mean(apart).backward()
    assert apart.grad is not None
    (grad,) = torch.autograd.grad(mean(x), x, retain_graph=True)
    return (x * apart.grad).sum() + (x * grad.detach()).sum()


WHOLE = (of_logits, of_probabilities, picked_rows, last_alone, both, both_of_a_window, masked_in_place, views_in_place)
WHOLE = (*WHOLE, hooked, of_a_copy)
"""Losses that ask for the logits together."""


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.detach() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-6))


def compared(rank: int, size: int, balanced: bool) -> dict[str, dict[str, float]]:
    """Of a head that each rank has whole; its gradients are averaged over the ranks."""
    share = TokenPartition(dist.group.WORLD, balanced=balanced)  # type: ignore[arg-type]
    torch.manual_seed(0)
    head, x, found = nn.Linear(WIDTH, CLASSES), noise(ROWS, TOKENS, WIDTH), {}

    def logits() -> Tensor:
        return split_tokens(head(share.part(x, 1)), share, 1)

    for loss in (*SPLIT, *WHOLE):
        expected = loss(head(x))
        grads = torch.autograd.grad(expected, list(head.parameters()))
        with CommCounter() as sent:
            got = loss(logits())
            got_grads = torch.autograd.grad(got, list(head.parameters()))
        gathered = sum(each for (kind, _), (_, each) in sent.counts.items() if kind == "all_gather")
        for grad in got_grads:
            dist.all_reduce(grad)
        errors = [distance(a / size, b) for a, b in zip(got_grads, grads, strict=True)]
        with torch.no_grad():
            again = loss(logits()) if loss in SPLIT else got
        found[loss.__name__] = {
            "loss": max(distance(got, expected), distance(again, expected)),
            "gradient": max(errors),
            "gathered": gathered,
            "plain": float(type(got) is Tensor),
        }
    return found


@pytest.mark.parametrize(("ranks", "balanced"), [(2, False), (4, True)])
def test_losses_and_gradients_are_those_of_whole_logits(pool: Pool, ranks: int, balanced: bool) -> None:
    for seen in pool.run(compared, balanced, ranks=ranks):
        for name, each in seen.items():
            assert each["loss"] <= 1e-6, name
            assert each["gradient"] <= 1e-6, name
            assert each["plain"], name
        for loss, numbers in SPLIT.items():
            assert 0 < seen[loss.__name__]["gathered"] <= 4 * numbers, (loss, seen[loss.__name__])
        for loss in WHOLE:
            assert seen[loss.__name__]["gathered"] >= 4 * ROWS * (TOKENS - 3) * CLASSES, loss


def as_a_tensor(rank: int, size: int) -> dict[str, bool]:
    share = TokenPartition(dist.group.WORLD, balanced=True)  # type: ignore[arg-type]
    head, x = nn.Linear(WIDTH, CLASSES), noise(ROWS, TOKENS, WIDTH)
    for parameter in head.parameters():
        dist.broadcast(parameter.data, 0)
    whole, logits = head(x), split_tokens(head(share.part(x, 1)), share, 1)
    values, detached = whole.detach(), logits.detach()
    printed = repr(logits) if rank == 0 else ""  # a process may print alone
    window = logits[:, :-1]
    return {
        "is split": isinstance(logits, SplitTokens) and isinstance(detached, SplitTokens),
        "part": logits._part.numel() * size == whole.numel(),
        "shape": (logits.shape, logits.stride(), logits.ndim) == (whole.shape, whole.stride(), 3),
        "window": window.shape == whole[:, :-1].shape and window._part.shape == logits._part.shape,
        "history": logits.requires_grad and not logits.is_leaf and not detached.requires_grad,
        "printed": rank > 0 or f"{TOKENS // size} of {TOKENS} tokens" in printed,
        "copied": torch.allclose(copy.deepcopy(detached), values, atol=1e-6),
        "numpy": bool(abs(torch.from_numpy(detached.numpy()) - values).max() < 1e-6),
        "last": torch.allclose(logits[:, -1], whole[:, -1], atol=1e-6),
        "joined": torch.allclose(torch.cat([logits, whole]), torch.cat([whole, whole]), atol=1e-6),
    }


def test_they_are_a_tensor_to_everyone(pool: Pool) -> None:
    for seen in pool.run(as_a_tensor, ranks=4):
        assert all(seen.values()), seen


def told(rank: int, size: int) -> list[str]:
    share = TokenPartition(dist.group.WORLD)  # type: ignore[arg-type]
    logits = split_tokens(noise(ROWS, TOKENS // size, CLASSES), share, 1)
    handler = logging.handlers.BufferingHandler(10)
    logger.addHandler(handler)
    with speaking(True):
        mean(logits)
        for _ in range(2):
            (logits[:, 1:] * FACTORS[:, 1:]).sum()
        (logits[:, 2:] * FACTORS[:, 2:]).sum()
    logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def test_who_asks_for_whole_logits_is_told_once(pool: Pool) -> None:
    for rank, messages in enumerate(pool.run(told)):
        if rank == 0:
            (message,) = messages
            assert "mul asks for all tokens of (2, 7, 11)" in message


def read_alone(rank: int, size: int, nested: bool) -> tuple[str, float]:
    """What the one that reads is told, and what all compute together after that."""
    group = dist.group.WORLD
    assert group is not None
    logits = split_tokens(torch.full((ROWS, TOKENS // size, CLASSES), 1.0 + rank), TokenPartition(group), 1)
    if nested:
        logits = logits.transpose(1, 2)[:, :, 1:]
    told = ""
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "MEETING", timedelta(seconds=0.01))
            patch.setattr(collectives, "TIMEOUT", timedelta(seconds=0.1))
            with pytest.raises(ArgumentError) as caught:
                logits.amax()
        told = str(caught.value)
    numbers = torch.ones(3) * rank
    dist.all_reduce(numbers)
    return told, float(numbers.sum())


@pytest.mark.parametrize("nested", [False, True])
def test_who_does_not_read_with_the_others_is_named(pool: Pool, nested: bool) -> None:
    (told, numbers), *others = pool.run(read_alone, nested, ranks=4)
    assert "amax of a tensor of (2, 8, 11)" in told or nested
    assert "is called on rank 0 but not on 1, 2, 3; call it on all together" in told
    assert [numbers, *(number for _, number in others)] == [18.0] * 4  # nothing was left under way


def read_by_all(rank: int, size: int) -> tuple[float, float, list[bool]]:
    """Each with a function of its own, again and again; and which of the meetings the store still remembers."""
    group = dist.group.WORLD
    assert group is not None
    for step in range(4):
        logits = split_tokens(torch.full((ROWS, TOKENS // size, CLASSES), 1.0 + rank + step), TokenPartition(group), 1)
        largest = logits.amax() if rank else logits.flatten().max()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    kept = [store.check([f"atorch/split/{group.group_name}/{kind}/{each}"]) for each in range(1, 5) for kind in KEYS]
    return float(largest), float(logits.sum() / logits.numel()), kept


KEYS = ("here", "all")


def test_what_readers_tell_each_other_does_not_grow(pool: Pool) -> None:
    for largest, mean, kept in pool.run(read_by_all, ranks=2):
        assert (largest, mean) == (5.0, 4.5)
        assert kept == [False] * 6 + [True] * 2


def out_of_bounds(rank: int, size: int) -> str:
    share = TokenPartition(dist.group.WORLD)  # type: ignore[arg-type]
    logits = split_tokens(noise(1, TOKENS // size, CLASSES), share, 1)
    labels = torch.zeros(1, TOKENS, dtype=torch.int64)
    labels[0, 0] = CLASSES  # a token of the first rank
    try:
        F.cross_entropy(logits.transpose(1, 2), labels)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_target_that_is_no_class_is_an_error_on_every_rank(pool: Pool) -> None:
    assert all("11 classes" in message for message in pool.run(out_of_bounds))
