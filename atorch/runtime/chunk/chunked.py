"""A model whose parameters, gradients and optimizer states live in chunks, under a budget of device memory.

PatrickStar's idea (Fang et al., arXiv 2108.05818): what is not used now waits on the host. Here the whole pass is
known before the first one (`trace`), so that what moves when is scheduled beforehand, and the verdict comes before
anything is moved: it fits, or by how many bytes it does not, and in which operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from atorch.errors import OutOfBudgetError
from atorch.runtime.chunk.course import Access, Course, moments
from atorch.runtime.chunk.layout import Item, Layout, search
from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.chunk.operations import Operations
from atorch.runtime.chunk.residency import Residency
from atorch.runtime.chunk.schedule import Schedule, Shortfall, schedule
from atorch.runtime.chunk.transfer import Transfer, transfer_for
from atorch.runtime.override import override
from atorch.units import format_bytes

TRANSFER_BYTES = 64 * 1024  # what a link could have moved in the time that starting one more transfer takes


def chunk(
    model: nn.Module,
    accesses: Sequence[Access],
    budget_bytes: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    values: Any = None,
    prefetch: int = 1,
    transfer: Transfer | None = None,
) -> Operations:
    """Put the model's parameters into chunks, in place.

    Args:
        accesses: a pass of training, from `trace`.
        budget_bytes: of the device, for chunks and everything else that lives in forward and backward passes.
        dtype: of floating-point parameters as operations see them; None for their own.
        values: what parameters were before they were rounded to 16 bits, by parameter.
        prefetch: chunks that may be on their way before they are needed.

    Raises:
        OutOfBudgetError: no order of fetching keeps the budget; the model is as it was.
    """
    parameters = dict(model.named_parameters())
    layout, course = planned(parameters, accesses, budget_bytes, dtype=dtype, prefetch=prefetch)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    managed = {name: parameters[name] for name in layout.chunk_of}
    chunks = ChunkSet(layout, managed, dtype=dtype, values=values, device=device)
    operations = Operations(chunks, Residency(chunks, managed, budget_bytes, course, transfer or transfer_for(device)))
    for name, parameter in managed.items():
        operations.adopt(name, parameter)
    override(model, "forward", _in_a_pass, operations)
    return operations


def planned(
    parameters: Mapping[str, nn.Parameter],
    accesses: Sequence[Access],
    budget_bytes: int,
    *,
    dtype: torch.dtype | None,
    prefetch: int,
) -> tuple[Layout, Course]:
    """The layout that fetches least, and the course of a pass.

    Raises:
        OutOfBudgetError: none keeps the budget.
    """
    items = _by_first_use(parameters, accesses, dtype)

    def scheduled(layout: Layout) -> Schedule | Shortfall:
        return schedule(moments(accesses, layout.chunk_of), _sizes(layout), budget_bytes, prefetch=prefetch)

    def cost(layout: Layout) -> float | None:
        found = scheduled(layout)
        return None if isinstance(found, Shortfall) else found.fetched_bytes + TRANSFER_BYTES * found.num_fetches

    layout = search(items, cost)
    found = scheduled(layout)
    if isinstance(found, Shortfall):
        moment = found.moment
        raise OutOfBudgetError(
            f"the budget is {format_bytes(budget_bytes)}, and {moment.name} misses {found.missing_bytes:,} bytes: "
            f"beside its parameters, {format_bytes(moment.other_bytes)} of activations and workspace live then. Raise "
            "the budget by as many, make activations smaller (checkpoint, micro_batch), or split the operation "
            "(tensor_parallel)"
        )
    return layout, Course(moments(accesses, layout.chunk_of), found)


def _by_first_use(
    parameters: Mapping[str, nn.Parameter], accesses: Sequence[Access], dtype: torch.dtype | None
) -> list[Item]:
    """Parameters in order of their first use, those that nothing uses last."""
    used = dict.fromkeys(name for access in accesses for name in sorted(access.parameters))
    names = [*used, *(name for name in parameters if name not in used)]
    return [
        Item(
            name,
            parameters[name].numel(),
            str(dtype if dtype is not None and parameters[name].is_floating_point() else parameters[name].dtype),
            parameters[name].requires_grad,
        )
        for name in names
    ]


def _sizes(layout: Layout) -> list[int]:
    return [chunk.numel * _itemsize(chunk.dtype) for chunk in layout.chunks]


def _itemsize(dtype: str) -> int:
    named: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    return named.itemsize


def _in_a_pass(forward: Callable[..., Any], operations: Operations) -> Callable[..., Any]:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with operations.forward():
            return forward(self, *args, **kwargs)

    return run
