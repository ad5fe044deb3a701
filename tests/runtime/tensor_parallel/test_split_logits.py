"""Split logits are whole ones to whoever computes with them: the same values, gradients and errors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.tensor_parallel.vocabulary import SplitLogits, split_logits
from atorch.runtime.tensor_parallel.vocabulary_shards import VocabularyShards
from tests.pool import Pool

ROWS, SEQ, WIDTH, CLASSES = 2, 5, 6, 11
LABELS = torch.tensor([[0, 3, 10, -100, 2], [5, 4, -100, 9, 9]])
FLAT = LABELS.flatten()


def noise(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(2))


WEIGHT, FACTORS = noise(CLASSES).abs() + 0.1, noise(ROWS, SEQ, CLASSES)


def shifted(x: Tensor) -> Tensor:
    return F.cross_entropy(x.float()[..., :-1, :].contiguous().view(-1, CLASSES), LABELS[..., 1:].contiguous().view(-1))


def of_module(x: Tensor) -> Tensor:
    loss: Tensor = nn.CrossEntropyLoss(ignore_index=9, weight=WEIGHT)(x.flatten(end_dim=1), FLAT.clamp(min=0))
    return loss


def not_reduced(x: Tensor) -> Tensor:
    return (F.cross_entropy(x.permute(0, 2, 1), LABELS, reduction="none", weight=WEIGHT) * FACTORS[..., 0]).sum()


def smoothed(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.size(-1))
    return F.cross_entropy(x, FLAT, label_smoothing=0.1) + F.cross_entropy(x, FLAT, WEIGHT, label_smoothing=0.2)


def summed(x: Tensor) -> Tensor:
    return F.cross_entropy(x[:, 1:].transpose(1, 2), LABELS[:, 1:], reduction="sum")


def capped(x: Tensor) -> Tensor:
    x = 3.0 * torch.tanh(x / 3.0)
    kept = LABELS != -100
    return F.cross_entropy(x[kept], LABELS[kept])


def of_one_row(x: Tensor) -> Tensor:
    return F.cross_entropy(x[0, 0], LABELS[0, 0]) + F.cross_entropy(x.squeeze(0).unsqueeze(0)[0, 1], LABELS[1])


def with_z_loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), FLAT) + 0.1 * x.logsumexp(-1).square().mean()


def of_log_softmax(x: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(x.flatten(0, 1), -1), FLAT, weight=WEIGHT)


def of_preferences(x: Tensor) -> Tensor:
    picked = x.log_softmax(-1).gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * FACTORS[..., 0]).sum()


def without_labels(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), torch.full((ROWS * SEQ,), -100), reduction="sum")


def of_a_copy(x: Tensor) -> Tensor:
    apart = x.detach().requires_grad_()
    for _ in range(2):
        F.cross_entropy(apart.flatten(0, 1), FLAT).backward()
    assert apart.grad is not None
    (grad,) = torch.autograd.grad(F.cross_entropy(x.flatten(0, 1), FLAT), x, retain_graph=True)
    return (x * apart.grad).sum() + (x * grad.detach()).sum()


SPLIT: Mapping[Callable[[Tensor], Tensor], float] = {
    shifted: 2 * 8,
    of_module: 2 * 10,
    not_reduced: 2 * 10,
    smoothed: 2 * 3 * 10,
    summed: 2 * 8,
    capped: 2 * 8,
    of_one_row: 2 * (1 + 5),
    with_z_loss: 2 * 10 + 10,
    of_log_softmax: 10,
    of_preferences: 10,
    without_labels: 2 * 10,
}
"""Losses that gather no logits, and the numbers that each rank gives to its all-gathers."""


def of_logits(x: Tensor) -> Tensor:
    return (x * FACTORS).sum()


def of_probabilities(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), FACTORS.softmax(-1).flatten(0, 1))


def accuracy_first(x: Tensor) -> Tensor:
    with torch.no_grad():
        accuracy = (x.argmax(-1) == LABELS).float().mean()
    return F.cross_entropy(x.flatten(0, 1), FLAT) * (1.0 + accuracy)


def both(x: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), FLAT) + (x * FACTORS).sum()


def both_twice(x: Tensor) -> Tensor:
    return F.cross_entropy(x[:, 1:].flatten(0, 1), LABELS[:, 1:].flatten()) + both(x) + x.topk(2).values.sum()


def masked_in_place(x: Tensor) -> Tensor:
    x = x * 1.0
    x[..., 8:] = -3.0
    return F.cross_entropy(x.flatten(0, 1), FLAT.clamp(max=7))


def views_in_place(x: Tensor) -> Tensor:
    x = x * 1.0
    first, last = x[:, 0], x[:, -1]
    last[last < 0] = 0.5
    last.mul_(FACTORS[:, 0])
    first += 1.0
    return (x * FACTORS).sum() + last.square().sum() + first.square().sum()


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * grad.norm())
    return F.cross_entropy(x.flatten(0, 1), FLAT)


WHOLE = (of_logits, of_probabilities, accuracy_first, both, both_twice, masked_in_place, views_in_place, hooked)
"""Losses that ask for the logits together."""


def on(rank: int, size: int) -> tuple[VocabularyShards, nn.Linear, nn.Linear]:
    """Who has which columns; the whole head, and this rank's part of it."""
    counts = tuple(len(part) for part in torch.arange(CLASSES).chunk(size))
    columns = VocabularyShards(counts, rank, dist.group.WORLD)  # type: ignore[arg-type]
    torch.manual_seed(0)
    head, part = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, counts[rank])
    for mine, whole in ((part.weight, head.weight), (part.bias, head.bias)):
        mine.data.copy_(columns.take(whole.detach(), 0))
    return columns, head, part


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.detach() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-6))


