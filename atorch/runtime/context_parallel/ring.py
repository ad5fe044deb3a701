"""Attention of sequences that are spread over ranks: keys and values go round a ring, queries stay.

Liu et al. 2023, arXiv 2310.01889. At every hop a rank attends to the keys that it has and passes them on meanwhile;
results are merged by the logarithms of their sums. Backward goes round once more: a rank adds what its queries give to
the gradients of the keys that it has, and these travel one hop behind them, home at the end. Each way takes n - 1 hops,
since nobody sends what it made of its own. Heads that share keys and values send them once.

Parts are added up in fp32. Gradients travel in the dtype of the keys, so that in 16 bits every hop rounds them once.
Dropout is drawn for every part anew and again in backward: right, and not the numbers that whole attention draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.errors import ArgumentError
from atorch.runtime.context_parallel.kernels import Attended, PartialAttention, accumulated, attend, gradients
from atorch.runtime.context_parallel.load_balancing import Deal, QueryKeyBlock, RingOrder, schedule
from atorch.runtime.gradients.no_double_backward import first_order


class Ring:
    """A group's ranks in a circle."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def pass_on(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send to the next rank, under way at once; the function waits, and returns what the one before has sent."""
        arriving = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.size),
                dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=(self.rank - 1) % self.size),
            ]
        )

        def arrived(sent: Tensor = tensor) -> Tensor:  # which has to live until it is gone
            for work in works:
                work.wait()
            return arriving

        return arrived


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: dist.ProcessGroup,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    load_balance: bool = False,
) -> Tensor:
    """This rank's rows of the attention of whole sequences, of which every rank of the group has an equal slice.

    Args:
        query: (batch, heads, tokens, dim); key and value may have fewer heads, of which each serves several.
        mask: of the whole sequence on every rank, (…, 1 or queries, keys) as in `scaled_dot_product_attention`.
        load_balance: slices are two pieces each, as `Deal(size, balanced=True)` says.

    Raises:
        ArgumentError: the mask is of another size, needs a gradient, or comes beside `is_causal`; or causal queries
            and keys are not as many.
    """
    ring = Ring(group)
    deal = Deal(ring.size, load_balance)
    mask = checked(query, key, mask, is_causal, ring.size)
    meetings = schedule(deal, ring.rank, query.shape[-2], key.shape[-2], mask, is_causal)
    return attend_around(query, key, value, plan_of(ring, meetings, query, mask, scale, dropout_p))


def checked(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, size: int) -> Tensor | None:
    """The mask with four dims; raises ArgumentError for what a ring of `size` cannot honour."""
    rows, columns = size * query.shape[-2], size * key.shape[-2]
    if is_causal and rows != columns:
        raise ArgumentError(
            f"is_causal was given for {rows} queries and {columns} keys; give as many, or the mask that is meant"
        )
    if mask is None:
        return None
    if is_causal:
        raise ArgumentError("a mask was given beside is_causal; give one of them, as torch has it")
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


def plan_of(
    ring: Ring, meetings: RingOrder, query: Tensor, mask: Tensor | None, scale: float | None, dropout_p: float
) -> RingSchedule:
    """The plan of an attention as `scaled_dot_product_attention` is asked for it; dropout takes a random number."""
    seed = int(torch.randint(2**31, ())) + (ring.rank << 32) if dropout_p else 0
    return RingSchedule(ring, meetings, mask, query.shape[-1] ** -0.5 if scale is None else scale, dropout_p, seed)


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
        """Parts to compute of the rank's queries and the keys that are there at a hop."""
        before = sum(map(len, self.meetings[:hop]))
        for number, each in enumerate(self.meetings[hop]):
            key, value = held.part(each.columns)
            rows, seed = query[:, :, each.rows], self.seed + before + number
            mask = each.part_of(self.mask)
            yield each, PartialAttention(rows, key, value, mask, each.is_causal, self.scale, self.dropout_p, seed)


