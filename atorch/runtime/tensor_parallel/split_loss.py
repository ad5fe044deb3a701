"""Cross entropy and related losses of logits whose columns are on several ranks, without gathering the logits.

Each rank computes a few numbers a row from its columns: their log-sum-exp, the target's logit if it has that column,
and, for smoothed labels, the sum of the logits. One all-gather of these, as long as there are rows, gives every rank
the loss; backward needs no communication. (Shoeybi et al. 2019, arXiv 1909.08053, section 3, send as little by three
all-reduces. torch's `loss_parallel` takes DTensors, which do not mix with plain tensors.)

Results are whole on every rank, except those of `log_softmax`. NotImplemented: no split version exists for these
arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from atorch.runtime.gradients.no_double_backward import first_order
from atorch.runtime.tensor_parallel.collectives import fork, reduce
from atorch.runtime.tensor_parallel.vocabulary_shards import VocabularyShards


class _Rows(torch.autograd.Function):
    """The log-sum-exp of every row, the target's logit, and the (weighted) sum of all logits."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, columns: VocabularyShards, target: Tensor | None, sums: bool, weight: Tensor | None
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(part.dtype, torch.float32)
        top = part.amax(-1, keepdim=True).to(dtype)
        top = top.masked_fill(top.isinf(), 0.0)
        numbers = [(part - top).exp_().sum(-1).log_() + top.squeeze(-1)]
        index = elsewhere = None
        if target is not None:
            index, elsewhere = columns.find(target)
            target_logits = part.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            numbers.append(target_logits.masked_fill(elsewhere, 0.0).to(dtype))
        if sums:
            numbers.append(part.sum(-1, dtype=dtype) if weight is None else (part * weight).sum(-1, dtype=dtype))
        gathered = columns.meet(torch.stack(numbers))
        total = gathered[:, 0].logsumexp(0)
        ctx.save_for_backward(part, total, index, elsewhere, weight)
        ctx.sums = sums
        return total, *gathered[:, 1:].sum(0).unbind()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part, total, index, elsewhere, weight = ctx.saved_tensors
        of_total, *rest = (gradient.unsqueeze(-1) for gradient in grads)
        grad = (part - total.unsqueeze(-1)).exp_().mul_(of_total)
        if index is not None:
            at = index.unsqueeze(-1)
            grad.scatter_(-1, at, grad.gather(-1, at) + rest.pop(0).masked_fill(elsewhere.unsqueeze(-1), 0.0))
        if ctx.sums:
            grad.add_(rest.pop() if weight is None else rest.pop() * weight)
        return grad.to(part.dtype), None, None, None, None


def _rows(
    part: Tensor,
    columns: VocabularyShards,
    target: Tensor | None = None,
    sums: bool = False,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:
    rows: tuple[Tensor, ...] = _Rows.apply(part, columns, target, sums, weight)  # type: ignore[no-untyped-call]
    return rows


class ClassTargets(NamedTuple):
    """The arguments of `F.cross_entropy` and `F.nll_loss` after the logits."""

    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def fit(self, logits: Tensor, axis: int) -> bool:
        """True if targets are one class for each row of logits, and class weights need no gradient."""
        rows = (*logits.shape[:axis], *logits.shape[axis + 1 :])
        is_constant = self.weight is None or not self.weight.requires_grad
        is_current = self.size_average is None and self.reduce is None  # torch deprecates these two
        are_classes = self.target.dtype == torch.int64 and self.target.shape == rows
        return is_current and is_constant and are_classes and axis == min(logits.dim() - 1, 1)

    @property
    def kept(self) -> Tensor:
        """A mask of the rows that count."""
        return self.target != self.ignore_index

    @property
    def classes(self) -> Tensor:
        """The targets, with 0 for rows that do not count."""
        return self.target.masked_fill(~self.kept, 0)

    def shares(self, dtype: torch.dtype) -> Tensor:
        """The weight of each row in the loss."""
        if self.weight is None:
            return self.kept.to(dtype)
        return self.weight.to(dtype)[self.classes].masked_fill(~self.kept, 0.0)

    def reduced(self, losses: Tensor, shares: Tensor, dtype: torch.dtype) -> Any:
        """The loss of the rows' `losses`, which contain their shares."""
        losses = losses.masked_fill(~self.kept, 0.0)  # also those that are not finite
        if self.reduction == "none":
            return losses.to(dtype)
        if self.reduction == "sum":
            return losses.sum().to(dtype)
        return (losses.sum() / shares.sum()).to(dtype) if self.reduction == "mean" else NotImplemented


def cross_entropy(part: Tensor, columns: VocabularyShards, axis: int, *args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.cross_entropy` with class indices as targets."""
    given = ClassTargets(*args, **kwargs)
    if not given.fit(part, axis):
        return NotImplemented
    weight, smoothing = given.weight, given.label_smoothing
    own_weight = columns.take(weight, 0) if weight is not None else None
    total, picked, *sums = _rows(part.movedim(axis, -1), columns, given.classes, smoothing > 0.0, own_weight)
    shares = given.shares(total.dtype)
    losses = (total - picked) * shares
    if sums:
        all_weights = float(columns.total) if weight is None else weight.sum()
        smooth = (all_weights * total - sums[0]) * (smoothing / columns.total)
        losses = (1.0 - smoothing) * losses + smooth
    return given.reduced(losses, shares, _loss_dtype(part))


def nll_loss(part: Tensor, columns: VocabularyShards, axis: int, *args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.nll_loss`, of log-probabilities."""
    given = ClassTargets(*args, **kwargs)
    if not given.fit(part, axis):
        return NotImplemented
    picked = gather(part, columns, axis, axis, given.classes.unsqueeze(axis)).squeeze(axis)
    shares = given.shares(part.dtype)
    return given.reduced(-picked * shares, shares, _loss_dtype(part))


def logsumexp(
    part: Tensor, columns: VocabularyShards, axis: int, dim: int | tuple[int, ...], keepdim: bool = False
) -> Any:
    """`torch.logsumexp` over the vocabulary."""
    if not isinstance(dim, int) or dim % part.dim() != axis:
        return NotImplemented
    (total,) = _rows(part.movedim(axis, -1), columns)
    return (total.unsqueeze(axis) if keepdim else total).to(part.dtype)


def log_softmax(
    part: Tensor,
    columns: VocabularyShards,
    axis: int,
    dim: int | None,
    dtype: torch.dtype | None = None,
    _stacklevel: int = 3,
) -> Any:
    """This rank's columns of `torch.nn.functional.log_softmax` over the vocabulary."""
    if dim is None or dim % part.dim() != axis:
        return NotImplemented
    part = part if dtype is None else part.to(dtype)
    (total,) = _rows(part.movedim(axis, -1), columns)
    return (part - fork(total, columns.group).unsqueeze(axis)).to(_loss_dtype(part))


def gather(part: Tensor, columns: VocabularyShards, axis: int, dim: int, index: Tensor) -> Any:
    """`torch.gather` along the vocabulary."""
    if dim % part.dim() != axis:
        return NotImplemented
    local_index, elsewhere = columns.find(index)
    return reduce(part.gather(axis, local_index).masked_fill(elsewhere, 0.0), columns.group)


def _loss_dtype(part: Tensor) -> torch.dtype:
    """The dtype of torch's losses: for 16-bit logits it has 16 bits, or 32 under autocast."""
    is_autocast = torch.is_autocast_enabled(part.device.type)
    return torch.promote_types(part.dtype, torch.float32) if is_autocast else part.dtype
