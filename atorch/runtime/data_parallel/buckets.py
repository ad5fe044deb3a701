"""Parameters side by side in flat memory: buckets to send in few calls, and flat slices for sharded optimizers.

Small tensors are broadcast, averaged and gathered in buckets, large ones alone. For sharded optimizers a bucket is cut
into one equal slice per rank, regardless of parameter boundaries. All ranks of an elementwise optimizer thus have equal
shares, however large single parameters are. Slices begin at multiples of `ALIGNMENT` elements of every parameter. SIMD
vectors thus stay whole, so fused kernels give the same bits as on full parameters, and smaller parameters lie on one
rank.

The slice that an optimizer steps is a parameter that shares its original's memory. Writes to either change both, and
bump the version of both. The slice gets its gradient for a step: a slice of the parameter's, or the entries of a sparse
one that fall into it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from atorch.checkpoint.boxes import Box, LogicalTensor, check_cover, whole_box
from atorch.distributed.collectives import (
    all_gather_single,
    gather_objects,
    is_distributed,
    is_fake_world,
    present_group,
)
from atorch.errors import ArgumentError
from atorch.runtime.optimizer.wrapped_optimizer import dense_gradient

BUCKET_BYTES = 32 * 2**20
IN_FLIGHT = 2  # buckets in memory at once: one is sent while the next is filled
ALIGNMENT = 32  # elements


Finish = Callable[[], object]
T = TypeVar("T", bound=Tensor)
K = TypeVar("K")


@dataclass(frozen=True, eq=False)
class SlicedBucket:
    """Parameters of one dtype and device, with the start of each and the length of each rank's slice in elements."""

    params: tuple[Tensor, ...]
    starts: tuple[int, ...]
    share: int

    def held(self, rank: int) -> Iterator[tuple[Tensor, slice]]:
        """The parameters that the slice of a rank overlaps, with the slice of their flattened elements."""
        first, last = rank * self.share, (rank + 1) * self.share
        for param, start in zip(self.params, self.starts, strict=True):
            where = slice(max(first - start, 0), min(last - start, param.numel()))
            if where.start < where.stop:
                yield param, where


