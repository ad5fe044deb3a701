"""Rounds in which processes request chunks from each other, where each may take another path through the model.

All processes that share a chunk take part in gathering it. Where values decide which modules run (mixtures of experts,
early exits), no process knows what the others need. So they meet in rounds. In a round each process announces the
chunk that it wants, all send it their shares, and all reduce the gradients that are complete everywhere. A process at
the end of its pass joins further rounds until all processes are at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from atorch.distributed.collectives import all_gather_single, host_comm_device
from atorch.runtime.chunk.memory import ChunkSet
from atorch.runtime.data_parallel.collective_order import CollectiveEvent, CollectiveOrder, IssueCollective

MEETS = CollectiveEvent("is within a pass", is_compared=True)


class Rounds:
    """Keeps processes that share chunks in step, by rounds if their paths differ.

    Args:
        order: of collectives on these processes and on those with copies of the chunks; None for a single process.
    """

    def __init__(self, chunks: ChunkSet, order: CollectiveOrder | None) -> None:
        self._chunks, self.order = chunks, order
        self.are_held = False
        """True if processes may take different paths; the same on all of them."""
        self.reduce: Callable[[], object] = int
        """Reduces the gradients that are complete on all processes."""

    def follow(self, varies: bool) -> None:
        """Begin a pass, in which the paths of processes differ if it `varies`."""
        self.are_held = varies and self.order is not None

    def announce(self, step: CollectiveEvent, stand_in: IssueCollective = list) -> None:
        """Return when `step` is next on all processes (see `CollectiveOrder`); rounds need no such check."""
        if self.order is None or (self.are_held and not step.is_compared):
            return
        self.drain()
        self.order.announce(step, stand_in)

    def drain(self) -> None:
        """Return when all processes are at the end of the pass; take part in rounds until then."""
        while self.are_held and self.meet(is_over=True):
            pass

    def meet(self, chunk: int = -1, buffer: Tensor | None = None, *, is_over: bool = False) -> bool:
        """Run a round: fill `buffer` with a chunk, if requested. True if any process is still within a pass."""
        assert self.order is not None
        if not self.order.announce(MEETS, flag=not is_over):
            return False
        group = self._chunks.group
        assert group is not None
        wanted = torch.empty(group.size(), dtype=torch.int64, device=host_comm_device())
        all_gather_single(wanted, wanted.new_tensor([chunk]), group=group)
        for rank, index in enumerate(wanted.tolist()):
            if index >= 0:
                share = self._chunks.chunks[index].compute.to(self._chunks.device)
                parts = list(buffer.chunk(group.size())) if buffer is not None and rank == group.rank() else None
                dist.gather(share, parts, group=group, group_dst=rank)
        self.reduce()
        return True
