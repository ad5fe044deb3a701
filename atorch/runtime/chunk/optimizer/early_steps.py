"""Steps chunks on the host while backward goes on: each as soon as the gradients of all its parameters have come.

The host's step takes as long as backward on a device, or longer. In return a loop may do less between backward and its
step: chunks refuse to be read (`ChunkMemory.need_whole`), and the optimizer's settings must not change. The first step
is not early, so that a trial pass before training changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atorch.errors import ArgumentError
from atorch.runtime.chunk.gradients import GradientSink
from atorch.runtime.chunk.memory import ChunkMemory
from atorch.runtime.chunk.transfer import Wait

Settings = Sequence[dict[str, Any]]


class EarlySteps:
    """A thread that steps chunks.

    Args:
        gradients: reports chunks whose gradients are complete.
        chunks: all chunks.
        optimizer: its settings apply to a step.
        step: steps a chunk with complete gradients; called on the thread.
    """

    def __init__(
        self,
        gradients: GradientSink,
        chunks: Sequence[ChunkMemory],
        optimizer: Optimizer,
        step: Callable[[ChunkMemory], None],
    ) -> None:
        self._chunks, self._optimizer, self._step = chunks, optimizer, step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stepping")
        self._under_way: list[Future[None]] = []
        self._settings: Settings = []
        self._begins = False  # true from the first `end` on: the next backward pass steps early
        gradients.complete = self._complete

    def end(self) -> None:
        """Wait for the steps in backward. Afterwards chunks may be read, and the next pass steps early.

        Raises:
            ArgumentError: the optimizer's settings changed after these steps began.
        """
        self._begins = True
        while self._under_way:
            self._under_way.pop().result()
            if self._settings != _settings(self._optimizer):
                raise ArgumentError(
                    "the optimizer's settings changed between backward and its step, when chunk's step_in_backward had "
                    "stepped by the earlier ones: call the scheduler after optim.step(), or leave out step_in_backward"
                )
        for memory in self._chunks:
            memory.is_stepped = False

    def _complete(self, chunk: int, wait: Wait) -> None:
        if not self._begins:
            return
        memory = self._chunks[chunk]
        memory.follow()
        memory.is_stepped = True
        if not self._under_way:
            self._settings = _settings(self._optimizer)
        self._under_way.append(self._thread.submit(self._work, memory, wait))

    @torch.no_grad()
    def _work(self, memory: ChunkMemory, wait: Wait) -> None:
        wait()
        self._step(memory)


def _settings(optimizer: Optimizer) -> Settings:
    """Settings of all groups, with numbers for tensors, which schedulers change in place."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else value

    return [
        {name: plain(value) for name, value in group.items() if name not in ("params", "fused")}
        for group in optimizer.param_groups
    ]