@torch.no_grad()
def broadcast(shares: Iterable[tuple[int, Sequence[Tensor]]], group: dist.ProcessGroup) -> None:
    """Broadcast the tensors of each share from its rank to all ranks of `group`.

    Args:
        shares: `(rank in the group, tensors)`; the same shapes and order on all ranks.
    """
    _pipelined(partial(_send, bucket, source, group) for source, tensors in shares for bucket in in_buckets(tensors))


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the tensors, of equal shapes on all ranks, by their means over `group`."""
    with torch._C.DisableTorchFunctionSubclass():  # also tensor subclasses that refuse operations with others
        for bucket in in_buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            flat /= group.size()
            _unpack(bucket, flat)


@torch.no_grad()
def gather(buckets: Iterable[SlicedBucket], group: dist.ProcessGroup) -> None:
    """All-gather the slices of the parameters over `group`."""
    _pipelined(partial(_gather, bucket, group) for bucket in buckets)


@torch.no_grad()
def gathered(
    tensors: Mapping[K, LogicalTensor], group: dist.ProcessGroup | None = None, to_rank: int | None = None
) -> Iterator[tuple[K, Tensor]]:
    """The whole tensors of which the ranks of `group` (None: all) hold boxes, on its rank `to_rank` (None: on all).

    Collective: all ranks iterate to the end. Each takes memory for a bucket of tensors at a time, also one that gets
    nothing. Of a box that several ranks hold, all get the first one's values. A single rank gets views of its own.

    Raises:
        CheckpointError: the boxes of a tensor have holes.
    """
    rank = dist.get_rank(group) if is_distributed() and not is_fake_world() else 0
    local = {key: dict(tensor.pieces) for key, tensor in tensors.items() if tensor.pieces}
    mine = [
        (key, (tensors[key].shape, tensors[key].dtype, next(iter(pieces.values())).device.type), list(pieces))
        for key, pieces in local.items()
    ]
    ranks = [mine] if is_fake_world() else gather_objects(mine, group)
    owned: dict[K, tuple[Any, dict[Box, int]]] = {}
    for source, listed in enumerate(ranks):
        for key, form, boxes in listed:
            owners = owned.setdefault(key, (form, {}))[1]
            for box in boxes:
                owners.setdefault(Box(*box), source)
    wholes: dict[K, Tensor] = {}
    shares: list[list[Tensor]] = [[] for _ in ranks]
    left = len(owned)
    for key, ((shape, dtype, device), owners) in owned.items():
        if not is_fake_world():
            check_cover(str(key), shape, list(owners))
        alone = local[key].get(whole_box(shape)) if len(ranks) == 1 else None
        whole = wholes[key] = torch.empty(shape, dtype=dtype, device=device) if alone is None else alone
        for box, source in owners.items() if alone is None else ():
            part = whole[box.slices(whole_box(shape))]
            shares[source].append(part.copy_(local[key][box]) if source == rank else part)
        left -= 1
        if not left or sum(tensor.nbytes for tensor in wholes.values()) >= BUCKET_BYTES:
            if len(ranks) > 1:
                broadcast(enumerate(shares), present_group(group))
            if to_rank in (None, rank):
                yield from wholes.items()
            wholes, shares = {}, [[] for _ in ranks]


def can_cut(param: Tensor) -> bool:
    """True if `param` is a contiguous plain tensor with elements."""
    is_plain = param.layout == torch.strided and not is_traceable_wrapper_subclass(param)
    return is_plain and param.is_contiguous() and param.numel() > 0


def sliced_buckets(params: Iterable[Tensor], num_ranks: int) -> list[SlicedBucket]:
    """Buckets of `params` (that `can_cut`) in their order; trained and frozen ones never share a bucket."""
    made = []
    for bucket in in_buckets(params, lambda param: param.requires_grad):
        starts, end = [], 0
        for param in bucket:
            starts.append(end)
            end += _aligned(param.numel())
        made.append(SlicedBucket(tuple(bucket), tuple(starts), _aligned(-(-end // num_ranks))))
    return made


def in_buckets(
    tensors: Iterable[T], kind_of: Callable[[T], Hashable] | None = None, most_bytes: float | None = None
) -> Iterator[list[T]]:
    """Lists of tensors of one kind, dtype and device that fit in a bucket; skips empty tensors."""
    most_bytes = BUCKET_BYTES if most_bytes is None else most_bytes
    filling: dict[Hashable, list[T]] = {}
    filled: dict[Hashable, int] = {}
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            continue
        if num_bytes >= most_bytes:
            yield [tensor]
            continue
        kind = (kind_of and kind_of(tensor), tensor.dtype, tensor.device)
        if filled.get(kind, 0) + num_bytes > most_bytes:
            yield filling.pop(kind)
            filled[kind] = 0
        filling.setdefault(kind, []).append(tensor)
        filled[kind] = filled.get(kind, 0) + num_bytes
    yield from filling.values()


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _pipelined(begins: Iterable[Callable[[], tuple[Any, Finish]]]) -> None:
    """Issue collectives, `IN_FLIGHT` at once; each returns its work and a function to call once that is done."""
    under_way: deque[tuple[Any, Finish]] = deque()
    for begin in begins:
        if len(under_way) == IN_FLIGHT:
            _complete(*under_way.popleft())
        under_way.append(begin())
    while under_way:
        _complete(*under_way.popleft())


def _complete(work: Any, finish: Finish) -> None:
    work.wait()
    finish()


def _send(bucket: list[Tensor], source: int, group: dist.ProcessGroup) -> tuple[Any, Finish]:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return dist.broadcast(bucket[0].detach(), group=group, group_src=source, async_op=True), bool
    is_source = group.rank() == source
    if is_source:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
    else:
        flat = bucket[0].new_empty(sum(tensor.numel() for tensor in bucket))
    work = dist.broadcast(flat, group=group, group_src=source, async_op=True)
    return work, partial(_unpack, [] if is_source else bucket, flat)


def _unpack(bucket: Sequence[Tensor], flat: Tensor) -> None:
    start = 0
    for tensor in bucket:
        tensor.detach().copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def _gather(bucket: SlicedBucket, group: dist.ProcessGroup) -> tuple[Any, Finish]:
    first, numel = group.rank() * bucket.share, bucket.share * group.size()
    finish: Finish = bool
    if len(bucket.params) == 1 and bucket.params[0].numel() == numel:  # in place
        full = bucket.params[0].data.view(-1)
    else:
        full = bucket.params[0].new_empty(numel)
        starts = dict(zip(bucket.params, bucket.starts, strict=True))
        for param, where in bucket.held(group.rank()):
            start = starts[param]
            full[start + where.start : start + where.stop] = param.data.view(-1)[where]
        finish = partial(_unpack_gathered, bucket, full, group.rank())
    shard = full[first : first + bucket.share]
    return all_gather_single(full, shard, group=group, async_op=True), finish


def _unpack_gathered(bucket: SlicedBucket, buffer: Tensor, rank: int) -> None:
    stepped = {param for param, _ in bucket.held(rank)}
    for param, start in zip(bucket.params, bucket.starts, strict=True):
        # The step bumped the versions of this rank's; writing by `detach` bumps the others', for optimizers of copies.
        target = param.data if param in stepped else param.detach()
        target.view(-1).copy_(buffer[start : start + param.numel()])


def slice_of(param: Tensor, where: slice) -> nn.Parameter:
    """A parameter that is the flattened elements `where` of a contiguous parameter."""
    piece = nn.Parameter(_flat(param)[where], param.requires_grad)
    piece.slice_of = (param, where)  # type: ignore[attr-defined]
    return piece


def origin(parameter: Tensor) -> tuple[Tensor, slice | None]:
    """The parameter that `parameter` is a slice of, and its elements; `parameter` and None if it is not a slice."""
    source: tuple[Tensor, slice | None] = getattr(parameter, "slice_of", (parameter, None))
    return source


def follow(piece: Tensor) -> None:
    """Update a slice from its parameter, whose memory or `requires_grad` may have changed.

    Raises:
        ArgumentError: the parameter is not contiguous any more.
    """
    param, where = origin(piece)
    assert where is not None
    piece.data = _flat(param)[where]
    piece.requires_grad_(param.requires_grad)


@torch.no_grad()
def lend_gradient(piece: Tensor) -> None:
    param, where = origin(piece)
    gradient = _flat_gradient(param)
    assert where is not None
    if gradient is not None:
        gradient = _flat_sparse(gradient, where) if gradient.is_sparse else gradient[where]
    piece.grad = gradient


def gradient_values(piece: Tensor) -> Tensor | None:
    """The values of the parameter's gradient that a step of the slice reads; all values of a sparse one."""
    param, where = origin(piece)
    gradient = _flat_gradient(param)
    if gradient is None or where is None:
        return gradient
    return gradient.values() if gradient.is_sparse else gradient[where]


