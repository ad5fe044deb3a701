"""Ulysses in an inner group, and a ring around these groups: tokens are split over both axes, heads over the inner one.

Fang and Zhao 2024, arXiv 2405.07719. The token stream sees one group of ranks, numbered with the inner axis fastest.
After the exchange for heads, each rank of an inner group has the group's joint tokens. With load balance these are a
run of the front and one of the back in interleaved pieces; `_in_order` sorts them into the pieces that a ring expects.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.runtime.context_parallel.ring_dispatch import RingExchange
from atorch.runtime.sequence_parallel import AttentionCall, Ulysses
from atorch.runtime.sequence_parallel.attention import Attend


class UlyssesRing:
    """Heads are exchanged over the group `inner`; keys and values go around the group `outer`."""

    def __init__(self, inner: dist.ProcessGroup, outer: dist.ProcessGroup, *, load_balance: bool) -> None:
        self._ulysses, self._ring = Ulysses(inner), RingExchange(outer, load_balance=load_balance)
        self._pieces = inner.size() if load_balance else 1

    def unfit(self, call: AttentionCall) -> str | None:
        """The reason why Ulysses or the ring cannot split a call with all tokens, or None."""
        return self._ulysses.unfit(call) or self._ring.unfit(call)

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        def around(joint: AttentionCall) -> Tensor:
            query, key, value = (self._in_order(tensor) for tensor in joint[:3])
            return self._as_dealt(self._ring(joint._replace(query=query, key=key, value=value), attend))

        return self._ulysses(call, around)

    def _in_order(self, x: Tensor) -> Tensor:
        """Alternating fronts and mirrored backs of the inner ranks, sorted into one front and one back."""
        if self._pieces == 1:
            return x
        fronts, backs = x.unflatten(-2, (self._pieces, 2, -1)).unbind(-3)
        return torch.cat([fronts.flatten(-3, -2), backs.flip(-3).flatten(-3, -2)], -2)

    def _as_dealt(self, x: Tensor) -> Tensor:
        """The inverse of `_in_order`."""
        if self._pieces == 1:
            return x
        fronts, backs = x.unflatten(-2, (2, self._pieces, -1)).unbind(-4)
        return torch.stack([fronts, backs.flip(-3)], -3).flatten(-4, -2)

    def __deepcopy__(self, memo: dict[int, Any]) -> UlyssesRing:
        return self  # a copy of the model lives on the same processes
