"""Broadcasts and averages many tensors in few calls: small ones are flattened into buckets, large ones sent alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 32 * 2**20
IN_FLIGHT = 2  # buckets in memory at once: one is sent while the next is filled


class _Sending(NamedTuple):
    work: Any
    bucket: list[Tensor]
    flat: Tensor | None  # received values that must be copied into the tensors


@torch.no_grad()
def broadcast(shares: Iterable[tuple[int, Sequence[Tensor]]], group: dist.ProcessGroup) -> None:
    """Broadcast the tensors of each share from its rank to all ranks of `group`.

    Args:
        shares: `(rank in the group, tensors)`; the same shapes and order on all ranks.
    """
    under_way: deque[_Sending] = deque()
    for source, tensors in shares:
        for bucket in _buckets(tensors):
            if len(under_way) == IN_FLIGHT:
                _finish(under_way.popleft())
            under_way.append(_send(bucket, source, group))
    for sending in under_way:
        _finish(sending)


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace the tensors, of equal shapes on all ranks, by their means over `group`."""
    with torch._C.DisableTorchFunctionSubclass():  # also tensor subclasses that refuse operations with others
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            flat /= group.size()
            for tensor, piece in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of tensors of one dtype and device that fit in a bucket; skips empty tensors."""
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if not num_bytes:
            continue
        if num_bytes >= BUCKET_BYTES:
            yield [tensor]
            continue
        kind = (tensor.dtype, tensor.device)
        if filled.get(kind, 0) + num_bytes > BUCKET_BYTES:
            yield filling.pop(kind)
            filled[kind] = 0
        filling.setdefault(kind, []).append(tensor)
        filled[kind] = filled.get(kind, 0) + num_bytes
    yield from filling.values()


def _send(bucket: list[Tensor], source: int, group: dist.ProcessGroup) -> _Sending:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return _Sending(dist.broadcast(bucket[0].detach(), group=group, group_src=source, async_op=True), bucket, None)
    is_source = group.rank() == source
    if is_source:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
    else:
        flat = bucket[0].new_empty(sum(tensor.numel() for tensor in bucket))
    work = dist.broadcast(flat, group=group, group_src=source, async_op=True)
    return _Sending(work, bucket, None if is_source else flat)


def _finish(sending: _Sending) -> None:
    sending.work.wait()
    if sending.flat is not None:
        pieces = sending.flat.split([tensor.numel() for tensor in sending.bucket])
        for tensor, piece in zip(sending.bucket, pieces, strict=True):
            tensor.detach().copy_(piece.view(tensor.shape))
