"""Buckets of parameters that are sharded evenly over ranks, and the all-gather of the updated shards.

A bucket is cut into one equal slice per rank, regardless of parameter boundaries. All ranks of an elementwise optimizer
thus have equal shares, however large single parameters are. A large parameter is a bucket of its own, and is gathered
in place if its slices divide evenly. Small ones share a bucket, which takes a buffer.

Slices begin at multiples of `ALIGNMENT` elements of every parameter. SIMD vectors thus stay whole, so fused kernels
give the same bits as on full parameters, and smaller parameters lie on one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from atorch.distributed.collectives import all_gather_single
from atorch.runtime.data_parallel.buckets import BUCKET_BYTES, IN_FLIGHT

ALIGNMENT = 32  # elements


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


def can_cut(param: Tensor) -> bool:
    """True if `param` is a contiguous plain tensor with elements."""
    is_plain = param.layout == torch.strided and not is_traceable_wrapper_subclass(param)
    return is_plain and param.is_contiguous() and param.numel() > 0


def sliced_buckets(params: Iterable[Tensor], num_ranks: int) -> list[SlicedBucket]:
    """Buckets of `params` (that `can_cut`) in their order; trained and frozen ones never share a bucket."""
    filling: dict[tuple[Any, ...], list[Tensor]] = {}
    filled: dict[tuple[Any, ...], int] = {}
    buckets = []
    for param in params:
        kind = (param.dtype, param.device, param.requires_grad)
        if param.nbytes >= BUCKET_BYTES:
            buckets.append(_bucket([param], num_ranks))
            continue
        if filled.get(kind, 0) + param.nbytes > BUCKET_BYTES:
            buckets.append(_bucket(filling.pop(kind), num_ranks))
            filled[kind] = 0
        filling.setdefault(kind, []).append(param)
        filled[kind] = filled.get(kind, 0) + param.nbytes
    return buckets + [_bucket(bucket, num_ranks) for bucket in filling.values()]


def _bucket(params: Sequence[Tensor], num_ranks: int) -> SlicedBucket:
    starts, end = [], 0
    for param in params:
        starts.append(end)
        end += _aligned(param.numel())
    return SlicedBucket(tuple(params), tuple(starts), _aligned(-(-end // num_ranks)))


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


@torch.no_grad()
def gather(buckets: Iterable[SlicedBucket], group: dist.ProcessGroup) -> None:
    """All-gather the slices of the parameters over `group`."""
    under_way: deque[_Gathering] = deque()
    for bucket in buckets:
        if len(under_way) == IN_FLIGHT:
            _finish(under_way.popleft(), group.rank())
        under_way.append(_start(bucket, group))
    for gathering in under_way:
        _finish(gathering, group.rank())


class _Gathering(NamedTuple):
    work: Any
    bucket: SlicedBucket
    buffer: Tensor | None  # received values that must be copied into the parameters


def _start(bucket: SlicedBucket, group: dist.ProcessGroup) -> _Gathering:
    first, numel = group.rank() * bucket.share, bucket.share * group.size()
    if len(bucket.params) == 1 and bucket.params[0].numel() == numel:
        full, buffer = bucket.params[0].data.view(-1), None
    else:
        full = buffer = bucket.params[0].new_empty(numel)
        starts = dict(zip(bucket.params, bucket.starts, strict=True))
        for param, where in bucket.held(group.rank()):
            start = starts[param]
            buffer[start + where.start : start + where.stop] = param.data.view(-1)[where]
    shard = full[first : first + bucket.share]
    return _Gathering(all_gather_single(full, shard, group=group, async_op=True), bucket, buffer)


def _finish(gathering: _Gathering, rank: int) -> None:
    gathering.work.wait()
    bucket, buffer = gathering.bucket, gathering.buffer
    if buffer is None:
        return
    stepped = {param for param, _ in bucket.held(rank)}
    for param, start in zip(bucket.params, bucket.starts, strict=True):
        # The step bumped the versions of this rank's; writing by `detach` bumps the others', for optimizers of copies.
        target = param.data if param in stepped else param.detach()
        target.view(-1).copy_(buffer[start : start + param.numel()])
