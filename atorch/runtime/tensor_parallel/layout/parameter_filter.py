"""Splits of some of a model's parameters alone: the rest of a layout, and what is split by itself.

A linear layer is split by columns and its result gathered; a table has each rank look up its own rows, and the results
are summed. Both hold whatever is around them, if no other module uses the parameter: one evaluation is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from atorch.runtime.tensor_parallel.derive.matmul_tracker import MatmulUse
from atorch.runtime.tensor_parallel.derive.reference_forward import EvaluateModel, evaluating
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, Rows, Unsplit
from atorch.runtime.tensor_parallel.layout.model_layout import Alike, ModelLayout, full_name
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary, why_whole

Holders = Mapping[str, nn.Module]
"""The modules that hold one parameter, by the parameter's full name in each."""


def derive_alone(model: nn.Module, run: EvaluateModel, among: Set[str], cut: Iterable[str], degree: int) -> Vocabulary:
    """Splits of single matrices `among` the model's parameters that no split of `cut` takes.

    among: full names, of which a parameter that is tied needs all.
    """
    taken = {id(model.get_parameter(name)) for name in cut}
    held: dict[int, tuple[nn.Parameter, dict[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in taken:
                name = f"{path}.{own}" if path else own
                held.setdefault(id(parameter), (parameter, {}))[1][name] = module
    asked = {
        key: (parameter, holders)
        for key, (parameter, holders) in held.items()
        if not among.isdisjoint(holders) and all(_is_known(name, module) for name, module in holders.items())
    }
    if not asked:
        return Vocabulary({}, {}, {})
    uses = _Uses({key: frozenset(holders.values()) for key, (_, holders) in asked.items()})
    with evaluating(model), uses.watching(), uses:
        run(model)
    found = Vocabulary({}, {}, {})
    for key, (parameter, holders) in asked.items():
        found = _with(found, model, holders, Rows.even(0, parameter.shape[0], degree), among, uses.why_whole(key))
    return found


def _with(
    found: Vocabulary, model: nn.Module, holders: Holders, rows: Rows, among: Set[str], reason: str | None
) -> Vocabulary:
    """`found` and one parameter more, split or kept."""
    first, others = next(iter(holders)), sorted(holders.keys() - among)
    if others:
        reason = f"it is tied to {', '.join(others)}, which is not to be split"
    reason = reason or why_whole(list(holders.values()), rows)
    if reason is not None:
        return Vocabulary(found.lookups, found.logits, found.biases, (*found.kept, Unsplit(first, reason)))
    lookups, logits, biases = dict(found.lookups), dict(found.logits), dict(found.biases)
    for name, module in holders.items():
        (lookups if isinstance(module, nn.Embedding) else logits)[name] = rows
        bias = name.removesuffix("weight") + "bias"
        if module._parameters.get("bias") is not None:
            biases[bias] = Rows(0, rows.by_rank)
    return Vocabulary(lookups, logits, biases, found.kept)


def _is_known(name: str, module: nn.Module) -> bool:
    """True if what a module has under a name is the weight of a linear layer or a table, with torch's own forward."""
    kind = next((cls for cls in (nn.Linear, nn.Embedding) if isinstance(module, cls)), None)
    is_own = kind is not None and type(module).forward is kind.forward and "forward" not in vars(module)
    return is_own and name.rpartition(".")[2] == "weight"


class _Uses(TorchFunctionMode):
    """Notes which parameters are used while no module that holds them computes, and which modules are called."""

    def __init__(self, holders: Mapping[int, Set[nn.Module]]) -> None:
        super().__init__()
        self._holders = holders  # by the parameter's id
        self._computing: list[nn.Module] = []
        self._called: set[nn.Module] = set()
        self._elsewhere: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, holders say when they compute."""
        with ExitStack() as stack:
            for module in {module for held in self._holders.values() for module in held}:
                stack.callback(module.register_forward_pre_hook(self._enter).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._computing.append(module)
        self._called.add(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._computing.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        used = {
            id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)
        } & self._holders.keys()
        if used and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # a size or a dtype is no use
            self._elsewhere |= {key for key in used if self._holders[key].isdisjoint(self._computing)}
        return result

    def why_whole(self, parameter: int) -> str | None:
        """Why a parameter, by its id, cannot be split by itself, from what was seen."""
        if parameter in self._elsewhere:
            return "it is used outside of the modules that hold it"
        return None if self._holders[parameter] <= self._called else "the batch did not reach it"


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
            kept += [Unsplit(name, reason) for name in group.parameters]
        else:
            groups.append(group)
    return BlockLayout(tuple(groups), tuple(kept))


def vocabulary_among(
    vocabulary: Vocabulary, model: nn.Module, products: Iterable[MatmulUse], only: Set[str]
) -> Vocabulary:
    """The part of the vocabulary that is to be split, under all the names of each table."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    left = {name for each in names.values() if not only >= set(each) for name in each}
    biases = {product.bias for product in products if product.weight in left}
    return vocabulary.without(left, biases)


def with_those_alone(layout: ModelLayout, model: nn.Module, run: EvaluateModel, only: Set[str]) -> ModelLayout:
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


def _among(kept: Iterable[Unsplit], told: Set[str]) -> tuple[Unsplit, ...]:
    return tuple(each for each in kept if each.name in told)
