"""Lets methods observe the model on real tensors ahead of simulation.

Fake tensors have no values to observe. So these methods observe a real copy first, in one process, and the strategy
carries their metadata as a saved one does. The values may be arbitrary, also for a model on the meta device.
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
from atorch.model.copy import copy_structure, lazy_copy
from atorch.model.pytree import map_tensors
from atorch.model.structure import block_names, shorten, told_of_all

_HERE = torch.device("cpu")


def foreseen(ctx: Context, strategy: Strategy, batch: Any, repeats: int | None, told_of: int | None = None) -> Strategy:
    """`strategy` with the metadata that its methods learn on `batch` from the model, cut to `repeats` blocks.

    told_of: the number of blocks that the metadata is extended to, if that is not `repeats`.
    """
    mode = strategy.get(ParallelMode)
    if mode is None or not any(method.needs_sample for method in strategy):
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
        for method in strategy:
            if method.needs_sample:
                learnt.update(method.foresee(job, dict(mode.slices)))
            elif Phase.MESH < method.phase < Phase.TENSOR:
                job = method.apply(job)
    if repeats is not None and told_of is not None:
        learnt = told_of_all(learnt, block_names(ctx.root, repeats), block_names(ctx.root, told_of))
    return replace(strategy, metadata={**strategy.metadata, **learnt})


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or one of its shape with values: noise, or ones, which are valid indices of any table."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype)
