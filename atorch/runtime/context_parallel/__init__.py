"""Context parallelism by ring attention: ranks have parts of sequences; keys and values travel around a ring.

Liu et al. 2023, arXiv 2310.01889. At every hop a rank attends to the keys that it holds while it passes them on.
Results are merged by their log-sum-exps. Backward goes around once more: a rank adds its queries' contribution to the
gradients of the keys that it holds. These travel one hop behind the keys and end at the keys' own rank. Each direction
takes n - 1 hops, since no rank sends results of its own keys. Heads that share keys and values send them once.

Parts are accumulated in fp32. Gradients travel in the dtype of the keys, so that in 16 bits every hop rounds them once.
Dropout is drawn for each part, with the same seed in backward; its numbers differ from those of whole attention.

In the place of a block's `scaled_dot_product_attention`, a ring gets a rank's part of queries, keys and values. It gets
the full mask, which models make before their blocks. So any mask works that spans the sequences and is not learnt. Its
fully masked pieces are skipped, as in a causal mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.runtime.context_parallel.load_balancing import (
    Attended,
    PartialAttention,
    QueryKeyBlock,
    RingOrder,
    TokenAssignment,
    accumulated,
    attend,
    gradients,
    schedule,
)
from atorch.runtime.gradients.backward import first_order
from atorch.runtime.sequence_parallel import Ulysses
from atorch.runtime.sequence_parallel.attention import Attend, AttentionCall

__all__ = ["RingExchange", "TokenAssignment", "UlyssesRing"]


class Ring:
    """A group's ranks in a circle."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start sending to the next rank; the returned function waits, and returns the previous rank's tensor."""
        arriving = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.size),
                dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=(self.rank - 1) % self.size),
            ]
        )

        def arrived(sent: Tensor = tensor) -> Tensor:  # the default keeps it alive until it is sent
            for work in works:
                work.wait()
            return arriving

        return arrived


def checked(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, size: int) -> Tensor | None:
    """The mask with four dims; raises ArgumentError for arguments that a ring of `size` cannot honour."""
    rows, columns = size * query.shape[-2], size * key.shape[-2]
    if is_causal and rows != columns:
        raise ArgumentError(
            f"is_causal was given for {rows} queries and {columns} keys; give as many, or the mask that is meant"
        )
    if mask is None:
        return None
    if is_causal:
        raise ArgumentError("a mask was given with is_causal; give one of them, as torch has it")
    if mask.requires_grad:
        raise ArgumentError(
            "the mask needs a gradient, as learnt biases of positions do, and fused attention gives masks none; "
            "detach it, or leave sequences whole"
        )
    if mask.dim() < 2 or mask.shape[-1] != columns or mask.shape[-2] not in (1, rows):
        raise ArgumentError(
            f"the mask is {tuple(mask.shape)}, and the whole sequences have {rows} queries and {columns} keys; give "
            "each rank the mask of whole sequences"
        )
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)) if mask.dim() < 4 else mask


@dataclass(frozen=True)
class RingSchedule:
    """The work of one attention on this rank."""

    ring: Ring
    meetings: RingOrder
    mask: Tensor | None  # of the whole sequences
    scale: float
    dropout_p: float = 0.0
    seed: int = 0

    def parts(self, hop: int, query: Tensor, held: _Held) -> Iterator[tuple[QueryKeyBlock, PartialAttention]]:
        """The blocks to compute at a hop, with the rank's queries and the keys that it holds then."""
        before = sum(map(len, self.meetings[:hop]))
        for number, block in enumerate(self.meetings[hop]):
            key, value = held.part(block.columns)
            rows, seed = query[:, :, block.rows], self.seed + before + number
            mask = block.part_of(self.mask)
            yield block, PartialAttention(rows, key, value, mask, block.is_causal, self.scale, self.dropout_p, seed)


