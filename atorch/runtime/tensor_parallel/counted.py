"""Work that each group of a block spares a rank, and what all send for it: counted while the whole block computes.

Sent are the sum after a row split, in forward, and the sum of gradients at each fork, in backward. Sums of gradients of
parameters that ranks share are left out: they do not grow with the batch, and watched batches are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from atorch.runtime.tensor_parallel.apply import place_of
from atorch.runtime.tensor_parallel.layout import BlockLayout, Group, Rows
from atorch.runtime.tensor_parallel.products import Product, SeeProducts
from atorch.runtime.tensor_parallel.recorded import Call, fresh, tensors_of


class Counted(NamedTuple):
    """Counts of one group, on one call of the block."""

    spared_work: float
    """Multiplications and additions of products that each rank is spared in forward."""
    sent: float
    """Elements of the collectives of forward and backward."""


def counted(block: nn.Module, layout: BlockLayout, call: Call) -> dict[str, Counted]:
    """The counts of each group, by its row; groups may overlap."""
    work: dict[str, float] = {}
    sent = {group.row: _Sent() for group in layout.groups}

    def note(product: Product, compute: Callable[[], Tensor]) -> Tensor:
        result = compute()
        work[product.weight] = work.get(product.weight, 0.0) + 2.0 * result.numel() * product.input.shape[-1]
        return result

    handles = [handle for group in layout.groups for handle in _watch(block, group, sent[group.row])]
    try:
        (args, kwargs), _ = fresh(call)
        with torch.enable_grad(), SeeProducts(dict(block.named_parameters()), note):
            block(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    parameters = dict(block.named_parameters())
    return {
        group.row: Counted(_spared(group, parameters, work), sum(tensor.numel() for tensor in sent[group.row].tensors))
        for group in layout.groups
    }


def spared_share(rows: Rows, size: int) -> float:
    """The share of `size` rows that every rank is spared at least."""
    return 1 - max(rows.count(rank) for rank in range(len(rows.by_rank))) / size


def _spared(group: Group, parameters: Mapping[str, nn.Parameter], work: Mapping[str, float]) -> float:
    rows = {**group.columns, group.row: group.row_part}
    return sum(work[name] * spared_share(part, parameters[name].shape[part.dim]) for name, part in rows.items())


class _Sent:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def summed(self, module: nn.Module, args: Any, output: Any) -> None:
        self.tensors += tensors_of(output)[:1]

    def forked(self) -> Callable[..., None]:
        """A hook that notes what the modules of one fork are called with, each tensor once."""
        own: list[Tensor] = []

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tensors_of((args, kwargs)):
                if tensor.requires_grad and all(tensor is not other for other in own):
                    own.append(tensor)
                    self.tensors.append(tensor)

        return hook


def _watch(block: nn.Module, group: Group, sent: _Sent) -> list[Any]:
    handles = [place_of(block, group.row)[0].register_forward_hook(sent.summed)]
    for names in group.forks:
        hook = sent.forked()
        modules = dict.fromkeys(place_of(block, name)[0] for name in names)
        handles += [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    return handles
