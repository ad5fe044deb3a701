"""Ring attention in the place of a block's `scaled_dot_product_attention`.

A block's call has a rank's part of queries, keys and values, and the full mask, which models make before their blocks.
So any mask works that spans the sequences and is not learnt. Its fully masked pieces are skipped, as in a causal mask.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.runtime.context_parallel.load_balancing import Deal, RingOrder, schedule
from atorch.runtime.context_parallel.ring import Ring, attend_around, checked, plan_of
from atorch.runtime.sequence_parallel import Ulysses
from atorch.runtime.sequence_parallel.attention import Attend, AttentionCall

_CAST = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that autocast casts


class _Last(NamedTuple):
    mask: weakref.ref[Tensor]
    seen: tuple[int, tuple[int, int]]  # version of the mask, and (queries, keys)
    meetings: RingOrder


class RingExchange:
    """The ring exchange over the ranks of a group, each with the tokens that `Deal` assigns to it."""

    def __init__(self, group: dist.ProcessGroup, *, load_balance: bool) -> None:
        self._ring, self._deal = Ring(group), Deal(group.size(), load_balance)
        self._last: _Last | None = None

    def unfit(self, call: AttentionCall) -> str | None:
        """The reason why a call with all tokens cannot go around a ring, or None."""
        query, key = call.query, call.key
        if query.dim() not in (3, 4):
            return f"its queries have {query.dim()} dims; a ring takes (batch, heads, tokens, width)"
        if query.dim() == 4 and query.shape[1] % key.shape[1]:
            return f"its {query.shape[1]} heads of queries are not shared out evenly over {key.shape[1]} of keys"
        for name, tensor in (("queries", query), ("keys", key)):
            if tensor.shape[-2] % self._deal.num_pieces:
                return f"its {tensor.shape[-2]} {name} cannot be cut into {self._deal.num_pieces} equal pieces"
        try:
            checked(query, key, call.attn_mask, call.is_causal, 1)
        except ArgumentError as error:
            return str(error)
        return None

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        """This rank's rows of attention; `attend` is not called."""
        query, key, value, mask = _as_autocast(call)
        if query.dim() == 3:
            query, key, value = query[None], key[None], value[None]
        mask = checked(query, key, mask, call.is_causal, self._ring.size)
        order = self._meetings(query.shape[-2], key.shape[-2], mask, call.is_causal)
        out = attend_around(query, key, value, plan_of(self._ring, order, query, mask, call.scale, call.dropout_p))
        return out if call.query.dim() == 4 else out[0]

    def _meetings(self, num_queries: int, num_keys: int, mask: Tensor | None, is_causal: bool) -> RingOrder:
        """The schedule; cached, so that the values of a mask that all blocks get are read once."""
        lengths = num_queries, num_keys
        if mask is None:
            return schedule(self._deal, self._ring.rank, *lengths, is_causal=is_causal)
        last = self._last
        if last is None or last.mask() is not mask or last.seen != (mask._version, lengths):
            order = schedule(self._deal, self._ring.rank, *lengths, mask)
            last = self._last = _Last(weakref.ref(mask), (mask._version, lengths), order)
        return last.meetings

    def __deepcopy__(self, memo: dict[int, Any]) -> RingExchange:
        return self  # a copy of the model lives on the same processes


def _as_autocast(call: AttentionCall) -> list[Any]:
    """Queries, keys, values and mask in the dtype to which autocast would cast them."""
    device = call.query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return [
        tensor if dtype is None or tensor is None or tensor.dtype not in _CAST else tensor.to(dtype)
        for tensor in (call.query, call.key, call.value, call.attn_mask)
    ]


class UlyssesRing:
    """Heads are exchanged over the group `inner`; keys and values go around the group `outer`.

    Fang and Zhao 2024, arXiv 2405.07719. The token stream sees one group of ranks, numbered with the inner axis
    fastest. After the exchange for heads, each rank of an inner group has the group's joint tokens. With load balance
    these are a run of the front and one of the back in interleaved pieces; `_in_order` sorts them for the ring.
    """

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
