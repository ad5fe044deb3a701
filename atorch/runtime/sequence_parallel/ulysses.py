"""Attention over split tokens, which are exchanged for split heads before it, and back after it.

    queries, keys, values (batch, heads, tokens / n, width) → (batch, heads / n, tokens, width) → attention → back

Four all-to-alls, each with its inverse all-to-all in backward (Jacobs et al. 2023, arXiv 2309.14509, section 3). Every
rank's attention sees all tokens, so that any mask works unchanged.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.sequence_parallel.attention import Attend, AttentionCall


class Ulysses:
    """The exchange over the ranks of a group. Each has one contiguous piece of the tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def unfit(self, call: AttentionCall) -> str | None:
        """The reason why ranks cannot share the query heads evenly, or None. There may be fewer key heads."""
        if call.query.dim() != 4:
            return f"its queries have {call.query.dim()} dims, and heads are exchanged as the second of 4"
        heads, size = call.query.shape[1], self._group.size()
        if heads % size:
            fit = ", ".join(str(divisor) for divisor in range(2, heads + 1) if heads % divisor == 0)
            return f"{size} ranks do not divide its {heads} heads; give the axis a size of {fit}"
        return None

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        """Attention to all tokens with this rank's heads."""
        key, value = (to_heads(_repeated(tensor, self._group.size()), self._group) for tensor in (call.key, call.value))
        query, mask = to_heads(call.query, self._group), call.attn_mask
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            heads = query.shape[1]
            mask = mask.narrow(-3, heads * self._group.rank(), heads)
        return to_tokens(attend(call._replace(query=query, key=key, value=value, attn_mask=mask)), self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ulysses:
        return self


def _repeated(x: Tensor, size: int) -> Tensor:
    """Repeat each head until `size` divides their number; the order keeps query heads at their key heads."""
    times = math.lcm(x.shape[1], size) // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads, tokens / n, width) → (batch, heads / n, tokens, width)."""
    exchanged: Tensor = _Exchange.apply(x, 1, 2, group)  # type: ignore[no-untyped-call]
    return exchanged


def to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads / n, tokens, width) → (batch, heads, tokens / n, width)."""
    exchanged: Tensor = _Exchange.apply(x, 2, 1, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = joined, cut, group
        return _exchange(x, cut, joined, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.back), None, None, None  # type: ignore[no-untyped-call]


def _exchange(x: Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    """The r-th of equal pieces along `cut` from all ranks, for rank r, concatenated along `joined`."""
    size = group.size()
    pieces = x.unflatten(cut, (size, x.shape[cut] // size)).movedim(cut, 0).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received.movedim(0, joined).flatten(joined, joined + 1)
