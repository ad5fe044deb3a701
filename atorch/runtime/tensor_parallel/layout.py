"""Rows of each parameter that each rank of the tensor axis works with: plain data, with no tensors and no modules.

A *group* is the region between one fork and one sum. It has parameters split by columns, whose results meet in one
parameter split by rows (Shoeybi et al. 2019, arXiv 1909.08053, section 3). Every name is relative to the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

RowRange = tuple[int, int]
"""(start, stop): rows from start, without stop."""


@dataclass(frozen=True)
class Rows:
    """The rows along `dim` that each rank works with, as ascending runs."""

    dim: int
    by_rank: tuple[tuple[RowRange, ...], ...]

    @classmethod
    def even(cls, dim: int, size: int, degree: int) -> Rows:
        """Contiguous parts, as `torch.chunk` cuts them: the last ones are shorter where `degree` does not divide."""
        step = -(-size // degree)
        bounds = [min(size, step * rank) for rank in range(degree + 1)]
        return cls(dim, tuple(((start, stop),) for start, stop in zip(bounds, bounds[1:], strict=False)))

    @classmethod
    def where(cls, dim: int, masks: Sequence[Tensor]) -> Rows:
        """The rows at which each rank's mask, of one dim, is true."""
        return cls(dim, tuple(_runs(mask) for mask in masks))

    def index(self, rank: int) -> Tensor:
        """The rank's rows as a tensor of indices."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.by_rank[rank]])

    def count(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.by_rank[rank])

    def take(self, tensor: Tensor, rank: int) -> Tensor:
        """The rank's rows of a tensor: a view if they are one run."""
        runs = self.by_rank[rank]
        if len(runs) == 1:
            return tensor.narrow(self.dim, runs[0][0], runs[0][1] - runs[0][0])
        return torch.cat([tensor.narrow(self.dim, start, stop - start) for start, stop in runs], self.dim)

    @property
    def is_shared(self) -> bool:
        """True if several ranks use some row, as when ranks outnumber the heads of keys and values."""
        return bool((self._met > 1).any())

    @property
    def has_own(self) -> bool:
        """True if there is a row that only one rank uses."""
        return bool((self._met == 1).any())

    @property
    def num_met(self) -> int:
        """The number of rows that any rank uses."""
        return int((self._met > 0).sum())

    @property
    def _met(self) -> Tensor:
        met = torch.zeros(max(stop for runs in self.by_rank for _, stop in runs), dtype=torch.int32)
        for runs in self.by_rank:
            for start, stop in runs:
                met[start:stop] += 1
        return met

    @property
    def is_in_order(self) -> bool:
        """True if the ranks' rows, in rank order, have the order of the whole."""
        runs = [run for runs in self.by_rank for run in runs]
        return all(stop == start for (_, stop), (start, _) in zip(runs, runs[1:], strict=False))


@dataclass(frozen=True)
class SplitRegion:
    """The region between one fork and one sum."""

    row: str
    """The parameter whose products are summed over ranks."""
    row_part: Rows
    row_bias: str | None
    """The bias of those products, which must be added once."""
    columns: Mapping[str, Rows]
    """Weights multiplied with forked inputs, in order of use."""
    forks: tuple[tuple[str, ...], ...]
    """The columns grouped by input: one sum in backward for each."""
    tied: Mapping[str, Rows] = field(default_factory=dict)
    """Biases, tables and the like that are used with the columns' results."""
    inside: tuple[str, ...] = ()
    """Parameters that every rank uses whole on its part, such as a norm over each head: gradients are summed."""
    inputs: Mapping[str, Rows | None] = field(default_factory=dict)
    """The block's tensor arguments that meet a part, by place: their rows that do, or None if all do."""
    heads: int = 1
    """The maximum number of parts."""
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Divisors of whole numbers, by module and name: numbers of heads, widths of projections."""
    draws: bool = False
    """True if random numbers are drawn between fork and sum, as by attention's dropout."""

    @property
    def rows(self) -> Mapping[str, Rows]:
        """Each rank's rows of every parameter that is split or shared."""
        return {**self.columns, **self.tied, self.row: self.row_part}

    @property
    def parameters(self) -> tuple[str, ...]:
        """Every parameter that is split or shared."""
        return tuple(self.rows)


@dataclass(frozen=True)
class Unsplit:
    """A parameter or block that every rank keeps whole, and the reason."""

    name: str
    reason: str
    heads: int = 0
    """The number of heads, if the reason is that the ranks do not divide it."""


@dataclass(frozen=True)
class BlockLayout:
    """The split of one block, and its parameters that are not split."""

    groups: tuple[SplitRegion, ...]
    kept: tuple[Unsplit, ...] = ()

    def without(self, why: Callable[[SplitRegion], str | None]) -> BlockLayout:
        """The layout that keeps each group whole for which `why` returns a reason."""
        reasons = [(group, why(group)) for group in self.groups]
        kept = [Unsplit(group.row, reason) for group, reason in reasons if reason is not None]
        return BlockLayout(tuple(group for group, reason in reasons if reason is None), (*self.kept, *kept))


def common_path(names: Iterable[str]) -> list[str]:
    """The path, in parts, of the innermost module that holds all parameters of these names."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common


def _runs(mask: Tensor) -> tuple[RowRange, ...]:
    edges = torch.diff(
        mask.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8)
    )
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(starts, stops, strict=True))
