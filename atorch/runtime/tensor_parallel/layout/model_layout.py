"""The split of a whole model: plain data, which can be saved in a file and checked against its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from atorch.model.structure import repeated_blocks
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, Rows, Unsplit
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
