"""The split of a whole model: plain data, which can be saved in a file and checked against its model.

A plan by hand only names modules. Their rows, and the splits of biases, tables and heads, are derived from the model.
A plan that the model contradicts is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from atorch.errors import StrategyError, near_miss
from atorch.model.structure import repeated_blocks
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows, SplitRegion, Unsplit
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary

FullShapes = Mapping[str, tuple[int, ...]]
"""Whole parameters' shapes by name."""


@dataclass(frozen=True)
class Alike:
    """Blocks that have the same parameters and are split in the same way."""

    paths: tuple[str, ...]
    shapes: FullShapes
    layout: BlockLayout


@dataclass(frozen=True)
class ModelLayout:
    """The split of a model over `degree` ranks, and its parameters that are not split."""

    degree: int
    kinds: tuple[Alike, ...] = ()
    vocabulary: Vocabulary = Vocabulary({}, {}, {})
    outside: tuple[Unsplit, ...] = ()
    """Weights of products outside of the blocks and the vocabulary."""
    alone: Vocabulary = Vocabulary({}, {}, {})
    """Linear layers and tables anywhere that are split by themselves; results are gathered or summed."""

    @property
    def blocks(self) -> Mapping[str, BlockLayout]:
        """The layout of each block, by its path."""
        return {path: kind.layout for kind in self.kinds for path in kind.paths}

    @property
    def kept(self) -> tuple[Unsplit, ...]:
        """Parameters that stay whole on every rank, by full name, with reasons."""
        inner = [
            replace(unsplit, name=full_name(path, unsplit.name))
            for path, block in self.blocks.items()
            for unsplit in block.kept
        ]
        return (*inner, *self.vocabulary.kept, *self.outside, *self.alone.kept)

    @property
    def rows(self) -> Mapping[str, Rows]:
        """The rows that each rank holds, for every parameter that was cut, by its full name."""
        cut = {
            full_name(path, name): rows
            for path, block in self.blocks.items()
            for group in block.groups
            for name, rows in group.rows.items()
        }
        for vocabulary in (self.vocabulary, self.alone):
            cut.update({**vocabulary.lookups, **vocabulary.logits})
        return {name: rows for name, rows in cut.items() if not rows.is_shared}


def rows_of(names: Iterable[str], rows: Mapping[str, Rows]) -> Rows | None:
    """The rows of the parameter with these names, if it was cut under any of them; `rows` are a layout's."""
    return next((rows[name] for name in names if name in rows), None)


def full_name(path: str, name: str) -> str:
    """The name in the model of `name` in its module at `path`."""
    return f"{path}.{name}" if path and name else path or name


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks that are split one by one: the repeated ones, or the whole model if nothing repeats."""
    return repeated_blocks(model) or {"": model}


def shapes_of(block: nn.Module) -> FullShapes:
    """The shapes of a block's parameters, under all their names."""
    return {name: tuple(p.shape) for name, p in block.named_parameters(remove_duplicate=False)}


def why_not_of(layout: ModelLayout, model: nn.Module, degree: int) -> str | None:
    """The reason why a layout is not of this whole model on `degree` ranks, by names and shapes; None if it is."""
    if layout.degree != degree:
        return f"it is for {layout.degree} ranks, and there are {degree}"
    block_shapes = {path: kind.shapes for kind in layout.kinds for path in kind.paths}
    blocks = blocks_of(model)
    if block_shapes.keys() != blocks.keys():
        return f"{', '.join(sorted(block_shapes.keys() ^ blocks.keys())[:3])} are blocks of one and not of the other"
    for path, block in blocks.items():
        if block_shapes[path] != shapes_of(block):
            return f"{path or 'the model'} has other parameters"
    whole = shapes_of(model)
    for vocabulary in (layout.vocabulary, layout.alone):
        for name, rows in {**vocabulary.lookups, **vocabulary.logits, **vocabulary.biases}.items():
            if name not in whole or whole[name][rows.dim] != rows.num_met:
                return f"{name} is another"
    return None


ManualLayout = Mapping[str, Literal["column", "row"]]
"""Kinds of split by patterns of module names, whole or from any dot on: {"layers.*.attn.q_proj": "column", …}."""


def matches(name: str, pattern: str) -> bool:
    """True if a pattern matches a module: `layers.*.mlp` also matches `model.layers.0.mlp`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_names(model: nn.Module, plan: ManualLayout) -> None:
    """Raise a StrategyError for a pattern that names no module or parameter, or an unknown kind."""
    names = [_target(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern, kind in plan.items():
        if kind not in ("column", "row"):
            raise StrategyError(f"the plan splits {pattern!r} by {kind!r}; give 'column' or 'row'")
        if not any(matches(name, pattern) for name in names):
            raise StrategyError(
                f"the plan names {pattern!r}, but the model has no such layer; {near_miss(pattern, names)}"
            )


def chosen(layout: BlockLayout, path: str, plan: ManualLayout) -> BlockLayout:
    """The part of a block's layout that the plan names.

    Raises:
        StrategyError: the plan names only a part of a group, or a layer that cannot be split so.
    """
    named = {
        name: kind for name in _names(layout) for pattern, kind in plan.items() if matches(_target(name, path), pattern)
    }
    groups = [group for group in layout.groups if all(named.get(n) == kind for n, kind in _kinds(group).items())]
    covered = {name for group in groups for name in _kinds(group)}
    kept = list(layout.kept)
    for group in layout.groups:
        if group in groups:
            continue
        if not (named.keys() & _kinds(group)) - covered:
            kept.append(Unsplit(group.row, "the plan does not name it"))
            continue
        for name, kind in _kinds(group).items():
            planned = named.get(name)
            if planned != kind:
                verb = "leaves it out" if planned is None else f"splits it by {planned}"
                together = sorted(_target(member) for member in _kinds(group))
                raise StrategyError(
                    f"{_target(name, path)} has to be split by {kind} for {_target(group.row, path)} to be "
                    f"split by row, but the plan {verb}; give all of {together}, or none"
                )
    for entry in layout.kept:
        if entry.name in named:
            raise StrategyError(f"the plan names {_target(entry.name, path)}, which cannot be split: {entry.reason}")
    return replace(layout, groups=tuple(groups), kept=tuple(kept))


def _kinds(group: SplitRegion) -> dict[str, str]:
    return {**dict.fromkeys(group.columns, "column"), group.row: "row"}


def _names(layout: BlockLayout) -> list[str]:
    return [name for group in layout.groups for name in _kinds(group)] + [unsplit.name for unsplit in layout.kept]


def _target(parameter: str, path: str = "") -> str:
    """A plan's name of a parameter of the block at `path`: its module, if it is the module's `weight`."""
    return (f"{path}.{parameter}" if path else parameter).removesuffix(".weight")
