"""Runs methods' own watching of the model ahead of simulation, before a world of fakes is there.

Fake tensors have no values to watch. So these methods look at a real copy first, in one process, and what they say
goes with the strategy as a saved one has it. Values do not matter to them: a model on the meta device gets some.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from atorch.auto.context import Context
from atorch.auto.opt_lib.parallel_mode import ParallelMode
from atorch.auto.strategy import Phase, Strategy
from atorch.distributed.rng import preserved_rng
from atorch.distributed.world import World
from atorch.model.alias_guard import Originals
from atorch.model.structure import block_names, shorten, told_of_all
from atorch.model.structure_copy import copy_structure, lazy_copy
from atorch.model.tensors import map_tensors

_HERE = torch.device("cpu")


def foreseen(ctx: Context, strategy: Strategy, batch: Any, repeats: int | None, told_of: int | None = None) -> Strategy:
    """`strategy` with what its methods learn of the context's model, cut to `repeats` blocks, on `batch`.

    told_of: of how many blocks it is told, where the strategy is for more than were looked at.
    """
    mode = strategy.get(ParallelMode)
    if mode is None or not any(each.needs_sample for each in strategy):
        return strategy
    copied = copy_structure(ctx.root, lambda tensor: tensor)
    if repeats is not None:
        shorten(copied, repeats)
    copied = lazy_copy(copied, _HERE)
    world = World(rank=0, size=1, local_rank=0, device=_HERE)
    job = replace(ctx, root=copied, parts=(copied,), world=world, mesh=None, make_loader=None, strategy=strategy)
    job = replace(job, sample_batch=map_tensors(_with_values, batch))
    learnt: dict[str, Any] = {}
    with preserved_rng(), Originals(ctx.root):
        for each in strategy:
            if each.needs_sample:
                learnt.update(each.foresee(job, dict(mode.slices)))
            elif Phase.MESH < each.phase < Phase.TENSOR:
                job = each.apply(job)
    if repeats is not None and told_of is not None:
        learnt = told_of_all(learnt, block_names(ctx.root, repeats), block_names(ctx.root, told_of))
    return replace(strategy, metadata={**strategy.metadata, **learnt})


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one of its shape: whole numbers that any table has, or noise."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype)
