"""Asynchronous object messages from one process to another, through host memory.

They are pickled, as `torch.distributed` does with objects: both ends are processes of one job and trust each other.
Tensors in them arrive in host memory, without the rest of a shared storage.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from atorch.distributed.barrier_diagnostics import NoAnswerError, listed
from atorch.distributed.collectives import is_distributed, warn_after
from atorch.errors import ArgumentError
from atorch.logs import OF_THIS_RANK, logger

TAG = 0x534D50  # distinct from the tags of the script's own messages in the group


@dataclass(frozen=True, eq=False)
class Message:
    """An object on its way to one rank, its sequence number, and its transfers, which hold their buffers."""

    dest: int
    number: int
    transfers: tuple[tuple[Any, torch.Tensor], ...]


class Messages:
    """Messages of this process that were not received yet. Ranks are global.

    gloo reports the end of a transfer only to a waiter, and a wait that times out breaks all connections. So each
    receiver counts its received messages in the job's store.
    """

    def __init__(self) -> None:
        self._sent: list[Message] = []
        self._num_sent: Counter[int] = Counter()  # by destination
        self._own: deque[Any] = deque()  # messages to this process itself
        # All processes open and close sessions together, so they agree on this number.
        begun = _store().add(f"atorch/smp/begun/{dist.get_rank()}", 1) if is_distributed() else 0
        self._place = f"atorch/smp/taken/{begun}"

    def send(self, obj: Any, dests: Sequence[int]) -> None:
        """Send `obj` to the ranks `dests`, each of which must receive it, without waiting."""
        self._sent = self.untaken(self._sent)
        self._sent += self._begin(obj, dests)

    def send_and_wait(self, obj: Any, dests: Sequence[int]) -> None:
        """Send `obj`, and wait until each rank has received it.

        Raises:
            ArgumentError: some ranks did not before the group's time-out, or ended; the error lists them.
        """
        messages = self._begin(obj, dests)
        with warn_after(lambda: self._told(messages)):
            try:
                for message in messages:
                    for work, _ in message.transfers:
                        work.wait()
            except RuntimeError as error:
                raise NoAnswerError(f"{self._told(messages)} ({_first_line(error)})") from error

    def receive(self, source: int) -> Any:
        """Receive the next object from the rank `source`.

        Raises:
            ArgumentError: it sent none before the group's time-out, or ended; or it is this process, which has sent
                itself nothing.
        """
        if source == _rank():
            if not self._own:
                raise ArgumentError("this process has sent itself no object that it could receive; send it first")
            return self._own.popleft()
        size = torch.zeros(1, dtype=torch.int64)
        waiting = f"rank {_rank()} waits for an object from rank {source}, which has sent none"
        with warn_after(lambda: f"{waiting}; call smp.send or smp.broadcast there"):
            try:
                dist.recv(size, source, tag=TAG)
                content = torch.zeros(int(size), dtype=torch.uint8)
                dist.recv(content, source, tag=TAG)
            except RuntimeError as error:
                raise NoAnswerError(f"{waiting}, or has ended ({_first_line(error)})") from error
        _store().add(f"{self._place}/{source}/{_rank()}", 1)
        return dist.distributed_c10d._tensor_to_object(content, int(size), dist.group.WORLD)

    def deliver(self, patience: timedelta) -> None:
        """Wait until all sent messages are received, at most for `patience`; log the ones that are not."""
        end = time.monotonic() + patience.total_seconds()
        try:
            while (pending := self.untaken(self._sent)) and time.monotonic() < end:
                time.sleep(0.02)
            if pending:
                logger.warning("smp.send: %s", self._told(pending), extra=OF_THIS_RANK)
        except RuntimeError:  # the process that held the store has ended, and the job with it
            logger.warning("smp.send: the job has ended before all that was sent was received", extra=OF_THIS_RANK)
        self._sent = []

    def untaken(self, messages: Sequence[Message]) -> list[Message]:
        """The messages that have not been received."""
        dests = {message.dest for message in messages}
        num_taken = {dest: _store().add(f"{self._place}/{_rank()}/{dest}", 0) for dest in dests}
        return [message for message in messages if message.number > num_taken[message.dest]]

    def _begin(self, obj: Any, dests: Sequence[int]) -> list[Message]:
        copied = on_host(obj)
        others = [rank for rank in dests if rank != _rank()]
        self._own.extend([copied] * (len(dests) - len(others)))
        if not others:
            return []
        content, size = dist.distributed_c10d._object_to_tensor(copied, torch.device("cpu"), dist.group.WORLD)
        self._num_sent.update(others)
        messages = []
        for rank in others:
            transfers = tuple((dist.isend(part, rank, tag=TAG), part) for part in (size, content))
            messages.append(Message(rank, self._num_sent[rank], transfers))
        return messages

    def _told(self, messages: Sequence[Message]) -> str:
        ranks = sorted({message.dest for message in self.untaken(messages)})
        some = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
        return f"rank {_rank()} has sent an object that {some} did not take; call smp.recv_from there"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def on_host(obj: Any) -> Any:
    """Copy each tensor's own elements to the host: a view's storage may be much larger, and the device is local."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), obj)


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