def attend_around(query: Tensor, key: Tensor, value: Tensor, plan: RingSchedule) -> Tensor:
    out: Tensor = _RingAttention.apply(query, key, value, plan)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: RingSchedule) -> Tensor:
        query, ring = _dense(query), plan.ring
        own, shapes = torch.cat([key.flatten(), value.flatten()]), (key.shape, value.shape)
        held, rows = _Held(own, shapes), _Rows(query, value)
        kept: list[tuple[Any, ...]] = []
        with torch.autocast(query.device.type, enabled=False):
            for hop in range(ring.size):
                arrived = ring.pass_on(held.packed) if hop + 1 < ring.size else None
                for meeting, part in plan.parts(hop, query, held):
                    found = attend(part)
                    rows.add(meeting.rows, found)
                    kept.append(found.kept)
                if arrived is not None:
                    held.packed = arrived()
        out, logs = rows.results(query.dtype)
        ctx.save_for_backward(query, own, out, logs)
        ctx.plan, ctx.shapes, ctx.kept = plan, shapes, kept
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, own, out, logs = ctx.saved_tensors
        plan, kept, grad = ctx.plan, iter(ctx.kept), _dense(grad)
        ring, held, dtype = plan.ring, _Held(own, ctx.shapes), accumulated(query.dtype)
        of_query, of_own = torch.zeros_like(query, dtype=dtype), held.zeros(dtype)
        returned: Callable[[], Tensor] | None = None
        with torch.autocast(query.device.type, enabled=False):
            for hop in range(ring.size):
                arrived = ring.pass_on(held.packed) if hop + 1 < ring.size else None
                found = of_own if hop == 0 else held.zeros(dtype)
                for meeting, part in plan.parts(hop, query, held):
                    rows = meeting.rows
                    whole = Attended(out[:, :, rows], logs[:, :, rows].contiguous(), next(kept))
                    totals = of_query[:, :, rows], *found.part(meeting.columns)
                    _add(totals, gradients(part, grad[:, :, rows], whole))
                if returned is not None:
                    found.packed += returned()  # what the ranks between the keys' own and this one have found
                if hop > 0:
                    returned = ring.pass_on(found.packed.to(own.dtype))
                if arrived is not None:
                    held.packed = arrived()
        if returned is not None:
            of_own.packed += returned()
        of_key, of_value = of_own.part(slice(None))
        return of_query.to(query.dtype), of_key.to(own.dtype), of_value.to(own.dtype), None


def _add(totals: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> None:
    for total, each in zip(totals, more, strict=True):
        total += each


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with elements side by side, as kernels want them."""
    return tensor if tensor.stride(-1) == 1 and 0 not in tensor.stride() else tensor.contiguous()


class _Held:
    """Keys and values, or their gradients, in one piece of memory that is sent at once."""

    def __init__(self, packed: Tensor, shapes: tuple[torch.Size, torch.Size]) -> None:
        self.packed, self._shapes = packed, shapes

    def part(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Views of some keys and of their values."""
        first = self._shapes[0].numel()
        key, value = self.packed[:first].view(self._shapes[0]), self.packed[first:].view(self._shapes[1])
        return key[:, :, columns], value[:, :, columns]

    def zeros(self, dtype: torch.dtype) -> _Held:
        return _Held(torch.zeros_like(self.packed, dtype=dtype), self._shapes)


class _Rows:
    """The results of a rank's queries as far as keys have come by."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        batch, heads, rows, _ = query.shape
        dtype = accumulated(query.dtype)
        # In memory heads come after rows, as models want them back.
        self._out = query.new_zeros((batch, rows, heads, value.shape[-1]), dtype=dtype).transpose(1, 2)
        self._logs = query.new_full((batch, heads, rows), -torch.inf, dtype=dtype)

    def add(self, rows: slice, found: Attended) -> None:
        """Merge the results of some rows with more keys: each weighs as its sum does in that of both."""
        before, logs = self._logs[:, :, rows], found.logs
        both = torch.logaddexp(before, logs)
        base = both.masked_fill(both == -torch.inf, 0.0)  # of rows that have seen nothing yet
        old, new = (before - base).exp()[..., None], (logs - base).exp()[..., None]
        self._out[:, :, rows] = self._out[:, :, rows] * old + found.out * new
        self._logs[:, :, rows] = both

    def results(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The whole rows' results and logarithms, 0 for a row that saw nothing."""
        return self._out.to(dtype), self._logs.masked_fill(self._logs == -torch.inf, 0.0)
