"""Tensor parallelism of any model: derive a layout from the model itself, try it, apply it.

    layout = tensor_parallel(model, lambda model: model(**batch), mesh)

Every rank of the mesh calls it with the same weights and the same small batch. Repeated blocks are looked at one of a
kind; embedding and logits are split over the vocabulary. What cannot be split, or does not compute the same when tried,
stays whole on every rank, and `layout.kept` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.blocks import repeated_blocks
from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError, AtorchError, StrategyError
from atorch.runtime.tensor_parallel.apply import Cut, split_block
from atorch.runtime.tensor_parallel.attention_heads import with_attributes
from atorch.runtime.tensor_parallel.derive import derive
from atorch.runtime.tensor_parallel.dropout import with_draws
from atorch.runtime.tensor_parallel.layout import BlockLayout, Kept, Rows
from atorch.runtime.tensor_parallel.multihead_attention import make_splittable
from atorch.runtime.tensor_parallel.plan import Plan, check_names, chosen
from atorch.runtime.tensor_parallel.products import Product, SeeProducts
from atorch.runtime.tensor_parallel.recorded import Call, apart, draw_weights, record_calls, tensors_of
from atorch.runtime.tensor_parallel.replay import CLOSE, why_refused
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary, derive_vocabulary, split_vocabulary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Run = Callable[[nn.Module], Any]
"""Calls the model on a batch and returns its output."""


@dataclass(frozen=True)
class ModelLayout:
    """How a model is split, and what of it is not."""

    blocks: Mapping[str, BlockLayout]
    vocabulary: Vocabulary
    outside: tuple[Kept, ...] = ()
    """What is multiplied with outside of the blocks, and is not of the vocabulary."""

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What stays whole on every rank, by its full name, and why."""
        inner = [
            replace(each, name=full_name(path, each.name)) for path, block in self.blocks.items() for each in block.kept
        ]
        return (*inner, *self.vocabulary.kept, *self.outside)

    @property
    def rows(self) -> Mapping[str, Rows]:
        """The rows that each rank holds, for every parameter that was cut, by its full name."""
        cut = {
            full_name(path, name): rows
            for path, block in self.blocks.items()
            for group in block.groups
            for name, rows in group.rows.items()
        }
        cut.update({**self.vocabulary.lookups, **self.vocabulary.logits})
        return {name: rows for name, rows in cut.items() if not rows.is_shared}


def full_name(path: str, name: str) -> str:
    """The name in the model of what has a name in its module at `path`."""
    return f"{path}.{name}" if path and name else path or name


def tensor_parallel(model: nn.Module, run: Run, mesh: DeviceMesh, plan: Plan | None = None) -> ModelLayout:
    """Split `model` in place over `mesh`, of one axis; returns how.

    Args:
        run: calls the model on a small batch, the same on all ranks of the mesh: a few samples, a few tokens.
        plan: what is split, by hand; None: all that can be.

    Raises:
        StrategyError: the number of ranks does not divide a layer's heads, or the plan names what is not there or
            cannot be split. Nothing has been changed then.
        ArgumentError: the ranks have other weights, or were given other batches.
    """
    if plan is not None:
        check_names(model, plan)
    if mesh.size() == 1:
        return ModelLayout({}, Vocabulary({}, {}, {}))
    make_splittable(model)
    seen = _Seen(model, run, mesh.get_group())
    layout = _derive(model, seen, mesh, plan)
    cut = Cut(mesh)
    for path, block in layout.blocks.items():
        split_block(model.get_submodule(path), block, cut)
    split_vocabulary(model, layout.vocabulary, cut)
    seen.check(model, run)
    return layout


class _Seen:
    """What one evaluation of the whole model shows: its output, its blocks' arguments, what is used outside of them."""

    def __init__(self, model: nn.Module, run: Run, group: dist.ProcessGroup) -> None:
        self.blocks = repeated_blocks(model) or {"": model}  # where nothing repeats, all is one block
        self.kinds = _kinds(self.blocks)
        first = {paths[0]: self.blocks[paths[0]] for paths in self.kinds}
        inner = {id(p) for block in self.blocks.values() for p in block.parameters()}
        outer = {name: p for name, p in model.named_parameters() if id(p) not in inner}
        self.products: list[Product] = []
        with _evaluating(model), SeeProducts(outer, self._note) as mode:
            outputs: list[Any] = []
            self.calls = record_calls(model, first, lambda model: outputs.append(run(model)))
        self.output = [tensor.clone() for tensor in tensors_of(outputs[0])]
        self.tables = dict.fromkeys(lookup.table for lookup in mode.lookups)
        sums: list[list[float]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(sums, [float(tensor.double().sum()) for tensor in self.output], group=group)
        if any(other != sums[0] for other in sums):
            raise ArgumentError(
                f"the ranks of the tensor axis compute other outputs (sums {sums}); give all of them the same weights "
                "and the same batch before the model is split"
            )

    def _note(self, product: Product, compute: Callable[[], Tensor]) -> Tensor:
        self.products.append(product._replace(input=torch.empty(0)))
        return compute()

    def check(self, model: nn.Module, run: Run) -> None:
        """Raise where the model, now split, has another output than it had."""
        with _evaluating(model):
            output = tensors_of(run(model))
        for got, expected in zip(output, self.output, strict=True):
            tolerance = max(CLOSE, 8 * torch.finfo(expected.dtype).eps)
            if got.shape != expected.shape or not (got - expected).norm() <= tolerance * expected.norm() + 1e-6:
                raise AtorchError(
                    f"{type(model).__name__} has another output after it was split over tensor, though each of its "
                    "blocks had the same; name what is to be split in a plan, and report this"
                )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode and records no gradients; each module's own mode is back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), preserved_rng():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _kinds(blocks: Mapping[str, nn.Module]) -> list[list[str]]:
    """The paths of blocks that are of one class and have the same parameters."""
    kinds: dict[Any, list[str]] = {}
    for path, block in blocks.items():
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters(remove_duplicate=False))
        kinds.setdefault((type(block), shapes), []).append(path)
    return list(kinds.values())


