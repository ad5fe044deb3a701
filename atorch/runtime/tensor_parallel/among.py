"""Splits of some of a model's parameters alone: the rest of a layout, and what is split by itself."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from torch import nn

from atorch.runtime.tensor_parallel.alone import derive_alone
from atorch.runtime.tensor_parallel.layout import BlockLayout, Kept
from atorch.runtime.tensor_parallel.model_layout import Alike, ModelLayout, full_name
from atorch.runtime.tensor_parallel.products import Product
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary
from atorch.runtime.tensor_parallel.watched import Run


def has_pair(block: nn.Module, path: str, only: Set[str]) -> bool:
    """True if a block holds two matrices that are to be split, as each group has at least."""
    parameters = block.named_parameters(remove_duplicate=False)
    return (
        len({parameter for name, parameter in parameters if parameter.dim() > 1 and full_name(path, name) in only}) > 1
    )


def groups_among(layout: BlockLayout, path: str, only: Set[str]) -> BlockLayout:
    """The part of a block's layout that splits nothing but what is to be split."""
    groups, kept = [], list(layout.kept)
    for group in layout.groups:
        others = [name for name in group.parameters if full_name(path, name) not in only]
        if others:
            reason = f"it goes with {', '.join(others)}, which is not to be split"
            kept += [Kept(name, reason) for name in group.parameters]
        else:
            groups.append(group)
    return BlockLayout(tuple(groups), tuple(kept))


def vocabulary_among(
    vocabulary: Vocabulary, model: nn.Module, products: Iterable[Product], only: Set[str]
) -> Vocabulary:
    """The part of the vocabulary that is to be split, under all the names of each table."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    left = {name for each in names.values() if not only >= set(each) for name in each}
    biases = {product.bias for product in products if product.weight in left}
    return vocabulary.without(left, biases)


def with_those_alone(layout: ModelLayout, model: nn.Module, run: Run, only: Set[str]) -> ModelLayout:
    """The layout with what is split by itself; of what it keeps whole it tells only what was to be split."""
    cut = {
        full_name(path, name) for path, block in layout.blocks.items() for each in block.groups for name in each.rows
    }
    cut |= {*layout.vocabulary.lookups, *layout.vocabulary.logits}
    alone = derive_alone(model, run, only, cut, layout.degree)
    known = {*alone.lookups, *alone.logits, *(each.name for each in alone.kept)}
    told = {name for name in only if name not in known}
    return replace(
        layout,
        kinds=tuple(_telling(kind, told) for kind in layout.kinds),
        vocabulary=replace(layout.vocabulary, kept=_among(layout.vocabulary.kept, told)),
        outside=(),
        alone=alone,
    )


def _telling(kind: Alike, told: Set[str]) -> Alike:
    """A kind of blocks that names, of what it keeps, what is to be told in any of them."""
    kept = tuple(each for each in kind.layout.kept if any(full_name(path, each.name) in told for path in kind.paths))
    return replace(kind, layout=replace(kind.layout, kept=kept))


def _among(kept: Iterable[Kept], told: Set[str]) -> tuple[Kept, ...]:
    return tuple(each for each in kept if each.name in told)
