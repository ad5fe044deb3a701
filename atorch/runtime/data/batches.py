"""Batches of ranks: split along dimension 0, merged, compared between ranks that share one, dealt out from streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from atorch.distributed.collectives import all_reduce_max
from atorch.distributed.fingerprints import hash_pair
from atorch.errors import ArgumentError, shown
from atorch.logs import logger
from atorch.model.pytree import is_strings, leaves_of, map_leaves, refilled, tensors_in
from atorch.runtime.gradients.backward import refuse_transforms


def num_rows(**data: Any) -> int:
    """The size of dimension 0 that all tensors in `data` share; ignores tensors of size 1 there, and scalars.

    Raises:
        ArgumentError: two tensors differ; the message names both, by the keywords of this call.
    """
    leaves = (pair for name, value in data.items() for pair in leaves_of(value, name))
    sizes = [(place, leaf.shape[0]) for place, leaf in leaves if isinstance(leaf, torch.Tensor) and _has_rows(leaf)]
    for place, size in sizes:
        if size != sizes[0][1]:
            raise ArgumentError(
                f"micro-batches split every tensor along dimension 0, but {sizes[0][0]} has {sizes[0][1]} rows there "
                f"and {place} has {size}. Give each tensor one row a sample, or a single row for all"
            )
    return sizes[0][1] if sizes else 1


def shared_rows(data: Any) -> int | None:
    """The smallest row count of the tensors in `data`, if it divides all others (as of flattened tokens), else None.

    Ignores tensors of one row, and scalars. None for example for graphs.
    """
    sizes = {leaf.shape[0] for leaf in tensors_in(data) if _has_rows(leaf)}
    rows = min(sizes, default=1)
    return rows if rows and all(size % rows == 0 for size in sizes) else None


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] != 1


def portion(data: Any, start: int, stop: int, rows: int) -> Any:
    """A copy of `data` with rows `start` to `stop` of every leaf that has `rows` rows, or a multiple of them."""

    def cut(leaf: Any, place: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            per_row = leaf.shape[0] // rows if leaf.dim() > 0 and leaf.shape[0] % rows == 0 else 0
            return leaf.detach()[start * per_row : stop * per_row].clone() if per_row else leaf.detach().clone()
        return leaf[start:stop] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(cut, data)


def joined(one: Any, two: Any, rows: int, more: int) -> Any:
    """Concatenate the `rows` rows of `one` and the `more` rows of `two`; leaves without rows come from `one`."""
    rest = iter(leaves_of(two))

    def join(leaf: Any, place: str) -> Any:
        _, other = next(rest)
        if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor):
            has_rows = leaf.dim() > 0 and leaf.shape[0] % rows == 0 and other.shape[0] % more == 0
            return torch.cat([leaf, other]) if has_rows else leaf
        return [*leaf, *other] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(join, one)


def take(data: Any, start: int, stop: int, rows: int) -> Any:
    """Slice rows `start` to `stop` of every leaf of `data` with `rows` rows: tensors (views) and lists of strings."""

    def cut(leaf: Any, place: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[start:stop] if leaf.dim() > 0 and leaf.shape[0] == rows else leaf
        return leaf[start:stop] if is_strings(leaf) and len(leaf) == rows else leaf

    return map_leaves(cut, data)


def merge(pieces: Sequence[Any], weights: Sequence[float]) -> Any:
    """Merge the results of the pieces into that of the full batch.

    Takes the weighted sum of numbers and scalar tensors (a weight of 0 drops even NaN). Concatenates tensors along
    dimension 0, and merges containers item by item. Returns the last of anything else.
    """
    first = pieces[0]
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        return torch.cat(list(pieces))
    if isinstance(first, (torch.Tensor, float, int)) and not isinstance(first, bool):
        return sum(piece * weight for piece, weight in zip(pieces, weights, strict=True) if weight)
    if isinstance(first, Mapping):
        return refilled(first, {key: merge([piece[key] for piece in pieces], weights) for key in first})
    if isinstance(first, (list, tuple)) and not is_strings(first):
        items = [merge(column, weights) for column in zip(*pieces, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return pieces[-1]


LOOKS = 3  # compared passes: a loader that distributes batches by rank differs in the first
FEW = 64  # compared elements of each tensor
_DIFFERENT = (
    "processes along %s compute one batch together, and were given different ones. Take result.dataloader: it shares "
    "samples out along the axes data and zero only. Or let your loader do so"
)


def watch_batches(model: nn.Module, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Compare the inputs of `model` between ranks that compute one batch together, in its first training passes.

    Args:
        groups: process groups by the name of the axis along which ranks have the same batch.

    Raises:
        ArgumentError: in such a pass, on all ranks: shapes or integers, such as tokens, differ. Different
            floats, which may be rounding, are a warning.
    """
    if groups:
        model.register_forward_pre_hook(refuse_transforms)
        handle: list[Any] = []
        looking = _Looking(groups, handle)
        handle.append(model.register_forward_pre_hook(looking, with_kwargs=True))


