"""Losses of sharded logits, without gathering the logits.

Logits of a rank's own samples or tokens: each rank computes a number a row, and all gather these.

Logits of a rank's columns: each rank computes a few numbers a row. They are the log-sum-exp of its columns, the
target's logit if it has that column, and, for smoothed labels, the sum of the logits. One all-gather of these, as long
as there are rows, gives every rank the loss; backward needs no communication. (Shoeybi et al. 2019, arXiv 1909.08053,
section 3, send as little by three all-reduces. torch's `loss_parallel` takes DTensors, which do not mix with plain
tensors.)

Results are whole on every rank, except those of `log_softmax`. NotImplemented: no split version exists for these
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from atorch.runtime.gradients.backward import first_order
from atorch.runtime.tensor_parallel.sharded_activation import DimSharding, SplitTensor, to_part, whole_of
from atorch.runtime.tensor_parallel.split_forward import fork, join, reduce


@dataclass(frozen=True)
class VocabularyShards(DimSharding):
    """The columns of logits that each rank has: rank r `counts[r]`, after those of lower ranks; this one is `rank`."""

    counts: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: dict[int, Any]) -> VocabularyShards:
        return self  # process groups cannot be copied

    @property
    def total(self) -> int:  # type: ignore[override]
        return sum(self.counts)

    @property
    def part_size(self) -> int:  # type: ignore[override]
        return self.counts[self.rank]

    @property
    def start(self) -> int:
        return sum(self.counts[: self.rank])

    def named(self) -> str:
        return f"columns {self.start} to {self.start + self.part_size} of {self.total}"

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor, as a view."""
        return whole.narrow(dim, self.start, self.part_size)

    def join(self, part: Tensor, dim: int) -> Tensor:
        return join(part.movedim(dim, -1), self.counts, self.group).movedim(-1, dim)

    def meet(self, values: Tensor) -> Tensor:
        """The values of every rank, stacked along a new first dim. Without gradients."""
        gathered = [torch.empty_like(values) for _ in self.counts]
        dist.all_gather(gathered, values.contiguous(), group=self.group)
        return torch.stack(gathered)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of tokens among this rank's columns, 0 for those of other ranks; and a mask of the latter.

        Raises:
            RuntimeError: a token is not a column of any rank (on CUDA, the device's assertion).
        """
        check_targets(tokens, self.total)
        index = tokens - self.start
        elsewhere = (index < 0) | (index >= self.part_size)
        return index.masked_fill(elsewhere, 0), elsewhere


def check_targets(target: Tensor, classes: int) -> None:
    in_bounds = ((target >= 0) & (target < classes)).all()
    torch._assert_async(in_bounds, f"a target is out of bounds: logits have {classes} classes")


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
    split: SplitTensor, target: Tensor | None = None, sums: bool = False, weight: Tensor | None = None
) -> tuple[Tensor, ...]:
    part, columns = to_part(split).movedim(split._axis, -1), split._layout
    own_weight = None if weight is None else columns.take(weight, 0)
    return _Rows.apply(part, columns, target, sums, own_weight)  # type: ignore[no-any-return, no-untyped-call]


def loss(
    func: Callable[..., Tensor],
    split: SplitTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` or `F.nll_loss` with class indices as targets; each rank computes its rows, or its columns."""
    classes, axis = min(split.dim() - 1, 1), split._axis
    by_columns = _has_columns(split, classes)
    is_known = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    if not (is_known and are_classes_of(split, classes, target, weight)) or (axis == classes and not by_columns):
        return NotImplemented
    kept = target != ignore_index
    kept_classes = target.masked_fill(~kept, 0)

    def shares(dtype: torch.dtype) -> Tensor:
        """The weight of each row in the loss."""
        return kept.to(dtype) if weight is None else weight.to(dtype)[kept_classes].masked_fill(~kept, 0.0)

    if not by_columns:
        check_targets(kept_classes, split.shape[classes])
        target_axis = axis - (axis > classes)
        own_target = split._layout.take(target, target_axis)
        options = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
        part = func(to_part(split), own_target, weight, ignore_index=ignore_index, reduction="none", **options)
        losses = whole_of(split.like(part, target_axis))
    elif func is F.nll_loss:
        picked: Tensor = gather(split, axis, kept_classes.unsqueeze(axis)).squeeze(axis)
        losses = -picked * shares(picked.dtype)
    else:
        total, picked, *sums = _rows(split, kept_classes, label_smoothing > 0.0, weight)
        losses = (total - picked) * shares(total.dtype)
        if sums:
            num_classes = split._layout.total
            all_weights = float(num_classes) if weight is None else weight.sum()
            smooth = (all_weights * total - sums[0]) * (label_smoothing / num_classes)
            losses = (1.0 - label_smoothing) * losses + smooth
    losses = losses.masked_fill(~kept, 0.0)  # also those not finite
    if reduction != "none":
        losses = losses.sum() / (shares(losses.dtype).sum() if reduction == "mean" else 1.0)
    return losses.to(_loss_dtype(split))


def _has_columns(split: SplitTensor, dim: Any) -> bool:
    """True if `dim` is the vocabulary, and each rank has some of its columns."""
    is_own = isinstance(dim, int) and dim % split.dim() == split._axis
    return is_own and isinstance(split._layout, VocabularyShards)


def logsumexp(split: SplitTensor, dim: Any, keepdim: bool = False) -> Any:
    """`torch.logsumexp` over the vocabulary."""
    if not _has_columns(split, dim):
        return NotImplemented
    (total,) = _rows(split)
    return (total.unsqueeze(dim) if keepdim else total).to(split.dtype)


def log_softmax(split: Any, dim: Any, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Any:
    """Columns of `torch.nn.functional.log_softmax` over the vocabulary."""
    if not _has_columns(split, dim):
        return NotImplemented
    split = split if dtype is None else split.to(dtype)
    (total,) = _rows(split)
    of_part = to_part(split) - fork(total, split._layout.group).unsqueeze(dim)
    return split.like(of_part.to(_loss_dtype(split)))


def gather(split: SplitTensor, dim: int, index: Tensor) -> Any:
    """`torch.gather` along the vocabulary."""
    if not _has_columns(split, dim):
        return NotImplemented
    local_index, elsewhere = split._layout.find(index)
    return reduce(to_part(split).gather(dim, local_index).masked_fill(elsewhere, 0.0), split._layout.group)


def are_classes_of(logits: Tensor, axis: int, target: Tensor, weight: Tensor | None) -> bool:
    """True if targets are one class for each row of logits, and class weights need no gradient."""
    rows = (*logits.shape[:axis], *logits.shape[axis + 1 :])
    is_constant = weight is None or not weight.requires_grad
    return axis == min(logits.dim() - 1, 1) and target.dtype == torch.int64 and target.shape == rows and is_constant


def _loss_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of torch's losses: for 16-bit logits it has 16 bits, or 32 under autocast."""
    is_autocast = torch.is_autocast_enabled(logits.device.type)
    return torch.promote_types(logits.dtype, torch.float32) if is_autocast else logits.dtype
