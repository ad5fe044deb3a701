"""Selection of a model's layout from all possible splits, for the whole model at once.

`counted` counts the work that each group of a block spares a rank, and the elements that all ranks send for it.
`choose` is a small integer program. A variable for each split is 1 if it is made. Splits that take the same parameter
exclude each other. Goals are ordered; each decides among the optima of those before it.

- Without a bound on memory: spare the most work, then the most memory, then send the least.
- With a bound on a rank's parameters: send the least, so that only splits that the bound needs are made.

HiGHS (Huangfu and Hall 2018, doi 10.1007/s12532-017-0130-5) solves each to a proven optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from atorch.errors import StrategyError
from atorch.runtime.tensor_parallel.apply import place_of
from atorch.runtime.tensor_parallel.derive.block_sandbox import (
    ForwardCall,
    MatmulUse,
    SeeProducts,
    fresh,
    sandboxed,
    tensors_of,
)
from atorch.runtime.tensor_parallel.derive.split_validation import Ranks, Watched
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows, SplitRegion, Unsplit
from atorch.runtime.tensor_parallel.model_layout import Alike, ModelLayout, full_name
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary
from atorch.units import format_bytes

ALIKE = 1e-6
"""Relative to a goal's largest value: smaller differences count as equal."""


@dataclass(frozen=True)
class Option:
    """A possible split: the work and memory that it spares each rank, and the elements that all of them send."""

    cuts: frozenset[str]
    """The parameters, each of which only one option can take."""
    spared_work: float
    """Multiplications and additions in forward, on the recorded batch."""
    spared_bytes: float
    """Bytes of parameters."""
    sent: float
    """Elements of all collectives in forward and backward, on that batch."""


def choose(
    options: Sequence[Option], ties: Sequence[Sequence[str]] = (), needed_bytes: float | None = None
) -> list[int] | None:
    """The indices of the options that are taken, ascending; None if no choice spares `needed_bytes`.

    Args:
        ties: names of one parameter each, which is cut under all of them or under none.
        needed_bytes: bytes of parameters that each rank must be spared; None: as many as possible.
    """
    at_most = _exclusions(options, ties)
    work = np.array([option.spared_work for option in options])
    spared = np.array([option.spared_bytes for option in options])
    sent = np.array([option.sent for option in options])
    if needed_bytes is None:
        return _least([-work, -spared, sent], at_most)
    return _least([sent, -work, -spared], [*at_most, (-spared, -needed_bytes)])


def most_spared(options: Sequence[Option], ties: Sequence[Sequence[str]] = ()) -> float:
    """The most bytes that each rank can be spared of parameters."""
    spared = np.array([option.spared_bytes for option in options])
    return float(spared[_least([-spared], _exclusions(options, ties))].sum())


def _exclusions(options: Sequence[Option], ties: Sequence[Sequence[str]]) -> list[tuple[Any, float]]:
    """Constraints: one option a parameter; a tied parameter is cut under all of its names or under none."""
    takes = {name: np.zeros(len(options)) for option in options for name in option.cuts}
    for index, option in enumerate(options):
        for name in option.cuts:
            takes[name][index] = 1.0
    distinct = {tuple(row): row for row in takes.values()}  # parameters with the same options give one constraint
    at_most = [(row, 1.0) for row in distinct.values() if row.sum() > 1]
    for first, *others in ties:
        differences = [takes[first] - takes[other] for other in others]
        at_most += [(sign * row, 0.0) for row in differences if row.any() for sign in (1, -1)]
    return at_most