def attend_around(query: Tensor, key: Tensor, value: Tensor, plan: RingSchedule) -> Tensor:
    return _RingAttention.apply(query, key, value, plan)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingSchedule) -> Tensor:
        query, ring = _dense(query), plan.ring
        packed, shapes = torch.cat([key.flatten(), value.flatten()]), (key.shape, value.shape)
        held, rows = _Held(packed, shapes), _Rows(query, value)
        kept: list[tuple[Any, ...]] = []
        with torch.autocast(query.device.type, enabled=False):
            for hop in range(ring.size):
                arrived = ring.pass_on(held.packed) if hop + 1 < ring.size else None
                for block, part in plan.parts(hop, query, held):
                    attended = attend(part)
                    rows.add(block.rows, attended)
                    kept.append(attended.kept)
                if arrived is not None:
                    held.packed = arrived()
        out, logs = rows.results(query.dtype)
        ctx.save_for_backward(query, packed, out, logs)
        ctx.plan, ctx.shapes, ctx.kept = plan, shapes, kept
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, packed, out, logs = ctx.saved_tensors
        plan, kept, grad = ctx.plan, iter(ctx.kept), _dense(grad)
        ring, held, dtype = plan.ring, _Held(packed, ctx.shapes), accumulated(query.dtype)
        of_query, of_own = torch.zeros_like(query, dtype=dtype), held.zeros(dtype)
        returned: Callable[[], Tensor] | None = None
        with torch.autocast(query.device.type, enabled=False):
            for hop in range(ring.size):
                arrived = ring.pass_on(held.packed) if hop + 1 < ring.size else None
                of_held = of_own if hop == 0 else held.zeros(dtype)
                for block, part in plan.parts(hop, query, held):
                    rows = block.rows
                    whole = Attended(out[:, :, rows], logs[:, :, rows].contiguous(), next(kept))
                    totals = of_query[:, :, rows], *of_held.part(block.columns)
                    for total, addend in zip(totals, gradients(part, grad[:, :, rows], whole), strict=True):
                        total += addend
                if returned is not None:
                    of_held.packed += returned()  # from the ranks that these keys visited before
                if hop > 0:
                    returned = ring.pass_on(of_held.packed.to(packed.dtype))
                if arrived is not None:
                    held.packed = arrived()
        if returned is not None:
            of_own.packed += returned()
        of_key, of_value = of_own.part(slice(None))
        return of_query.to(query.dtype), of_key.to(packed.dtype), of_value.to(packed.dtype), None


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dim and no expanded dims, as kernels require."""
    return tensor if tensor.stride(-1) == 1 and 0 not in tensor.stride() else tensor.contiguous()


class _Held:
    """Keys and values, or their gradients, packed into one buffer that is sent at once."""

    def __init__(self, packed: Tensor, shapes: tuple[torch.Size, torch.Size]) -> None:
        self.packed, self._shapes = packed, shapes

    def part(self, columns: slice) -> tuple[Tensor, Tensor]:
        first = self._shapes[0].numel()
        key, value = self.packed[:first].view(self._shapes[0]), self.packed[first:].view(self._shapes[1])
        return key[:, :, columns], value[:, :, columns]

    def zeros(self, dtype: torch.dtype) -> _Held:
        return _Held(torch.zeros_like(self.packed, dtype=dtype), self._shapes)


class _Rows:
    """Running results of a rank's queries over the keys of the hops so far."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        batch, heads, rows, _ = query.shape
        dtype = accumulated(query.dtype)
        # In memory heads come after rows, the order that models need.
        self._out = query.new_zeros((batch, rows, heads, value.shape[-1]), dtype=dtype).transpose(1, 2)
        self._logs = query.new_full((batch, heads, rows), -torch.inf, dtype=dtype)

    def add(self, rows: slice, attended: Attended) -> None:
        """Merge results of some rows with more keys, weighted by their sums of exponentials."""
        before, logs = self._logs[:, :, rows], attended.logs
        both = torch.logaddexp(before, logs)
        base = both.masked_fill(both == -torch.inf, 0.0)  # rows that have seen no key: -inf - -inf is NaN
        old, new = (before - base).exp()[..., None], (logs - base).exp()[..., None]
        self._out[:, :, rows] = self._out[:, :, rows] * old + attended.out * new
        self._logs[:, :, rows] = both

    def results(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Final results and log-sum-exps, 0 for a row that saw no key."""
        return self._out.to(dtype), self._logs.masked_fill(self._logs == -torch.inf, 0.0)


_CAST = (torch.float32, torch.float16, torch.bfloat16)  # dtypes that autocast casts


class _Last(NamedTuple):
    mask: weakref.ref[Tensor]
    seen: tuple[int, tuple[int, int]]  # version of the mask, and (queries, keys)
    meetings: RingOrder


class RingExchange:
    """The ring exchange over the ranks of a group, each with the tokens that `TokenAssignment` assigns to it."""

    def __init__(self, group: dist.ProcessGroup, *, load_balance: bool) -> None:
        self._ring, self._deal = Ring(group), TokenAssignment(group.size(), load_balance)
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
        """This rank's rows of attention over whole sequences; `attend` is not called.

        The mask is that of the whole sequences, on every rank: (…, 1 or queries, keys).

        Raises:
            ArgumentError: the mask has another size, needs a gradient, or comes with `is_causal`; or the numbers of
                causal queries and keys differ.
        """
        query, key, value, mask = _as_autocast(call)
        if query.dim() == 3:
            query, key, value = query[None], key[None], value[None]
        mask = checked(query, key, mask, call.is_causal, self._ring.size)
        order = self._meetings(query.shape[-2], key.shape[-2], mask, call.is_causal)
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        seed = int(torch.randint(2**31, ())) + (self._ring.rank << 32) if call.dropout_p else 0
        plan = RingSchedule(self._ring, order, mask, scale, call.dropout_p, seed)
        out = attend_around(query, key, value, plan)
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