class _Looking:
    def __init__(self, groups: Mapping[str, dist.ProcessGroup], handle: Sequence[Any]) -> None:
        self._groups, self._handle, self._left = groups, handle, LOOKS

    def __reduce__(self) -> tuple[Any, ...]:
        return _Looking, ({}, ())  # process groups cannot be pickled, and a copy of the model need not be watched

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (self._groups and model.training and torch.is_grad_enabled()):
            return
        self._left -= 1
        if self._left <= 0:
            self._handle[0].remove()
        exact: list[Any] = []
        rounded: list[Any] = []
        for place, leaf in leaves_of([args, kwargs]):
            if isinstance(leaf, Tensor):
                exact.append((place, tuple(leaf.shape)))
                (rounded if leaf.is_floating_point() else exact).append(leaf.detach().reshape(-1)[:FEW].tolist())
        hashes = [*hash_pair(exact), *hash_pair(rounded)]
        for group in self._groups.values():
            hashes = all_reduce_max(hashes, group)  # in the end over the product of the axes, so that all ranks raise
        high, low, rounded_high, rounded_low = hashes
        if high != -low:
            raise ArgumentError(_DIFFERENT % " × ".join(self._groups))
        if rounded_high != -rounded_low:
            logger.warning(_DIFFERENT, " × ".join(self._groups))


_HAS_ONE, _ENDED, _FAILED = range(3)


def part_of(stream: IterableDataset[Any], rank: int, size: int) -> IterableDataset[Any] | None:
    """Part `rank` of `size` of a stream; None where it has no equal number of shards for all ranks.

    Raises:
        ArgumentError: `shard` returned no stream, or the stream is a part already.
    """
    if getattr(stream, "_distributed", None) is not None:  # `datasets` has no public way to detect a split
        raise ArgumentError(
            "the stream was divided already, by split_dataset_by_node, and would be divided again; give the whole one, "
            "of which each process is given its part"
        )
    num_shards, shard = getattr(stream, "num_shards", None), getattr(stream, "shard", None)
    if not isinstance(num_shards, int) or not callable(shard):
        return None
    if num_shards < 1 or num_shards % size:
        logger.warning(
            "the stream has %d shards, which do not divide over %d processes that see different samples. Each of them "
            "reads all of it and keeps its own samples; make the shards a multiple of %d to read each once",
            num_shards, size, size,
        )  # fmt: skip
        return None
    part = shard(num_shards=size, index=rank)
    if not isinstance(part, IterableDataset):
        raise ArgumentError(
            f"{type(stream).__name__}.shard(num_shards={size}, index={rank}) returned {shown(part)}; it returns an "
            "IterableDataset of that part's samples"
        )
    return part


def in_step(batches: Iterator[Any], group: dist.ProcessGroup) -> Iterator[Any]:
    """Yield `batches` as long as all ranks of `group` have one. Collective: all ranks must iterate.

    Fetches the next batch and starts its exchange before it yields the current one, so they overlap with the step.

    Raises:
        ArgumentError: on all ranks, if one has no batch at all, or failed to read one. That one raises its own error.
    """
    fetched, count = _Fetched(batches, group), 0
    while True:
        state = fetched.state()
        if state == _FAILED:
            raise fetched.error or ArgumentError(
                "another process failed to read its part of the stream; its own error says why"
            )
        if state == _ENDED and not count:
            raise ArgumentError(
                "a process has no full batch in its part of the stream, so that none could train; use a smaller "
                "batch_size, fewer DataLoader workers, or shards of equal size"
            )
        if state == _ENDED:
            return
        batch, count = fetched.batch, count + 1
        fetched = _Fetched(batches, group)
        yield batch


class _Fetched:
    """One batch, or the error of reading it, with the exchange of the states of all ranks."""

    def __init__(self, batches: Iterator[Any], group: dist.ProcessGroup) -> None:
        self.batch: Any = None
        self.error: Exception | None = None
        local = _HAS_ONE
        try:
            self.batch = next(batches)
        except StopIteration:
            local = _ENDED
        except Exception as error:  # users' code may raise anything; the others would wait in backward
            self.error, local = error, _FAILED
        self._worst = torch.tensor(local)  # on the host, with its own backend, so that a busy device delays no rank
        work: Any = dist.all_reduce(self._worst, dist.ReduceOp.MAX, group=group, async_op=True)
        self._wait: Callable[[], object] = work.wait

    def state(self) -> int:
        """The worst state of any rank; waits for all."""
        self._wait()
        return int(self._worst)
