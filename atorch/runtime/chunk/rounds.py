"""Chunks that processes ask each other for, where each takes a way of its own through the model.

All processes that share a chunk take part in gathering it. Where values decide which modules run (mixtures of experts,
early exits), no process knows what the others need. So they meet in rounds: each says which chunk it wants, each sends
its share to those who want it, and they reduce the gradients that all of them have. Who comes to the end of a pass
joins the rounds of the others until all are there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.distributed.collectives import all_gather_single, meeting_place
from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.data_parallel.collective_order import CollectiveEvent, CollectiveOrder, IssueCollective

MEETS = CollectiveEvent("is within a pass", is_compared=True)


class Rounds:
    """Keeps processes that share chunks in step, by rounds where they take ways of their own.

    Args:
        order: of these processes and those that have copies of the chunks; None where there is nobody else.
    """

    def __init__(self, chunks: ChunkSet, order: CollectiveOrder | None) -> None:
        self._chunks, self.order = chunks, order
        self.are_held = False
        """True if processes take ways of their own; alike on all of them."""
        self.reduce: Callable[[], object] = int
        """Reduces the gradients that are complete on all processes."""

    def follow(self, varies: bool) -> None:
        """A pass begins, in which processes may take ways of their own."""
        self.are_held = varies and self.order is not None

    def come_to(self, step: CollectiveEvent, stand_in: IssueCollective = list) -> None:
        """Return when all processes do `step` next, as `CollectiveOrder` has it; rounds are such an order already."""
        if self.order is None or (self.are_held and not step.is_compared):
            return
        self.drain()
        self.order.come_to(step, stand_in)

    def drain(self) -> None:
        """Return when all processes have come to the end of a pass; help the others until then."""
        while self.are_held and self.meet(is_over=True):
            pass

    def meet(self, chunk: int = -1, buffer: Tensor | None = None, *, is_over: bool = False) -> bool:
        """Fill `buffer` with a chunk, if this process wants one; whether any is still within a pass."""
        assert self.order is not None
        if not self.order.come_to(MEETS, flag=not is_over):
            return False
        group = self._chunks.group
        assert group is not None
        wanted = torch.empty(group.size(), dtype=torch.int64, device=meeting_place())
        all_gather_single(wanted, wanted.new_tensor([chunk]), group=group)
        for rank, each in enumerate(wanted.tolist()):
            if each >= 0:
                mine = self._chunks.chunks[each].compute.to(self._chunks.device)
                parts = list(buffer.chunk(group.size())) if buffer is not None and rank == group.rank() else None
                dist.gather(mine, parts, group=group, group_dst=rank)
        self.reduce()
        return True