def _flat(param: Tensor) -> Tensor:
    if not param.is_contiguous():
        raise ArgumentError(
            f"a parameter of shape {tuple(param.shape)} has another layout in memory than when the optimizer was made, "
            "which steps slices of it; give a model its memory format before it is accelerated"
        )
    return param.detach().view(-1)


def _flat_gradient(param: Tensor) -> Tensor | None:
    if dense_gradient(param) is None:
        return None
    assert param.grad is not None
    if param.grad.is_sparse:
        return param.grad
    if not param.grad.is_contiguous():
        param.grad = param.grad.contiguous()
    return param.grad.detach().view(-1)


def _flat_sparse(gradient: Tensor, where: slice) -> Tensor:
    """A slice of the flattened elements of a coalesced sparse tensor."""
    shape, dims = gradient.shape, gradient.sparse_dim()
    numel = math.prod(shape[dims:])  # of an entry
    entries = torch.zeros(gradient.indices().shape[1], dtype=torch.long, device=gradient.device)  # their flat indices
    for size, index in zip(shape[:dims], gradient.indices(), strict=True):
        entries = entries * size + index
    flat = (entries.unsqueeze(1) * numel + torch.arange(numel, device=entries.device)).reshape(-1) - where.start
    length = where.stop - where.start
    inside = (flat >= 0) & (flat < length)
    indices, values = flat[inside].unsqueeze(0), gradient.values().reshape(-1)[inside]
    return torch.sparse_coo_tensor(indices, values, (length,), is_coalesced=True, check_invariants=False)
