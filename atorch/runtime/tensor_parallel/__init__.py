"""Tensor parallelism of any model: derive a layout from the model itself, try it, apply it.

    layout = tensor_parallel(model, lambda model: model(**batch), mesh)

Every rank of the mesh calls it with the same weights and the same small batch. One repeated block of each kind is
analysed; embedding and logits are split over the vocabulary. Layers that cannot be split, or fail their trial, stay
whole on every rank, and `layout.kept` has the reasons. `apply_layout` applies a known layout without trials.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atorch.distributed.collectives import all_or_none, call_on_all_ranks
from atorch.distributed.fingerprints import facts_of_call
from atorch.distributed.rng import preserved_rng, random_state
from atorch.errors import ArgumentError, StrategyError
from atorch.model.copy_isolation import Originals
from atorch.model.structure import parameter_names
from atorch.runtime.tensor_parallel.apply import ShardingContext, split_block
from atorch.runtime.tensor_parallel.derive import derive
from atorch.runtime.tensor_parallel.derive.attention_heads import make_splittable, with_attributes
from atorch.runtime.tensor_parallel.derive.block_sandbox import (
    EvaluateModel,
    ForwardCall,
    MatmulUse,
    SeeProducts,
    fresh,
    sandboxed,
)
from atorch.runtime.tensor_parallel.derive.split_validation import Ranks, Watched, why_refused
from atorch.runtime.tensor_parallel.layout import BlockLayout, Rows, SplitRegion, Unsplit
from atorch.runtime.tensor_parallel.layout_selection import settled
from atorch.runtime.tensor_parallel.model_layout import (
    Alike,
    ManualLayout,
    ModelLayout,
    check_names,
    chosen,
    full_name,
    shapes_of,
    why_not_of,
)
from atorch.runtime.tensor_parallel.parameter_filter import groups_among, has_pair, vocabulary_among, with_those_alone
from atorch.runtime.tensor_parallel.state import whole_state
from atorch.runtime.tensor_parallel.vocabulary import Vocabulary, derive_vocabulary, split_vocabulary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


__all__ = [
    "BlockLayout", "ModelLayout", "Rows", "SplitRegion", "Unsplit", "apply_layout", "derive_layout", "tensor_parallel",
    "whole_state",
]  # fmt: skip


def tensor_parallel(
    model: nn.Module,
    run: EvaluateModel,
    mesh: DeviceMesh,
    plan: ManualLayout | None = None,
    *,
    among: Collection[str] | None = None,
    parameter_bytes: float | None = None,
    as_dtensors: bool = True,
    loss_parallel: bool = True,
    is_agreed: bool = False,
) -> ModelLayout:
    """Split `model` in place over `mesh`, of one axis; returns the layout.

    Args:
        run: calls the model on a small batch, the same on all ranks of the mesh: a few samples, a few tokens.
        plan: a layout by hand; None: split as much as possible.
        among: full names of parameters; nothing else is split. Linear layers and tables among them that no other split
            takes are split by themselves. Heads that the ranks do not divide are no error then. None: all parameters,
            and none by itself.
        parameter_bytes: maximum bytes of parameters on a rank, with minimal communication; None: no maximum.
        as_dtensors, loss_parallel: as for `apply_layout`.
        is_agreed: the ranks are known to call this with equal arguments; else they compare models and arguments.

    Raises:
        StrategyError: the ranks do not divide a layer's heads, the plan names layers that do not exist or cannot be
            split, or no layout fits `parameter_bytes`. The model is then unchanged.
        ArgumentError: models, weights, arguments or batches differ between ranks.
    """
    only = None if among is None else frozenset(among)
    options: dict[str, Any] = {
        "among": None if only is None else sorted(only),
        "parameter_bytes": parameter_bytes,
        "as_dtensors": as_dtensors,
        "loss_parallel": loss_parallel,
    }

    check = partial(check_names, model, plan or {})
    if mesh.size() == 1:
        check()
        return ModelLayout(1)
    group = mesh.get_group()
    if is_agreed:
        check()
    else:
        call_on_all_ranks("tensor_parallel", lambda: facts_of_call(model, plan=plan, **options), check, group=group)
    make_splittable(model)
    ranks = Ranks(mesh.size(), mesh)
    watched = all_or_none(lambda: Watched(model, run), group)
    sums = ranks.gather(watched.sums)
    if any(other != sums[0] for other in sums):
        raise ArgumentError(
            f"the ranks of the tensor axis compute other outputs (sums {sums}); give all of them the same weights "
            "and the same batch before the model is split"
        )
    with Originals(model), preserved_rng():  # trials work on copies of blocks
        layout = _derive(model, watched, ranks, plan, parameter_bytes, only)
    if only is not None:
        layout = with_those_alone(layout, model, watched, only)
    apply_layout(model, layout, mesh, as_dtensors=as_dtensors, loss_parallel=loss_parallel)
    watched.check(model, run)
    return layout


def derive_layout(
    model: nn.Module,
    run: EvaluateModel,
    degree: int,
    plan: ManualLayout | None = None,
    *,
    parameter_bytes: float | None = None,
) -> ModelLayout:
    """The layout of `model` over `degree` ranks, which need not exist. The model computes as before.

    Raises:
        StrategyError: as `tensor_parallel`.
    """
    check_names(model, plan or {})
    make_splittable(model)
    watched = Watched(model, run)
    with Originals(model), preserved_rng():
        return _derive(model, watched, Ranks(degree), plan, parameter_bytes)


def apply_layout(
    model: nn.Module, layout: ModelLayout, mesh: DeviceMesh, *, as_dtensors: bool = True, loss_parallel: bool = True
) -> None:
    """Split `model` in place by `layout`. No communication.

    Args:
        as_dtensors: cut parameters become DTensors over the mesh, as FSDP2 requires. Otherwise they become plain
            tensors of this rank's rows, as DistributedDataParallel and fused optimizers of plain tensors require.

    Raises:
        ArgumentError: the layout is another model's, or for another number of ranks.
    """
    reason = why_not_of(layout, model, mesh.size())
    if reason is not None:
        raise ArgumentError(f"the layout does not fit {type(model).__name__}: {reason}; derive it from this model")
    make_splittable(model)
    cut = ShardingContext(mesh, as_dtensors=as_dtensors)
    for path, block in layout.blocks.items():
        split_block(model.get_submodule(path), block, cut)
    split_vocabulary(model, layout.vocabulary, cut, loss_parallel=loss_parallel)
    split_vocabulary(model, layout.alone, cut, loss_parallel=False)
    if mesh.device_type != "cpu" and any(parameter.device.type == "cpu" for parameter in model.parameters()):
        model.to(mesh.device_type)  # DTensors are on the device already


def _derive(
    model: nn.Module,
    watched: Watched,
    ranks: Ranks,
    plan: ManualLayout | None,
    parameter_bytes: float | None,
    only: Set[str] | None = None,
) -> ModelLayout:
    """The layout of the whole model; the model itself is not touched.

    A selection of all possible splits is tried; if some fail, the selection is repeated without them.
    """
    layouts = _candidates(watched, ranks.degree, plan, only)
    vocabulary = Vocabulary({}, {}, {})
    if plan is None:
        vocabulary = derive_vocabulary(model, watched.tables, watched.products, ranks.degree)
    if only is not None:
        vocabulary = vocabulary_among(vocabulary, model, watched.products, only)
    inside = {*vocabulary.lookups, *vocabulary.logits, *(unsplit.name for unsplit in vocabulary.kept)}
    outside = dict.fromkeys(product.weight for product in watched.products if product.weight not in inside)
    reason = "the plan does not name it" if plan is not None else "it is outside of the repeated blocks"
    kept = tuple(Unsplit(name, reason) for name in outside)
    tried: dict[tuple[str, frozenset[str]], BlockLayout] = {}
    while True:
        layouts = _without_torn_ties(model, layouts)
        kinds = [kind for paths in watched.kinds for kind in _alike(paths, layouts, watched.blocks)]
        possible = ModelLayout(ranks.degree, tuple(kinds), vocabulary, kept)
        layout = settled(model, possible, watched, ranks, parameter_bytes)
        trials = [_trial(kind, watched, ranks, tried) for kind in layout.kinds]
        if not any(trial.kept for trial in trials):
            pairs = zip(layout.kinds, trials, strict=True)
            kinds = [replace(kind, layout=replace(kind.layout, groups=trial.groups)) for kind, trial in pairs]
            return replace(layout, kinds=tuple(kinds))
        for kind, trial in zip(layout.kinds, trials, strict=True):
            layouts.update({path: layouts[path].without(partial(_why_failed, trial)) for path in kind.paths})


def _why_failed(trial: BlockLayout, group: SplitRegion) -> str | None:
    return next((unsplit.reason for unsplit in trial.kept if unsplit.name == group.row), None)


def _candidates(
    watched: Watched, degree: int, plan: ManualLayout | None, only: Set[str] | None
) -> dict[str, BlockLayout]:
    """Possible splits of each block: groups that may share parameters."""
    layouts: dict[str, BlockLayout] = {}
    for paths in watched.kinds:
        allowed = [path for path in paths if only is None or has_pair(watched.blocks[path], path, only)]
        layouts.update(dict.fromkeys(paths, BlockLayout(())))
        if not allowed:
            continue
        layout = BlockLayout((), (Unsplit("", "the batch did not reach it"),))
        if paths[0] in watched.calls:
            first, is_named = paths[0], plan is not None or only is not None
            layout = _derive_block(watched.blocks[first], first, watched.calls[first], degree, plan, is_named)
        layouts.update({path: layout if only is None else groups_among(layout, path, only) for path in allowed})
    return layouts


def _alike(paths: list[str], layouts: Mapping[str, BlockLayout], blocks: Mapping[str, nn.Module]) -> list[Alike]:
    """Blocks of the same parameters, grouped by their layouts, which ties may make different."""
    by_layout: list[tuple[list[str], BlockLayout]] = []
    for path in paths:
        same = next((members for members, layout in by_layout if layout == layouts[path]), None)
        if same is None:
            by_layout.append(([path], layouts[path]))
        else:
            same.append(path)
    return [Alike(tuple(same), shapes_of(blocks[same[0]]), layout) for same, layout in by_layout]


def _derive_block(
    block: nn.Module, path: str, call: ForwardCall, degree: int, plan: ManualLayout | None, is_named: bool
) -> BlockLayout:
    layout = derive(sandboxed(block), call, degree)
    if plan is not None:
        layout = chosen(layout, path, plan)
    for unsplit in layout.kept:
        if unsplit.heads and not is_named:
            degrees = ", ".join(str(n) for n in range(2, unsplit.heads + 1) if unsplit.heads % n == 0)
            raise StrategyError(
                f"tensor is {degree}, which does not divide the {unsplit.heads} heads before "
                f"{full_name(path, unsplit.name)}; give the axis tensor a size of {degrees}, or name in a plan what "
                "else is to be split"
            )
    return layout


def _trial(
    kind: Alike, watched: Watched, ranks: Ranks, tried: dict[tuple[str, frozenset[str]], BlockLayout]
) -> BlockLayout:
    """The groups of a kind that compute the same as the whole block, with numbers to divide; reasons for the rest."""
    groups = kind.layout.groups
    key = kind.paths[0], frozenset(group.row for group in groups)
    if groups and key not in tried:
        block, call = watched.example(kind.paths[0])
        clone = sandboxed(block)
        layout = with_draws(clone, BlockLayout(groups), call)
        layout = with_attributes(clone, layout, call, ranks)
        tried[key] = layout if ranks.mesh is None else _accepted(clone, layout, call, ranks.mesh)
    return tried[key] if groups else BlockLayout(())


def _accepted(clone: nn.Module, layout: BlockLayout, call: ForwardCall, mesh: DeviceMesh) -> BlockLayout:
    """The layout, or those of its groups that compute the same as the whole block on all ranks."""
    if not layout.groups or why_refused(clone, layout, call, ShardingContext(mesh)) is None:
        return layout
    return layout.without(
        lambda group: why_refused(clone, replace(layout, groups=(group,)), call, ShardingContext(mesh))
    )


def _without_torn_ties(model: nn.Module, layouts: Mapping[str, BlockLayout]) -> dict[str, BlockLayout]:
    """The layouts without groups that would split a parameter that is also used elsewhere, and whole there."""
    names_of = parameter_names(model)
    split = {
        full_name(path, name)
        for path, layout in layouts.items()
        for group in layout.groups
        for name in group.parameters
    }

    def why(block: nn.Module, group: SplitRegion) -> str | None:
        ties = {other for name in group.parameters for other in names_of[block.get_parameter(name)]} - split
        return f"it is tied to {', '.join(sorted(ties))}, which is not split" if ties else None

    return {path: layout.without(partial(why, model.get_submodule(path))) for path, layout in layouts.items()}


@torch.no_grad()
def with_draws(block: nn.Module, layout: BlockLayout, call: ForwardCall) -> BlockLayout:
    """The layout with `draws` set for each group that draws, or may draw, random numbers between fork and sum.

    Groups that the call does not reach may draw: an expert may have no token.
    """
    states: dict[str, Tensor] = {}

    def note(product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        result = compute()
        states.setdefault(product.weight, random_state(result.device))
        return result

    (args, kwargs), _ = fresh(call)
    with preserved_rng(), SeeProducts(dict(block.named_parameters()), note):
        block.train()(*args, **kwargs)
    block.eval()

    def may_draw(start: str, end: str) -> bool:
        return not (start in states and end in states and torch.equal(states[start], states[end]))

    groups = [replace(group, draws=may_draw(next(iter(group.columns)), group.row)) for group in layout.groups]
    return replace(layout, groups=tuple(groups))
