"""Tells the profiler what an engine's chunks do, in PatrickStar's words.

A PARAM_FP16 chunk is the parameters that operations see; on the host its gradient lies beside it. PARAM_FP32, MOMENTUM
and VARIANCE are what the optimizer has, for every chunk that is trained.
"""

from __future__ import annotations

import torch

from atorch.patrickstar.profile import Tier
from atorch.patrickstar.profiler import profiler
from atorch.runtime.chunk.memory import ChunkMemory
from atorch.runtime.chunk.operations import Operations


class Recorder:
    """The observer of a `Residency`."""

    def __init__(self, operations: Operations) -> None:
        self._residency = operations.residency
        self._device = operations.chunks.device
        profiler.works_on(str(self._device), self._residency.tier.budget_bytes)
        for memory in operations.chunks.chunks:
            _place(memory, "GPU" if memory.tier is operations.chunks.device_tier else "CPU")
        self._residency.observer = self

    def moved(self, chunk: int, on_device: bool, num_bytes: int) -> None:
        profiler.holds("PARAM_FP16", chunk, "GPU", num_bytes if on_device else 0)
        profiler.moment(self._device_bytes())

    def phase(self, name: str) -> None:
        profiler.moment(self._device_bytes())
        profiler.phase(name)

    def _device_bytes(self) -> int:
        """Bytes that the device holds in all: as its allocator knows, or as it was foreseen."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return self._residency.tier.used_bytes + self._residency.course.other_bytes


def _place(memory: ChunkMemory, tier: Tier) -> None:
    """Tell the profiler where a chunk is between steps."""
    index, compute, trainable = memory.spec.index, memory.compute, memory.spec.trainable
    profiler.holds("PARAM_FP16", index, tier, compute.nbytes * (2 if trainable else 1))
    if trainable:
        for kind in ("PARAM_FP32", "MOMENTUM", "VARIANCE"):
            profiler.holds(kind, index, tier, memory.master.nbytes)