def _least(goals: Sequence[Any], at_most: list[tuple[Any, float]]) -> list[int] | None:
    """Indices of the minimum by the first goal, then by the next; `at_most` has pairs (row, upper bound)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    selected: Any = np.zeros(len(goals[0]))
    for goal in goals:
        size = np.abs(goal).max(initial=0.0)
        if size == 0.0:
            continue
        # In numbers near 1: HiGHS treats 1e-6 as 0.
        scales = [np.abs(row).max(initial=0.0) or 1.0 for row, _ in at_most]
        pairs = zip(at_most, scales, strict=True)
        limits = [LinearConstraint(row / scale, ub=bound / scale) for (row, bound), scale in pairs]
        solution = milp(goal / size, constraints=limits, integrality=1, bounds=Bounds(0, 1), options={"mip_rel_gap": 0})
        if solution.x is None:
            return None
        selected = solution.x.round()
        at_most = [*at_most, (goal, float(goal @ selected) + ALIKE * size)]
    return [int(index) for index in selected.nonzero()[0]]


class Counted(NamedTuple):
    """Counts of one group, on one call of the block."""

    spared_work: float
    """Multiplications and additions of products that each rank is spared in forward."""
    sent: float
    """Elements of the collectives of forward and backward."""


def counted(block: nn.Module, layout: BlockLayout, call: ForwardCall) -> dict[str, Counted]:
    """The counts of each group, by its row; groups may overlap."""
    work: dict[str, float] = {}
    sent: dict[str, list[Tensor]] = {group.row: [] for group in layout.groups}

    def note(product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        result = compute()
        work[product.weight] = work.get(product.weight, 0.0) + 2.0 * result.numel() * product.input.shape[-1]
        return result

    def summed(tensors: list[Tensor], _: nn.Module, args: Any, output: Any) -> None:
        tensors += tensors_of(output)[:1]

    def forked(tensors: list[Tensor], recorded: set[int], _: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_of((args, kwargs)):
            if tensor.requires_grad and id(tensor) not in recorded:  # each once; the list keeps it alive
                recorded.add(id(tensor))
                tensors.append(tensor)

    parameters = dict(block.named_parameters())
    (args, kwargs), _ = fresh(call)
    with ExitStack() as hooks, torch.enable_grad(), SeeProducts(parameters, note):
        for group in layout.groups:
            tensors = sent[group.row]
            hooks.enter_context(place_of(block, group.row)[0].register_forward_hook(partial(summed, tensors)))
            for names in group.forks:
                hook = partial(forked, tensors, set())
                for module in dict.fromkeys(place_of(block, name)[0] for name in names):
                    hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        block(*args, **kwargs)
    return {
        group.row: Counted(_spared(group, parameters, work), sum(tensor.numel() for tensor in sent[group.row]))
        for group in layout.groups
    }


def spared_share(rows: Rows, size: int) -> float:
    """The share of `size` rows that every rank is spared at least."""
    return 1 - max(rows.count(rank) for rank in range(len(rows.by_rank))) / size


def _spared(group: SplitRegion, parameters: Mapping[str, nn.Parameter], work: Mapping[str, float]) -> float:
    rows = {**group.columns, group.row: group.row_part}
    return sum(work[name] * spared_share(part, parameters[name].shape[part.dim]) for name, part in rows.items())


NOT_NEEDED = "a process holds no more than parameter_bytes without that"


def settled(
    model: nn.Module, layout: ModelLayout, watched: Watched, ranks: Ranks, parameter_bytes: float | None
) -> ModelLayout:
    """The layout that is selected from `layout`, whose groups may share parameters. All ranks call it.

    Args:
        parameter_bytes: maximum bytes of the whole model's parameters on a rank; None: as few as possible.

    Raises:
        StrategyError: no choice leaves as little as `parameter_bytes`.
    """
    cuts = [[name for group in kind.layout.groups for name in group.parameters] for kind in layout.kinds]
    if parameter_bytes is None and all(len(names) == len(set(names)) for names in cuts):
        return layout  # no two groups conflict
    counts = {kind.paths: _counted(kind, watched) for kind in layout.kinds}
    groups = [(kind, group) for kind in layout.kinds for group in kind.layout.groups]
    tables = _aliases(model, (*layout.vocabulary.lookups, *layout.vocabulary.logits))
    options = [_of_group(model, kind, group, counts[kind.paths][group.row]) for kind, group in groups]
    options += [_of_table(model, names, layout.vocabulary, watched) for names in tables]
    cut = frozenset().union(*(option.cuts for option in options))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name in cut]
    ties = [aliases for aliases in _aliases(model, names) if len(aliases) > 1]
    whole_bytes = sum(parameter.nbytes for parameter in model.parameters())
    needed = None if parameter_bytes is None else whole_bytes - parameter_bytes
    chosen = ranks.gather(choose(options, ties, needed))[0]  # other solver versions may take another optimum
    if chosen is None:
        least = whole_bytes - most_spared(options, ties)
        raise StrategyError(
            f"parameter_bytes was given {parameter_bytes:g}, but with tensor {layout.degree} each process holds at "
            f"least {least:.0f} bytes ({format_bytes(least)}) of {type(model).__name__}; give at least so many, or "
            "the axis tensor a larger size"
        )
    taken = {(kind.paths, group.row) for index, (kind, group) in enumerate(groups) if index in chosen}
    kinds = [
        replace(kind, layout=_only(kind.layout, {row for paths, row in taken if paths == kind.paths}))
        for kind in layout.kinds
    ]
    dropped = {name for index, names in enumerate(tables, len(groups)) if index not in chosen for name in names}
    biases = {product.bias for product in watched.products if product.weight in dropped}
    vocabulary = layout.vocabulary.without(dropped, biases)
    kept = (*vocabulary.kept, *(Unsplit(name, NOT_NEEDED) for name in sorted(dropped)))
    return replace(layout, kinds=tuple(kinds), vocabulary=replace(vocabulary, kept=kept))


def _counted(kind: Alike, watched: Watched) -> dict[str, Counted]:
    if not kind.layout.groups:
        return {}
    block, call = watched.example(kind.paths[0])
    return counted(sandboxed(block), kind.layout, call)


def _of_group(model: nn.Module, kind: Alike, group: SplitRegion, counts: Counted) -> Option:
    """The option of a group, for all blocks of its kind."""
    spared = 0.0
    for name, rows in group.rows.items():
        parameter = model.get_parameter(full_name(kind.paths[0], name))
        if not rows.is_shared:
            spared += parameter.nbytes * spared_share(rows, parameter.shape[rows.dim])
    cuts = frozenset(full_name(path, name) for path in kind.paths for name in group.parameters)
    num_blocks = len(kind.paths)
    return Option(cuts, num_blocks * counts.spared_work, num_blocks * spared, num_blocks * counts.sent)


def _aliases(model: nn.Module, names: Iterable[str]) -> list[tuple[str, ...]]:
    """The names of each parameter among `names`."""
    by_id: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        by_id.setdefault(id(model.get_parameter(name)), []).append(name)
    return [tuple(aliases) for aliases in by_id.values()]


def _of_table(model: nn.Module, names: Sequence[str], vocabulary: Vocabulary, watched: Watched) -> Option:
    """The option of a table, which sums looked-up rows and the gradient at logits' input; logits stay split."""
    table = model.get_parameter(names[0])
    rows = {**vocabulary.lookups, **vocabulary.logits}[names[0]]
    share = spared_share(rows, table.shape[rows.dim])
    parameters = dict(model.named_parameters())
    inputs = [product.input for product in watched.products if parameters[product.weight] is table]
    elements = sum(tensor.numel() for tensor in inputs)
    num_rows = table.shape[rows.dim]
    looked_up = sum(count for name, count in watched.tables.items() if parameters[name] is table)
    sent = looked_up * (table.numel() // num_rows) + elements
    return Option(frozenset(names), 2.0 * elements * num_rows * share, table.nbytes * share, sent)


def _only(layout: BlockLayout, rows: Set[str]) -> BlockLayout:
    """The layout with the groups of these rows, and the reasons why others are not taken."""
    groups = tuple(group for group in layout.groups if group.row in rows)
    taken = {name for group in groups for name in group.parameters}
    kept = {unsplit.name: unsplit for unsplit in layout.kept if unsplit.name not in taken}
    for group in layout.groups:
        if group.row not in rows:
            shared = taken & set(group.parameters)
            reason = f"shares {', '.join(sorted(shared))} with another split" if shared else NOT_NEEDED
            dropped = {name: Unsplit(name, reason) for name in (*group.columns, group.row) if name not in taken}
            kept = {**dropped, **kept}
    return BlockLayout(groups, tuple(kept.values()))
