"""Lazy logits: losses by chunks are those of all logits, and so is whatever else is asked of them."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.errors import ArgumentError
from atorch.logs import log_once
from atorch.profiler.memory_tracker import OTHER, LiveBytes
from atorch.runtime.loss.lazy_logits import LazyLogits, chunk_logits

CLASSES, WIDTH, CHUNK = 50, 16, 7
generator = torch.Generator().manual_seed(5)
TOKENS, LABELS = (torch.randint(0, CLASSES, (4, 33), generator=generator) for _ in range(2))
LABELS[1], LABELS[0, :9] = -100, -100  # more rows than a chunk has, and the whole of one
WEIGHT = torch.rand(CLASSES, generator=generator)

Loss = Callable[[Tensor], Tensor]
FLAT = LABELS.view(-1)


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, CLASSES)


BY_CHUNKS: dict[str, Loss] = {
    "mean": lambda logits: F.cross_entropy(flat(logits), FLAT),
    "shifted": lambda logits: F.cross_entropy(flat(logits[..., :-1, :].contiguous().float()), LABELS[:, 1:].flatten()),
    "transposed": lambda logits: F.cross_entropy(logits.transpose(1, 2), LABELS),
    "tokens of a batch": lambda logits: F.cross_entropy(flat(logits), FLAT, reduction="sum") / 77,
    "one each": lambda logits: (F.cross_entropy(logits.permute(0, 2, 1), LABELS, reduction="none") * LABELS).mean(),
    "smoothed and weighted": lambda logits: F.cross_entropy(
        flat(logits).float(), FLAT, weight=WEIGHT, label_smoothing=0.1
    ),
    "another index": lambda logits: F.cross_entropy(flat(logits), FLAT.clamp(min=0), ignore_index=0),
    "nothing counts": lambda logits: F.cross_entropy(flat(logits), torch.full_like(FLAT, -100)),
    "capped": lambda logits: F.cross_entropy(flat(torch.tanh(logits / 3.0) * 3.0), FLAT),
    "scaled": lambda logits: F.cross_entropy(flat(2.0 * logits), FLAT),
    "z-loss": lambda logits: F.cross_entropy(flat(logits), FLAT) + 0.01 * logits.logsumexp(-1).pow(2).mean(),
    "log-softmax": lambda logits: F.nll_loss(flat(F.log_softmax(logits, -1)), FLAT),
    "of each label": lambda logits: logits.log_softmax(-1).gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).mean(),
    "those that count": lambda logits: F.cross_entropy(logits[LABELS != -100], LABELS[LABELS != -100]),
    "twice": lambda logits: F.cross_entropy(flat(logits), FLAT) - F.cross_entropy(flat(logits)[:50], FLAT[:50]),
    "accuracy": lambda logits: F.cross_entropy(flat(logits), FLAT) + (logits.argmax(-1) == LABELS).float().mean(),
}


def written(logits: Tensor) -> Tensor:
    before = logits * 2
    logits[:, 0] = 0.0
    return F.cross_entropy(flat(logits), FLAT) + before.logsumexp(-1).mean()


WHOLE: dict[str, Loss] = {
    "divergence": lambda logits: F.kl_div(
        F.log_softmax(logits, -1), torch.full_like(logits, 0.02), reduction="batchmean"
    ),
    "likely classes": lambda logits: F.cross_entropy(flat(logits), flat(logits).detach().softmax(-1)),
    "penalty": lambda logits: F.cross_entropy(flat(logits), FLAT) + logits.pow(2).mean(),
    "largest": lambda logits: logits.topk(3).values.mean(),
    "in place": lambda logits: F.cross_entropy(flat(logits.mul_(2)), FLAT),
    "written": written,
}


def outcome(
    loss: Loss, in_chunks: bool, dtype: torch.dtype, autocast: torch.dtype | None = None, frozen: str = ""
) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    if in_chunks:
        chunk_logits(model[2], CHUNK)  # type: ignore[arg-type]
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        logits = model(TOKENS)
        value = loss(logits)
    value.backward()
    return value, [each.grad for each in model.parameters() if each.grad is not None], logits


def same(loss: Loss, dtype: torch.dtype, tolerance: float, **how: Any) -> Tensor:
    """The lazy logits of which a loss and its gradients are the plain ones."""
    (got, grads, logits), (expected, wanted, _) = (outcome(loss, each, dtype, **how) for each in (True, False))
    assert isinstance(logits, LazyLogits)
    assert type(got) is Tensor
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=tolerance, atol=tolerance)
    assert len(grads) == len(wanted) > 0
    for own, plain in zip(grads, wanted, strict=True):
        assert own.dtype == plain.dtype
        assert (own - plain).norm() <= tolerance * plain.norm()
    return logits


@pytest.mark.parametrize("name", BY_CHUNKS)
def test_a_loss_by_chunks_is_that_of_all_logits(name: str) -> None:
    logits: Any = same(BY_CHUNKS[name], torch.float32, 1e-6)
    assert not logits._is_whole


@pytest.mark.parametrize("name", WHOLE)
def test_what_else_is_asked_for_is_computed_of_all_logits(name: str) -> None:
    logits: Any = same(WHOLE[name], torch.float32, 1e-6)
    assert logits._is_whole


@pytest.mark.parametrize(
    ("name", "dtype", "autocast"),
    [
        ("mean", torch.float32, torch.bfloat16),
        ("one each", torch.float32, torch.float16),
        ("capped", torch.bfloat16, None),
        ("divergence", torch.float64, None),
        ("mean", torch.bfloat16, None),
        ("capped", torch.float32, torch.float16),
    ],
    ids=str,
)
def test_a_loss_in_other_numbers(name: str, dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    is_exact = dtype == torch.float64
    same({**BY_CHUNKS, **WHOLE}[name], dtype, 1e-12 if is_exact else 3e-2, autocast=autocast)


@pytest.mark.parametrize("frozen", ["0.", "2.", "bias"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    same(BY_CHUNKS["mean"], torch.float32, 1e-6, frozen=frozen)


def test_small_gradients_survive_fp16_under_a_loss_scale() -> None:
    scale = 2.0**14
    loss: Loss = lambda logits: scale * 1e-4 * F.cross_entropy(flat(logits).float(), FLAT)  # noqa: E731
    same(loss, torch.float32, 5e-3, autocast=torch.float16)


def test_a_kept_graph_copies_and_printing() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    chunk_logits(head, CHUNK)
    loss = F.cross_entropy(head(torch.randn(30, WIDTH)), FLAT[:30])
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    torch.testing.assert_close(head.weight.grad, 2 * once)
    _, logits = lazy()
    assert "computed when they are read" in repr(logits)
    assert logits.shape == (30, CLASSES)
    assert logits.new_zeros(2).dtype == logits.dtype
    torch.testing.assert_close(copy.deepcopy(logits.detach()), logits.detach().clone())


def lazy(rows: int = 30, **how: Any) -> tuple[Any, Tensor]:
    head = nn.Linear(WIDTH, CLASSES)
    chunk_logits(head, CHUNK, **how)
    return head, head(torch.randn(rows, WIDTH))


def test_few_rows_are_computed_at_once_and_without_gradients_all_where_weights_change() -> None:
    assert type(lazy(CHUNK)[1]) is Tensor
    with torch.no_grad():
        logits = lazy()[1]
        assert isinstance(logits, LazyLogits)
        assert not F.cross_entropy(logits, FLAT[:30].clamp(min=0)).requires_grad
        assert type(lazy(without_gradients=False)[1]) is Tensor


def test_gradients_and_logits_of_a_changed_weight_that_there_are_not_are_named() -> None:
    head, logits = lazy()
    with torch.no_grad():
        head.weight.add_(1.0)
    with pytest.raises(ArgumentError, match="Read the logits before"):
        F.cross_entropy(logits, FLAT[:30])
    with pytest.raises(ArgumentError, match="Read the logits before"):
        logits.sum()
    head, logits = lazy()
    loss = F.cross_entropy(logits, FLAT[:30].clamp(min=0))
    with pytest.raises(ArgumentError, match="create_graph=True"):
        torch.autograd.grad(loss, head.weight, create_graph=True)
    _, logits = lazy()
    (grad,) = torch.autograd.grad(F.cross_entropy(logits, FLAT[:30].clamp(min=0)), logits)
    with pytest.raises(ArgumentError, match="never computes"):
        grad.sum()


def test_what_asks_for_logits_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="atorch"):
        for _ in range(2):
            lazy()[1].softmax(-1)
    assert len(caplog.records) == 1
    assert "cross_entropy: softmax asks for the logits" in caplog.text


def test_a_head_within_a_transform_is_plain() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    chunk_logits(head, CHUNK)
    hidden = torch.randn(30, WIDTH)
    got = torch.func.grad(lambda x: head(x).logsumexp(-1).sum())(hidden)
    hidden.requires_grad_()
    (expected,) = torch.autograd.grad(head(hidden).logsumexp(-1).sum(), hidden)
    torch.testing.assert_close(got, expected)


def test_no_more_than_a_chunk_of_logits_exists() -> None:
    def most(in_chunks: bool) -> float:
        head, hidden = nn.Linear(4, 4096, bias=False), torch.randn(1024, 4, requires_grad=True)
        if in_chunks:
            chunk_logits(head, 64)
        labels = torch.randint(4096, (1024,))
        with LiveBytes() as live, live.default_category(OTHER):
            F.cross_entropy(head(hidden), labels).backward()
            live.mark("end")
        return live.moments[0].total_bytes

    assert most(True) <= most(False) / 8
