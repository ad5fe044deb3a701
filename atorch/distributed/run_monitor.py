"""Watches the loop of a job: all processes stop together, after the same step, when one of them gets a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from atorch.distributed.collectives import all_reduce_max, is_distributed, world_group
from atorch.errors import ArgumentError, shown
from atorch.logs import logger


class RunMonitor(ExitStack):
    """Agrees after each step whether a process got a signal to stop, so that all save and stop after the same step.

        with atorch.RunMonitor() as monitor:
            for step, batch in enumerate(result.dataloader, 1):
                result.step(batch)
                if monitor.should_stop():
                    atorch.save_checkpoint(folder, result, step)
                    break

    Signals are noted from the beginning of the block on, and are handled as before at its end. A noted signal does not
    interrupt the step. End the script as usual then: to torchrun and to Slurm, status 0 is a wanted end.

    Args:
        signals: signals that ask to stop, of any process; () for none.

    Raises:
        ArgumentError: there is no such signal, or it cannot be handled, or not in this thread.
    """

    def __init__(self, signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        super().__init__()
        self._signals, self._got = tuple(signals), 0
        self._is_stopping = False

    def __enter__(self) -> RunMonitor:
        for number in self._signals:
            try:
                before: Any = signal.signal(number, self._note)
            except (ValueError, TypeError, OSError) as error:
                self.close()
                thread = threading.current_thread()
                where = (
                    "" if thread is threading.main_thread() else f" in {thread.name}; the main thread handles signals"
                )
                raise ArgumentError(f"RunMonitor was given the signal {shown(number)}{where} ({error})") from error
            self.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        return self

    def _note(self, number: int, _: object) -> None:
        self._got = number

    def should_stop(self) -> bool:
        """True, on all processes alike, once any of them got one of the signals.

        Collective and cheap, one exchange of two numbers over the hosts: all processes call it equally often, where
        they could save. That is after an optimizer step, or between two batches of an evaluation.
        """
        group = world_group() if is_distributed() else None
        rank = 0 if group is None else group.rank()
        # One number, so that the signal and the rank that are told belong together.
        (told,) = all_reduce_max([(self._got << 32) + rank if self._got else 0], group)
        if told and not self._is_stopping:
            self._is_stopping = True
            name = signal.Signals(told >> 32).name
            logger.warning("rank %d got %s; all processes stop after this step", told & 0xFFFFFFFF, name)
        return self._is_stopping
