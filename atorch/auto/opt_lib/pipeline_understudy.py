"""In a world of fakes: a copy of the model in one piece, which knows what the stages of other processes would send."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import nn

from atorch.auto.context import Context
from atorch.auto.strategy import Phase, Strategy
from atorch.distributed.collectives import nobody_else
from atorch.profiler.copying import copy_structure
from atorch.runtime.pipeline.route import Route
from atorch.runtime.pipeline.stage import cut
from atorch.runtime.pipeline.understudy import Understudy


def understudy_of(
    ctx: Context, model: nn.Module, units: Iterable[str], route: Route
) -> Callable[[], Understudy | None]:
    """Copies a model that is going to be cut; what it returns gives the understudy, once the stages are built.

    None where other processes are there. To the copy is done what the strategy does to stages.
    """
    if not nobody_else():
        return lambda: None
    whole = copy_structure(model, torch.empty_like)
    named = {name: whole.get_submodule(name) for name in units}
    (part,) = cut(whole, named, route, (0,), (0,), ctx.device)

    def ready() -> Understudy:
        job = replace(ctx, root=part, parts=(part,))
        for each in ctx.strategy or Strategy():
            if each.phase > Phase.SPLIT:
                job = each.apply(job)
        return Understudy(job.parts[0])

    return ready