def compared(rank: int, size: int) -> dict[str, dict[str, float]]:
    columns, head, part = on(rank, size)
    x, found = noise(ROWS, SEQ, WIDTH), {}
    for loss in (*SPLIT, of_a_copy, *WHOLE):
        expected = loss(head(x))
        grads = torch.autograd.grad(expected, list(head.parameters()))
        with CommCounter() as sent:
            got = loss(split_logits(part(x), columns))
            got_grads = torch.autograd.grad(got, list(part.parameters()))
        gathered = [each for (kind, _), (_, each) in sent.counts.items() if kind == "all_gather"]
        errors = [distance(a, columns.take(b, 0)) for a, b in zip(got_grads, grads, strict=True)]
        with torch.no_grad():
            again = loss(split_logits(part(x), columns)) if loss in SPLIT else got
        found[loss.__name__] = {
            "loss": max(distance(got, expected), distance(again, expected)),
            "gradient": max(errors),
            "gathered": sum(gathered),
            "plain": float(type(got) is Tensor),
        }
    return found


def test_losses_and_gradients_are_those_of_whole_logits(pool: Pool) -> None:
    for seen in pool.run(compared):
        for name, each in seen.items():
            assert each["loss"] <= 3e-6, name  # large terms cancel in some losses
            assert each["gradient"] <= 1e-6, name
            assert each["plain"], name
        for loss, numbers in SPLIT.items():
            assert seen[loss.__name__]["gathered"] == 2 * 4 * numbers, loss
        for loss in WHOLE:
            assert seen[loss.__name__]["gathered"] >= 2 * 4 * ROWS * SEQ * (CLASSES // 2), loss


def low(rank: int, size: int) -> dict[str, Any]:
    columns, head, part = on(rank, size)
    x, found = noise(ROWS, SEQ, WIDTH), {}
    for name, dtype, autocast in (("bf16", torch.bfloat16, False), ("autocast", torch.bfloat16, True)):
        losses = []
        for logits in (head(x).to(dtype), split_logits(part(x).to(dtype), columns)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(F.cross_entropy(logits.flatten(0, 1), FLAT))
        found[name] = distance(losses[1], losses[0]), losses[0].dtype == losses[1].dtype
    return found


def test_in_sixteen_bits(pool: Pool) -> None:
    for seen in pool.run(low):
        assert seen["bf16"][0] <= 1e-2
        assert seen["autocast"][0] <= 1e-6
        assert all(same for _, same in seen.values())


def as_a_tensor(rank: int, size: int) -> dict[str, bool]:
    columns, head, part = on(rank, size)
    x = noise(ROWS, SEQ, WIDTH)
    whole, logits = head(x), split_logits(part(x), columns)
    values, detached = whole.detach(), logits.detach()
    printed = repr(logits) if rank == 0 else ""  # a process may print alone
    file = io.BytesIO()
    torch.save({"logits": detached}, file)
    file.seek(0)
    found = {
        "is split": isinstance(logits, SplitLogits) and isinstance(detached, SplitLogits),
        "is a tensor": isinstance(logits, Tensor) and len(logits) == ROWS,
        "shape": (logits.shape, logits.stride(), logits.ndim) == (whole.shape, whole.stride(), 3),
        "type": (logits.dtype, logits.device, logits.numel()) == (whole.dtype, whole.device, whole.numel()),
        "history": logits.requires_grad and not logits.is_leaf and not detached.requires_grad,
        "printed": rank > 0 or "columns 0 to 3 of 11" in printed,
        "pickled": torch.allclose(pickle.loads(pickle.dumps(detached)), values),  # noqa: S301
        "saved": torch.allclose(torch.load(file)["logits"], values),
        "copied": torch.allclose(copy.deepcopy(detached), values),
        "numpy": np.allclose(detached.numpy(), values) and np.allclose(np.asarray(detached.cpu()), values),
        "item": abs(detached[1, 2, 10].item() - values[1, 2, 10].item()) < 1e-6,
        "best": torch.equal(logits.topk(2).indices, whole.topk(2).indices),
        "joined": torch.allclose(torch.cat([logits, whole]), torch.cat([whole, whole])),
        "turned": torch.allclose(logits.mT, whole.mT),
    }
    with torch.inference_mode():
        logits = split_logits(part(x), columns)
        last = logits[:, -1] / 2.0
        last[last < 0.1] = -torch.inf
        expected = values[:, -1] / 2.0
        found["sampled"] = torch.allclose(last, expected.masked_fill(expected < 0.1, -torch.inf))
    return found


def test_they_are_a_tensor_to_everyone(pool: Pool) -> None:
    for seen in pool.run(as_a_tensor, ranks=4):
        assert all(seen.values()), seen


def out_of_bounds(rank: int, size: int) -> str:
    columns, _, part = on(rank, size)
    try:
        F.cross_entropy(split_logits(part(noise(1, WIDTH)), columns), torch.tensor([CLASSES]))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_target_that_is_no_class_is_an_error_on_every_rank(pool: Pool) -> None:
    for message in pool.run(out_of_bounds):
        assert "out of bounds" in message
        assert str(CLASSES) in message
