"""The whole numbers of a block that mean what is split: numbers of heads, widths of projections.

A forward that says `x.view(batch, length, self.num_heads, -1)` needs another number where a rank has some of the heads.
Which numbers those are is found by trying: only numbers that the region's modules hold and forward reads can be meant,
the fewest that let a rank alone reproduce its part are taken, and every rank must.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import nn

from atorch.model.copy import duplicate
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, fresh
from atorch.runtime.tensor_parallel.derive.split_validation import Tape, first_failure, record_tape
from atorch.runtime.tensor_parallel.derive.whole_numbers import is_configuration
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, SplitRegion, Unsplit
from atorch.runtime.tensor_parallel.rank_context import Ranks

MOST = 4  # numbers to divide in one group

Numbers = Mapping[str, Mapping[str, int]]
"""Whole numbers by module and name."""


def with_attributes(block: nn.Module, layout: BlockLayout, call: ForwardCall, ranks: Ranks) -> BlockLayout:
    """The layout with the numbers that each group needs divided; a group for which there are none is kept whole.

    Each process searches as rank 0 would, and then tries what is found as its own ranks.
    """
    tape = record_tape(block, call)
    read = numbers_read(block, call)
    while (failure := first_failure(block, layout, call, tape, 0)) is not None:
        at, why = failure
        if at == len(layout.groups):
            return _without(layout, range(at), why)
        found = _search(block, layout, at, call, tape, read, ranks.degree)
        layout = _without(layout, [at], why) if found is None else found
    while (failure := _first_on_any_rank(block, layout, call, tape, ranks)) is not None:
        layout = _without(layout, [min(failure[0], len(layout.groups) - 1)], failure[1])
    return layout


def _first_on_any_rank(
    block: nn.Module, layout: BlockLayout, call: ForwardCall, tape: Tape, ranks: Ranks
) -> tuple[int, str] | None:
    failures = (first_failure(block, layout, call, tape, rank) for rank in ranks.own)
    first = min((each for each in failures if each is not None), default=None)
    return min((each for each in ranks.gather(first) if each is not None), default=None)


def numbers_read(block: nn.Module, call: ForwardCall) -> Numbers:
    """The whole numbers above 1 that modules of the block hold and forward reads."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in block.parameters()}
    twin = duplicate(block, memo)
    read: dict[str, dict[str, int]] = {}
    for path, module in twin.named_modules():
        _watch(module, read.setdefault(path, {}))
    (args, kwargs), _ = fresh(call)
    with torch.no_grad():
        twin(*args, **kwargs)
    return read


def _watch(module: nn.Module, read: dict[str, int]) -> None:
    """Note in `read` the whole numbers read of a module, and of configurations that it holds as `config.<name>`."""
    for name, value in list(vars(module).items()):
        if is_configuration(value):
            vars(module)[name] = own = copy.copy(value)
            _note_reads(own, read, f"{name}.")
    _note_reads(module, read, "")


def _note_reads(holder: Any, read: dict[str, int], prefix: str) -> None:
    base: Any = type(holder)

    def get(self: Any, name: str) -> Any:
        value = base.__getattribute__(self, name)
        if type(value) is int and value > 1 and not name.startswith("__"):
            read[f"{prefix}{name}"] = value
        return value

    holder.__class__ = _subclass(base, get)


def _subclass(base: Any, get: Callable[..., Any]) -> Any:
    metaclass: Any = type(base)
    return metaclass(base.__name__, (base,), {"__getattribute__": get, "__module__": base.__module__})


def _search(
    block: nn.Module, layout: BlockLayout, at: int, call: ForwardCall, tape: Tape, read: Numbers, degree: int
) -> BlockLayout | None:
    """The layout with the fewest numbers divided with which a rank alone gets through the group `at`."""
    for attributes in _choices(layout.groups[at], read, degree):
        groups = list(layout.groups)
        groups[at] = replace(groups[at], attributes=attributes)
        tried = replace(layout, groups=tuple(groups))
        failure = first_failure(block, tried, call, tape, 0)
        if failure is None or failure[0] > at:
            return tried
    return None


def _choices(group: SplitRegion, read: Numbers, degree: int) -> Iterator[dict[str, dict[str, int]]]:
    region = _region(group)
    places = [(path, name) for path, own in read.items() if _is_within(path, region) for name in own]
    # Where heads outnumber ranks but their keys' heads do not, numbers of the two are divided by different factors.
    shared = any(rows.is_shared for rows in group.columns.values())
    divisors = [each for each in range(degree, 1, -1) if degree % each == 0] if shared else [degree]
    for count in range(1, MOST + 1):
        for chosen in combinations(places, count):
            for factors in product(divisors, repeat=count):
                if all(read[path][name] % f == 0 for (path, name), f in zip(chosen, factors, strict=True)):
                    attributes: dict[str, dict[str, int]] = {}
                    for (path, name), factor in zip(chosen, factors, strict=True):
                        attributes.setdefault(path, {})[name] = factor
                    yield attributes


def _region(group: SplitRegion) -> list[str]:
    """The path of the innermost module that holds the whole group."""
    paths = [name.split(".")[:-1] for name in group.parameters]
    region: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        region.append(parts[0])
    return region


def _is_within(path: str, region: list[str]) -> bool:
    return path.split(".")[: len(region)] == region if region else True


def _without(layout: BlockLayout, indices: Any, why: str) -> BlockLayout:
    """The layout with some groups kept whole."""
    dropped = [layout.groups[index] for index in indices]
    kept = [Unsplit(group.row, why) for group in dropped]
    return BlockLayout(tuple(group for group in layout.groups if group not in dropped), (*layout.kept, *kept))
