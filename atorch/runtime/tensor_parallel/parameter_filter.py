"""Splits of selected parameters: a layout restricted to them, and layers that are split by themselves.

A linear layer is split by columns and its result gathered. In a table each rank looks up its own rows, and the results
are summed. Both need that no other module uses the parameter, which one recorded evaluation shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from torch import nn

from atorch.model.structure import parameter_names
from atorch.runtime.tensor_parallel.derive.block_sandbox import MatmulUse
from atorch.runtime.tensor_parallel.derive.split_validation import Watched
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows, Unsplit
from atorch.runtime.tensor_parallel.model_layout import Alike, ModelLayout, full_name
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary, holders_of


def derive_alone(model: nn.Module, watched: Watched, among: Set[str], cut: Iterable[str], degree: int) -> Vocabulary:
    """Splits of single matrices `among` the model's parameters that no split of `cut` takes.

    among: full names, which must include all names of a tied parameter.
    """
    cut_ids = {id(model.get_parameter(name)) for name in cut}
    selected = {
        key: holders
        for key, holders in holders_of(model).items()
        if key not in cut_ids
        and not among.isdisjoint(holders)
        and all(_is_known(name, module) for name, module in holders.items())
    }
    splits = Vocabulary({}, {}, {})
    for key, holders in selected.items():
        num_calls = [watched.num_calls[module] for module in set(holders.values())]
        others = sorted(holders.keys() - among)
        reason = None if all(num_calls) else "the batch did not reach it"
        if watched.uses[key] > sum(num_calls):  # a call is one use
            reason = "it is used outside of the modules that hold it"
        if others:
            reason = f"it is tied to {', '.join(others)}, which is not to be split"
        rows = Rows.even(0, model.get_parameter(next(iter(holders))).shape[0], degree)
        with_bias = [name for name, module in holders.items() if module._parameters.get("bias") is not None]
        splits = splits.with_table(holders, rows, [f"{name.removesuffix('weight')}bias" for name in with_bias], reason)
    return splits


def _is_known(name: str, module: nn.Module) -> bool:
    """True if a name is the weight of a linear layer or a table with torch's own forward."""
    kind = next((cls for cls in (nn.Linear, nn.Embedding) if isinstance(module, cls)), None)
    is_own = kind is not None and type(module).forward is kind.forward and "forward" not in vars(module)
    return is_own and name.rpartition(".")[2] == "weight"


def has_pair(block: nn.Module, path: str, only: Set[str]) -> bool:
    """True if a block holds two matrices to split, the minimum of a group."""
    named = block.named_parameters(remove_duplicate=False)
    return len({p for name, p in named if p.dim() > 1 and full_name(path, name) in only}) > 1


def groups_among(layout: BlockLayout, path: str, only: Set[str]) -> BlockLayout:
    """The part of a block's layout that splits only parameters in `only`."""
    groups, kept = [], list(layout.kept)
    for group in layout.groups:
        others = [name for name in group.parameters if full_name(path, name) not in only]
        if others:
            reason = f"it goes with {', '.join(others)}, which is not to be split"
            kept += [Unsplit(name, reason) for name in group.parameters]
        else:
            groups.append(group)
    return BlockLayout(tuple(groups), tuple(kept))


def vocabulary_among(
    vocabulary: Vocabulary, model: nn.Module, products: Iterable[MatmulUse], only: Set[str]
) -> Vocabulary:
    """The part of the vocabulary whose tables are in `only` under all their names."""
    dropped = {name for aliases in parameter_names(model).values() if not only >= set(aliases) for name in aliases}
    biases = {product.bias for product in products if product.weight in dropped}
    return vocabulary.without(dropped, biases)


def with_those_alone(layout: ModelLayout, model: nn.Module, watched: Watched, only: Set[str]) -> ModelLayout:
    """The layout with layers that are split by themselves; of kept parameters it lists only those in `only`."""
    cut = {
        full_name(path, name) for path, block in layout.blocks.items() for group in block.groups for name in group.rows
    }
    cut |= {*layout.vocabulary.lookups, *layout.vocabulary.logits}
    alone = derive_alone(model, watched, only, cut, layout.degree)
    covered = {*alone.lookups, *alone.logits, *(unsplit.name for unsplit in alone.kept)}
    listed = {name for name in only if name not in covered}
    kept = tuple(unsplit for unsplit in layout.vocabulary.kept if unsplit.name in listed)
    return replace(
        layout,
        kinds=tuple(_with_kept(kind, listed) for kind in layout.kinds),
        vocabulary=replace(layout.vocabulary, kept=kept),
        outside=(),
        alone=alone,
    )


def _with_kept(kind: Alike, listed: Set[str]) -> Alike:
    """A kind of blocks with only those kept parameters that are `listed` for any of its blocks."""
    kept = tuple(
        unsplit for unsplit in kind.layout.kept if any(full_name(path, unsplit.name) in listed for path in kind.paths)
    )
    return replace(kind, layout=replace(kind.layout, kept=kept))
