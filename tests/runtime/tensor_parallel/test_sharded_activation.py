"""Logits of which each rank has columns or tokens are whole ones to whoever computes with them: values, gradients."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from atorch.distributed import collectives
from atorch.errors import ArgumentError
from atorch.logs import verbose_logging
from atorch.profiler.memory_tracker import CommCounter
from atorch.runtime.sequence_parallel import TokenPartition
from atorch.runtime.sequence_parallel.token_partition import split_tokens
from atorch.runtime.tensor_parallel.sharding_rules import ShardedActivation
from atorch.runtime.tensor_parallel.split_loss import VocabularyShards
from atorch.runtime.tensor_parallel.vocabulary import split_logits
from tests.auto.training import messages
from tests.pool import on_ranks

ROWS, TOKENS, WIDTH, CLASSES = 2, 8, 6, 11
Loss = Callable[[Tensor], Tensor]


def noise(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(2))


LABELS = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
LABELS[0, 1] = LABELS[1, 5] = LABELS[1, 7] = -100
FLAT = LABELS.flatten()
WEIGHT, FACTORS = noise(CLASSES).abs() + 0.1, noise(ROWS, TOKENS, CLASSES)
MODULE, ALL = nn.CrossEntropyLoss(ignore_index=9, weight=WEIGHT), ROWS * TOKENS


def mean(x: Tensor) -> Tensor:
    return F.cross_entropy(x.view(-1, CLASSES), FLAT)


def smoothed(x: Tensor) -> Tensor:
    x = x.reshape(-1, x.size(-1))
    return F.cross_entropy(x, FLAT, label_smoothing=0.1) + F.cross_entropy(x, FLAT, WEIGHT, label_smoothing=0.2)


def of_preferences(x: Tensor) -> Tensor:
    picked = x.log_softmax(-1).gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * FACTORS[..., 0]).sum()


def accuracy_first(x: Tensor) -> Tensor:
    with torch.no_grad():
        accuracy = (x.argmax(-1) == LABELS).float().mean()
    return mean(x) * (1.0 + accuracy)


def picked_rows(x: Tensor) -> Tensor:
    kept = LABELS != -100
    return F.cross_entropy(x[kept], LABELS[kept])


def capped_into(x: Tensor) -> Tensor:
    torch.tanh(x.detach(), out=(made := torch.empty(x.shape)))
    return (x * made).sum()


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


GATHERED: Mapping[str, tuple[Loss, int | None, int | None]] = {
    "mean": (mean, 2 * ALL, ALL),
    "shifted": (
        lambda x: F.cross_entropy(x.float()[..., :-1, :].contiguous().view(-1, CLASSES), LABELS[..., 1:].flatten()),
        2 * (ALL - ROWS), ALL,
    ),
    "a module's": (lambda x: MODULE(x.flatten(end_dim=1), FLAT.clamp(min=0)), 2 * ALL, ALL),
    "not reduced": (
        lambda x: F.cross_entropy(x.permute(0, 2, 1), LABELS, WEIGHT, reduction="none").mul(FACTORS[..., 0]).sum(),
        2 * ALL, ALL,
    ),
    "smoothed": (smoothed, 2 * 3 * ALL, 2 * ALL),
    "summed": (
        lambda x: F.cross_entropy(x[:, 1:].transpose(1, 2), LABELS[:, 1:], reduction="sum") / 3,
        2 * (ALL - ROWS), ALL,
    ),
    "capped": (
        lambda x: F.cross_entropy((3.0 * torch.tanh(x / 3.0)).unsqueeze(1).flatten(0, 2), FLAT), 2 * ALL, ALL,
    ),
    "z-loss": (lambda x: mean(x) + 0.1 * x.logsumexp(-1).square().mean(), 3 * ALL, 2 * ALL),
    "log-softmax": (lambda x: F.nll_loss(F.log_softmax(x.flatten(0, 1), -1), FLAT, weight=WEIGHT), ALL, ALL),
    "preferences": (of_preferences, ALL, ALL),
    "transformers'": (lambda x: ForCausalLMLoss(x, LABELS, CLASSES), 2 * ALL, ALL),
    "no labels": (
        lambda x: F.cross_entropy(x.flatten(0, 1), torch.full_like(FLAT, -100), reduction="sum"), 2 * ALL, ALL,
    ),
    "accuracy first": (accuracy_first, None, 3 * ALL),  # the first of them are integers of 64 bits
    "picked rows": (picked_rows, 2 * (ALL - 3), None),
    "one row": (lambda x: F.cross_entropy(x[0, 0], LABELS[0, 0]), 2, None),
    "logits": (lambda x: (x * FACTORS).sum(), None, None),
    "both": (lambda x: mean(x) + (x * FACTORS).sum() + x.topk(2).values.sum(), None, None),
    **{each.__name__: (each, None, None)
       for each in (capped_into, both_of_a_window, masked_in_place, views_in_place, hooked, of_a_copy)},
}  # fmt: skip
"""By loss, the numbers that each rank with columns gathers, and that all ranks with tokens do; None: all logits."""


class Split:
    """A head whose logits are whole, and split by columns, or by tokens that are balanced or not."""

    def __init__(self, rank: int, size: int, kind: str) -> None:
        group: Any = dist.group.WORLD
        counts = tuple(len(part) for part in torch.arange(CLASSES).chunk(size))
        self.columns = VocabularyShards(counts, rank, group) if kind == "columns" else None
        self.share, self.size = TokenPartition(group, balanced=kind == "balanced"), size
        torch.manual_seed(0)
        self.head, self.x = nn.Linear(WIDTH, CLASSES), noise(ROWS, TOKENS, WIDTH)
        self.own = self.head
        if self.columns is not None:
            self.own = nn.Linear(WIDTH, counts[rank])
            for mine, whole in zip(self.own.parameters(), self.head.parameters(), strict=True):
                mine.data.copy_(self.columns.take(whole.detach(), 0))

    def logits(self, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.columns is not None:
            return split_logits(self.own(self.x).to(dtype), self.columns)
        return split_tokens(self.own(self.share.part(self.x, 1)).to(dtype), self.share, 1)

    def error(self, own: Tensor, whole: Tensor) -> float:
        """The distance of a gradient of `own` from the part of that of `head`, or from all of it after an average."""
        if self.columns is not None:
            return distance(own, self.columns.take(whole, 0))
        dist.all_reduce(own)
        return distance(own / self.size, whole)


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.detach() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-6))


@pytest.mark.parametrize(("kind", "size"), [("columns", 2), ("in order", 2), ("balanced", 4)])
@on_ranks(None)
def test_losses_and_gradients_are_those_of_whole_logits(rank: int, size: int, kind: str) -> None:
    split = Split(rank, size, kind)
    whole = ROWS * (TOKENS - 3) * (2 * (CLASSES // 2) if kind == "columns" else CLASSES)
    for name, (loss, *of_kinds) in GATHERED.items():
        numbers = of_kinds[kind != "columns"]
        expected = loss(split.head(split.x))
        grads = torch.autograd.grad(expected, list(split.head.parameters()))
        with CommCounter() as sent:
            got = loss(split.logits())
            got_grads = torch.autograd.grad(got, list(split.own.parameters()))
        gathered = sum(each for (operation, _), (_, each) in sent.counts.items() if operation == "all_gather") / 4
        with torch.no_grad():
            again = loss(split.logits()) if numbers is not None else got
        assert type(got) is Tensor, name
        off = max(distance(got, expected), distance(again, expected))
        assert off <= 3e-6, name  # large terms cancel in some losses
        assert max(split.error(own, of_all) for own, of_all in zip(got_grads, grads, strict=True)) <= 1e-6, name
        if numbers is None:
            assert gathered >= whole, name
        else:
            assert gathered == 2 * numbers if kind == "columns" else 0 < gathered <= numbers, name


@pytest.mark.parametrize("kind", ["columns", "balanced"])
@on_ranks(4)
def test_they_are_a_tensor_to_everyone(rank: int, size: int, kind: str) -> None:
    split = Split(rank, size, kind)
    whole, logits = split.head(split.x), split.logits()
    values, detached = whole.detach(), logits.detach()
    printed = repr(logits) if rank == 0 else ""  # a process may print alone
    file = io.BytesIO()
    torch.save({"logits": detached}, file)
    file.seek(0)
    found = {
        "is split": isinstance(logits, ShardedActivation) and isinstance(detached, ShardedActivation),
        "is a tensor": isinstance(logits, Tensor) and len(logits) == ROWS,
        "shape": (logits.shape, logits.stride(), logits.ndim) == (whole.shape, whole.stride(), 3),
        "type": (logits.dtype, logits.device, logits.numel()) == (whole.dtype, whole.device, whole.numel()),
        "window": logits[:, :-1].shape == whole[:, :-1].shape,
        "history": logits.requires_grad and not logits.is_leaf and not detached.requires_grad,
        "printed": rank > 0 or ("columns 0 to 3 of 11" if kind == "columns" else "2 of 8 tokens") in printed,
        "pickled": torch.allclose(pickle.loads(pickle.dumps(detached)), values, atol=1e-6),  # noqa: S301
        "saved": torch.allclose(torch.load(file)["logits"], values, atol=1e-6),
        "copied": torch.allclose(copy.deepcopy(detached), values, atol=1e-6),
        "numpy": np.allclose(detached.numpy(), values, atol=1e-6) and np.allclose(detached.cpu(), values, atol=1e-6),
        "item": abs(detached[1, 2, 10].item() - values[1, 2, 10].item()) < 1e-6,
        "best": torch.equal(logits.topk(2).indices, whole.topk(2).indices),
        "joined": torch.allclose(torch.cat([logits, whole]), torch.cat([whole, whole]), atol=1e-6),
        "turned": torch.allclose(logits.mT, whole.mT, atol=1e-6),
    }
    for autocast, band in ((False, 1e-2), (True, 1e-6)):
        own, all_of_it = split.logits(torch.bfloat16), whole.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, expected = mean(own), mean(all_of_it)
        found[f"autocast {autocast}"] = got.dtype == expected.dtype and distance(got, expected) <= band
    with torch.inference_mode():
        last, expected = split.logits()[:, -1] / 2.0, values[:, -1] / 2.0
        last[last < 0.1] = -torch.inf
        found["sampled"] = torch.allclose(last, expected.masked_fill(expected < 0.1, -torch.inf), atol=1e-6)
    labels = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    labels[0, 0] = CLASSES  # a token of the first rank, and a class of none
    with pytest.raises(RuntimeError, match="out of bounds: logits have 11 classes"):
        F.cross_entropy(split.logits().transpose(1, 2), labels)
    assert all(found.values()), found


def tokens_of(rank: int, size: int, value: float = 1.0) -> Tensor:
    group: Any = dist.group.WORLD
    return split_tokens(torch.full((ROWS, TOKENS // size, CLASSES), value + rank), TokenPartition(group), 1)


@on_ranks()
def test_who_asks_for_whole_logits_is_told_once(rank: int, size: int) -> None:
    logits = tokens_of(rank, size)
    with messages() as said, verbose_logging(True):
        mean(logits)
        for _ in range(2):
            (logits[:, 1:] * FACTORS[:, 1:]).sum()
        (logits[:, 2:] * FACTORS[:, 2:]).sum()
    if rank == 0:
        (message,) = said
        assert "mul asks for all tokens of (2, 7, 11)" in message


@on_ranks()
def test_what_readers_tell_each_other_does_not_grow(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    for step in range(4):
        logits = tokens_of(rank, size, 1.0 + step)
        largest = logits.amax() if rank else logits.flatten().max()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    keys = [f"atorch/split/{group.group_name}/{kind}/{each}" for each in range(1, 5) for kind in ("here", "all")]
    assert (float(largest), float(logits.sum() / logits.numel())) == (5.0, 4.5)
    assert [store.check([key]) for key in keys] == [False] * 6 + [True] * 2


@pytest.mark.parametrize("nested", [False, True])
@on_ranks(4)
def test_who_does_not_read_with_the_others_is_named(rank: int, size: int, nested: bool) -> None:
    logits = tokens_of(rank, size)
    if nested:
        logits = logits.transpose(1, 2)[:, :, 1:]
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "MEETING", timedelta(seconds=0.01))
            patch.setattr(collectives, "TIMEOUT", timedelta(seconds=0.1))
            with pytest.raises(ArgumentError, match="is called on rank 0 but not on 1, 2, 3; call it on all") as caught:
                logits.amax()
        assert nested or "amax of a tensor of (2, 8, 11)" in str(caught.value)
    numbers = torch.ones(3) * rank
    dist.all_reduce(numbers)
    assert float(numbers.sum()) == 18.0  # nothing was left under way
