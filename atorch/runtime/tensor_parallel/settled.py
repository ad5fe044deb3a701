"""A model's layout out of all that could be split of it: what is taken is chosen for the whole model at once."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch import nn

from atorch.distributed.rng import preserved_rng
from atorch.errors import StrategyError
from atorch.runtime.tensor_parallel.choice import Option, choose, most_spared
from atorch.runtime.tensor_parallel.counted import Counted, counted, spared_share
from atorch.runtime.tensor_parallel.layout import BlockLayout, Group, Kept
from atorch.runtime.tensor_parallel.model_layout import Alike, ModelLayout, full_name
from atorch.runtime.tensor_parallel.ranks import Ranks
from atorch.runtime.tensor_parallel.recorded import apart
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary
from atorch.runtime.tensor_parallel.watched import Watched
from atorch.units import format_bytes

NOT_NEEDED = "a process holds no more than parameter_bytes without that"


def settled(
    model: nn.Module,
    found: ModelLayout,
    watched: Watched,
    ranks: Ranks,
    parameter_bytes: float | None,
) -> ModelLayout:
    """The layout that is chosen of `found`, whose groups may share parameters. All ranks call it.

    Args:
        parameter_bytes: the most that a rank may hold of the whole model's parameters; None: as little as it can.

    Raises:
        StrategyError: no choice leaves as little as `parameter_bytes`.
    """
    if parameter_bytes is None and all(_are_apart(kind.layout.groups) for kind in found.kinds):
        return found  # all of it can be taken
    counts = {kind.paths: _counted(kind, watched) for kind in found.kinds}
    groups = [(kind, group) for kind in found.kinds for group in kind.layout.groups]
    tables = _tables(model, found.vocabulary)
    options = [_of_group(model, kind, group, counts[kind.paths][group.row]) for kind, group in groups]
    options += [_of_table(model, names, found.vocabulary, watched) for names in tables]
    ties = _ties(model, frozenset().union(*(option.cuts for option in options)))
    needed = None if parameter_bytes is None else _bytes_of(model) - parameter_bytes
    chosen = ranks.gather(choose(options, ties, needed))[0]  # other versions of a solver may take another of two equals
    if chosen is None:
        least = _bytes_of(model) - most_spared(options, ties)
        raise StrategyError(
            f"parameter_bytes was given {parameter_bytes:g}, but with tensor {found.degree} each process holds at "
            f"least {least:.0f} bytes ({format_bytes(least)}) of {type(model).__name__}; give at least so many, or "
            "the axis tensor a larger size"
        )
    taken = {(kind.paths, group.row) for index, (kind, group) in enumerate(groups) if index in chosen}
    kinds = [
        replace(kind, layout=_only(kind.layout, {row for paths, row in taken if paths == kind.paths}))
        for kind in found.kinds
    ]
    left = {name for index, names in enumerate(tables, len(groups)) if index not in chosen for name in names}
    biases = {product.bias for product in watched.products if product.weight in left}
    vocabulary = found.vocabulary.without(left, biases)
    kept = (*vocabulary.kept, *(Kept(name, NOT_NEEDED) for name in sorted(left)))
    return replace(found, kinds=tuple(kinds), vocabulary=replace(vocabulary, kept=kept))


def _are_apart(groups: Sequence[Group]) -> bool:
    names = [name for group in groups for name in group.parameters]
    return len(names) == len(set(names))


def _counted(kind: Alike, watched: Watched) -> dict[str, Counted]:
    if not kind.layout.groups:
        return {}
    block, call = watched.example(kind.paths[0])
    with preserved_rng():
        return counted(apart(block), kind.layout, call)


def _of_group(model: nn.Module, kind: Alike, group: Group, each: Counted) -> Option:
    """The group in all blocks of its kind."""
    spared = 0.0
    for name, rows in group.rows.items():
        parameter = model.get_parameter(full_name(kind.paths[0], name))
        if not rows.is_shared:
            spared += parameter.nbytes * spared_share(rows, parameter.shape[rows.dim])
    cuts = frozenset(full_name(path, name) for path in kind.paths for name in group.parameters)
    times = len(kind.paths)
    return Option(cuts, times * each.spared_work, times * spared, times * each.sent)


def _tables(model: nn.Module, vocabulary: Vocabulary) -> list[tuple[str, ...]]:
    """The names of each table that could be split over the vocabulary."""
    names: dict[int, list[str]] = {}
    for name in dict.fromkeys((*vocabulary.lookups, *vocabulary.logits)):
        names.setdefault(id(model.get_parameter(name)), []).append(name)
    return [tuple(each) for each in names.values()]


def _of_table(model: nn.Module, names: Sequence[str], vocabulary: Vocabulary, watched: Watched) -> Option:
    """A table: rows that are looked up are summed, and the gradient at logits' input; logits stay split for a loss."""
    table = model.get_parameter(names[0])
    rows = {**vocabulary.lookups, **vocabulary.logits}[names[0]]
    share = spared_share(rows, table.shape[rows.dim])
    parameters = dict(model.named_parameters())
    inputs = [product.input for product in watched.products if parameters[product.weight] is table]
    elements = sum(each.numel() for each in inputs)
    num_rows = table.shape[rows.dim]
    looked_up = sum(count for name, count in watched.tables.items() if parameters[name] is table)
    sent = looked_up * (table.numel() // num_rows) + elements
    return Option(frozenset(names), 2.0 * elements * num_rows * share, table.nbytes * share, sent)


def _ties(model: nn.Module, cut: Set[str]) -> list[list[str]]:
    """The names of each parameter that could be cut under several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in cut:
            names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _only(layout: BlockLayout, rows: Set[str]) -> BlockLayout:
    """The layout with the groups of these rows, and why the others are not taken."""
    groups = tuple(group for group in layout.groups if group.row in rows)
    taken = {name for group in groups for name in group.parameters}
    kept = {each.name: each for each in layout.kept if each.name not in taken}
    for group in layout.groups:
        if group.row not in rows:
            shared = taken & set(group.parameters)
            reason = f"shares {', '.join(sorted(shared))} with another split" if shared else NOT_NEEDED
            left = {name: Kept(name, reason) for name in (*group.columns, group.row) if name not in taken}
            kept = {**left, **kept}
    return BlockLayout(groups, tuple(kept.values()))