def _derive(model: nn.Module, seen: _Seen, mesh: DeviceMesh, plan: Plan | None) -> ModelLayout:
    """The layout of the whole model; the model itself is not touched."""
    layouts: dict[str, BlockLayout] = {}
    for paths in seen.kinds:
        if paths[0] not in seen.calls:
            layouts.update(dict.fromkeys(paths, BlockLayout((), (Kept("", "the batch did not reach it"),))))
            continue
        with preserved_rng():
            layout = _derive_block(seen.blocks[paths[0]], paths[0], seen.calls[paths[0]], mesh, plan)
        layouts.update(dict.fromkeys(paths, layout))
    layouts = _without_torn_ties(model, layouts)
    vocabulary = Vocabulary({}, {}, {})
    if plan is None:
        vocabulary = derive_vocabulary(model, seen.tables, seen.products, mesh.size())
    known = {*vocabulary.lookups, *vocabulary.logits, *(each.name for each in vocabulary.kept)}
    outside = dict.fromkeys(product.weight for product in seen.products if product.weight not in known)
    reason = "the plan does not name it" if plan is not None else "it is outside of the repeated blocks"
    kept = tuple(Kept(name, reason) for name in outside)
    return ModelLayout({path: layouts[path] for path in seen.blocks}, vocabulary, kept)


def _derive_block(block: nn.Module, path: str, call: Call, mesh: DeviceMesh, plan: Plan | None) -> BlockLayout:
    twin = apart(block)
    layout = derive(twin, call, mesh.size())
    if plan is not None:
        layout = chosen(layout, path, plan)
    for each in layout.kept:
        if each.heads and plan is None:
            degrees = ", ".join(str(n) for n in range(2, each.heads + 1) if each.heads % n == 0)
            raise StrategyError(
                f"tensor is {mesh.size()}, which does not divide the {each.heads} heads before "
                f"{full_name(path, each.name)}; give the axis tensor a size of {degrees}, or name in a plan what "
                "else is to be split"
            )
    layout = with_draws(twin, layout, call)
    draw_weights(twin, 0)
    layout = with_attributes(twin, layout, call, Cut(mesh))
    return _accepted(twin, layout, call, mesh)


def _accepted(twin: nn.Module, layout: BlockLayout, call: Call, mesh: DeviceMesh) -> BlockLayout:
    """The layout, or what of it computes the same as the whole block on all ranks."""
    if not layout.groups or why_refused(twin, layout, call, Cut(mesh)) is None:
        return layout
    groups, kept = [], list(layout.kept)
    for group in layout.groups:
        reason = why_refused(twin, replace(layout, groups=(group,)), call, Cut(mesh))
        if reason is None:
            groups.append(group)
        else:
            kept.append(Kept(group.row, reason))
    return BlockLayout(tuple(groups), tuple(kept))


def _without_torn_ties(model: nn.Module, layouts: Mapping[str, BlockLayout]) -> dict[str, BlockLayout]:
    """The layouts without groups that would split a parameter which is used elsewhere as well, and whole there."""
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    split = {
        full_name(path, name)
        for path, layout in layouts.items()
        for group in layout.groups
        for name in group.parameters
    }
    result = {}
    for path, layout in layouts.items():
        block = model.get_submodule(path)
        groups, kept = [], list(layout.kept)
        for group in layout.groups:
            ties = {other for name in group.parameters for other in holders[id(block.get_parameter(name))]} - split
            if ties:
                kept.append(Kept(group.row, f"it is tied to {', '.join(sorted(ties))}, which is not split"))
            else:
                groups.append(group)
        result[path] = BlockLayout(tuple(groups), tuple(kept))
    return result
