"""Whole numbers in a block's modules that count what is split: numbers of heads, widths of projections.

A forward with `x.view(batch, length, self.num_heads, -1)` needs another number on a rank with some of the heads. Trials
find these numbers. Candidates are those that the region's modules hold and forward reads. The fewest that let a rank
alone reproduce its part are divided, and then every rank must reproduce its part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import nn

from atorch.model.copy import duplicate
from atorch.model.method_override import override
from atorch.runtime.tensor_parallel.apply import is_configuration
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, fresh
from atorch.runtime.tensor_parallel.derive.reference_forward import Ranks
from atorch.runtime.tensor_parallel.derive.split_validation import Tape, first_failure, record_tape
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, SplitRegion, common_path

MOST = 4  # maximum numbers to divide in one group

Numbers = Mapping[str, Mapping[str, int]]
"""Whole numbers by module and name."""


def with_attributes(block: nn.Module, layout: BlockLayout, call: ForwardCall, ranks: Ranks) -> BlockLayout:
    """The layout with the numbers to divide for each group; a group that fails with all of them is kept whole.

    Each process searches as rank 0, and then tries the result as its own ranks.
    """
    tape = record_tape(block, call)
    read = numbers_read(block, call)
    while (failure := first_failure(block, layout, call, tape, 0)) is not None:
        index, why = failure
        if index == len(layout.groups):
            return _without(layout, layout.groups, why)
        fixed = _search(block, layout, index, call, tape, read, ranks.degree)
        layout = _without(layout, [layout.groups[index]], why) if fixed is None else fixed
    while (failure := _first_on_any_rank(block, layout, call, tape, ranks)) is not None:
        layout = _without(layout, [layout.groups[min(failure[0], len(layout.groups) - 1)]], failure[1])
    return layout


def _first_on_any_rank(
    block: nn.Module, layout: BlockLayout, call: ForwardCall, tape: Tape, ranks: Ranks
) -> tuple[int, str] | None:
    failures = (first_failure(block, layout, call, tape, rank) for rank in ranks.own)
    first = min((failure for failure in failures if failure is not None), default=None)
    return min((failure for failure in ranks.gather(first) if failure is not None), default=None)


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
    """Record in `read` the whole numbers read from a module, and from its configurations as `config.<name>`."""
    for name, value in list(vars(module).items()):
        if is_configuration(value):
            vars(module)[name] = copied = copy.copy(value)
            _note_reads(copied, read, f"{name}.")
    _note_reads(module, read, "")


def _note_reads(holder: Any, read: dict[str, int], prefix: str) -> None:
    def noting(theirs: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(self: Any, name: str) -> Any:
            value = theirs(self, name)
            if type(value) is int and value > 1 and not name.startswith("__"):
                read[f"{prefix}{name}"] = value
            return value

        return get

    override(holder, "__getattribute__", noting)


def _search(
    block: nn.Module, layout: BlockLayout, index: int, call: ForwardCall, tape: Tape, read: Numbers, degree: int
) -> BlockLayout | None:
    """The layout with the fewest divided numbers with which rank 0 alone reproduces the group `index`, or None."""
    for attributes in _choices(layout.groups[index], read, degree):
        groups = list(layout.groups)
        groups[index] = replace(groups[index], attributes=attributes)
        attempt = replace(layout, groups=tuple(groups))
        failure = first_failure(block, attempt, call, tape, 0)
        if failure is None or failure[0] > index:
            return attempt
    return None


def _choices(group: SplitRegion, read: Numbers, degree: int) -> Iterator[dict[str, dict[str, int]]]:
    region = common_path(group.parameters)
    places = [(path, name) for path, numbers in read.items() if _is_within(path, region) for name in numbers]
    # If query heads outnumber ranks but key heads do not, their numbers are divided by different factors.
    shared = any(rows.is_shared for rows in group.columns.values())
    divisors = [divisor for divisor in range(degree, 1, -1) if degree % divisor == 0] if shared else [degree]
    for count in range(1, MOST + 1):
        for chosen in combinations(places, count):
            for factors in product(divisors, repeat=count):
                if all(read[path][name] % f == 0 for (path, name), f in zip(chosen, factors, strict=True)):
                    attributes: dict[str, dict[str, int]] = {}
                    for (path, name), factor in zip(chosen, factors, strict=True):
                        attributes.setdefault(path, {})[name] = factor
                    yield attributes


def _is_within(path: str, region: list[str]) -> bool:
    return path.split(".")[: len(region)] == region if region else True


def _without(layout: BlockLayout, dropped: Sequence[SplitRegion], why: str) -> BlockLayout:
    return layout.without(lambda group: why if group in dropped else None)
