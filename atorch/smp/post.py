"""Objects that travel from one process to another, over the hosts, while the sender goes on.

They are pickled, as `torch.distributed` does with objects: both ends are processes of one job, which trust each other.
Tensors in them arrive in host memory, without what their memory is shared with.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from atorch.distributed.arrivals import NoAnswerError, listed
from atorch.distributed.collectives import MEETING
from atorch.errors import ArgumentError
from atorch.logs import OF_THIS_RANK, logger

TAG = 0x534D50  # apart from messages that the script itself sends over the same group


@dataclass
class _Letter:
    """One object on its way: where to, and the transfers, which need their memory until they are done."""

    dest: int
    transfers: list[tuple[dist.Work, torch.Tensor]]

    def is_taken(self) -> bool:
        return all(work.is_completed() for work, _ in self.transfers)

    def wait(self, patience: timedelta | None) -> None:
        for work, _ in self.transfers:
            work.wait() if patience is None else work.wait(patience)


@dataclass(eq=False)
class Post:
    """What this process has sent and nobody has taken yet. Ranks are those of the whole job."""

    _unsent: list[_Letter] = field(default_factory=list)
    _own: deque[Any] = field(default_factory=deque)  # sent to this process by itself

    def send(self, obj: Any, dests: Sequence[int]) -> list[_Letter]:
        """Let `obj` travel to the ranks `dests`, each of which must receive it; the sender does not wait."""
        self._unsent = [letter for letter in self._unsent if not letter.is_taken()]
        alone = on_host(obj)
        others = [rank for rank in dests if rank != _rank()]
        self._own.extend([alone] * (len(dests) - len(others)))
        if not others:
            return []
        content, size = dist.distributed_c10d._object_to_tensor(alone, torch.device("cpu"), dist.group.WORLD)
        letters = [_Letter(rank, [(_isend(part, rank), part) for part in (size, content)]) for rank in others]
        self._unsent += letters
        return letters

    def receive(self, source: int) -> Any:
        """The next object that the rank `source` has sent to this one.

        Raises:
            ArgumentError: it sent none before the group's time-out, or ended; or it is this process, which has sent
                itself none.
        """
        if source == _rank():
            if not self._own:
                raise ArgumentError(
                    "this process waits for an object of its own, and has sent itself none; send it first"
                )
            return self._own.popleft()
        size = torch.zeros(1, dtype=torch.int64)
        waiting = f"rank {_rank()} waits for an object from rank {source}, which has sent none"
        with _told_late(lambda: f"{waiting}; call smp.send or smp.broadcast there"):
            try:
                dist.recv(size, source, tag=TAG)
                content = torch.zeros(int(size), dtype=torch.uint8)
                dist.recv(content, source, tag=TAG)
            except RuntimeError as error:
                raise NoAnswerError(f"{waiting}, or has ended ({_first_line(error)})") from error
        return dist.distributed_c10d._tensor_to_object(content, int(size), dist.group.WORLD)

    def wait_for(self, letters: Sequence[_Letter]) -> None:
        """Wait until all `letters` are taken.

        Raises:
            ArgumentError: one was not before the group's time-out, or its receiver ended; who it is.
        """
        with _told_late(lambda: _untaken(letters)):
            try:
                for letter in letters:
                    letter.wait(None)
            except RuntimeError as error:
                raise NoAnswerError(f"{_untaken(letters)} ({_first_line(error)})") from error

    def deliver(self, patience: timedelta | None = None) -> None:
        """Wait until all that was sent is taken, or for so long; what is not is told."""
        letters, self._unsent = self._unsent, []
        try:
            for letter in letters:
                letter.wait(patience)
        except RuntimeError:  # time is up, or the receiver has ended
            logger.warning("smp.send: %s", _untaken(letters), extra=OF_THIS_RANK)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _isend(part: torch.Tensor, dest: int) -> dist.Work:
    work = dist.isend(part, dest, tag=TAG)
    assert work is not None, "this process is in the group of all"
    return work


def on_host(obj: Any) -> Any:
    """With each tensor's own elements alone: a view's memory may be much larger, and a device is not the receiver's."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu().clone(), obj)


def _untaken(letters: Sequence[_Letter]) -> str:
    ranks = sorted({letter.dest for letter in letters if not letter.is_taken()})
    return (
        f"rank {_rank()} has sent an object that rank{'s' * (len(ranks) > 1)} {listed(ranks)} did not take; call "
        "smp.recv_from there"
    )


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def _told_late(told: Callable[[], str]) -> Iterator[None]:
    """Inside, what is waited for is told once MEETING has passed."""
    timer = threading.Timer(MEETING.total_seconds(), lambda: logger.warning("%s", told(), extra=OF_THIS_RANK))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
