"""Split regions that draw random numbers, by the state of the generator at their start and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from atorch.distributed.rng import preserved_rng
from atorch.runtime.tensor_parallel.layout import BlockLayout
from atorch.runtime.tensor_parallel.products import Product, SeeProducts
from atorch.runtime.tensor_parallel.random_numbers import random_state
from atorch.runtime.tensor_parallel.recorded import Call, fresh


@torch.no_grad()
def with_draws(block: nn.Module, layout: BlockLayout, call: Call) -> BlockLayout:
    """The layout with `draws` set for each group between whose fork and sum training draws random numbers, or may.

    A call need not reach all groups: an expert may have no token.
    """
    states: dict[str, Tensor] = {}

    def note(product: Product, compute: Callable[[], Tensor]) -> Tensor:
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
