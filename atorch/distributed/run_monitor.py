"""Watches the loop of a job: processes stop together when one gets a signal, and name those that die or stall.

    with atorch.RunMonitor() as monitor:
        for step, batch in enumerate(result.dataloader, 1):
            result.step(batch)
            if monitor.should_stop():
                atorch.save_checkpoint(folder, result, step)
                break

Nothing is installed before the block or left behind it: neither handlers of signals nor threads.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Set
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from atorch.distributed.barrier_diagnostics import MissingRanksError, listed
from atorch.distributed.collectives import all_reduce_max, is_distributed, is_fake_world
from atorch.errors import ArgumentError, shown
from atorch.logs import OF_THIS_RANK, logger

POLL_S = 1.0  # between two looks at the store, as those of torch's own watchdog
GRACE_S = 2.0  # for answers, where a connection is lost; for the main thread to raise by itself
STEPS, LEAST_S = 20, 60.0  # a step's time-out, in median steps and at least
LIBRARIES: Set[str] = {"torch", "atorch", *sys.stdlib_module_names}


class RunMonitor(ExitStack):
    """Agrees after each step whether a process got a signal to stop, and names processes that die or stall.

    Signals are noted from the beginning of the block on, and are handled as before at its end. A noted signal does not
    interrupt the step. End the script as usual then: for torchrun and Slurm, status 0 is a regular end.

    If a step takes longer than `step_timeout`, the processes report where they are. If one does not respond, the others
    log an error that names it, and end with status 1. If all respond, a warning says where they are. If a connection
    breaks, the block raises an ArgumentError with the same facts.

    Args:
        signals: signals that ask to stop, of any process; () for none.
        step_timeout: seconds from one `should_stop` to the next; None for 20 median steps and at least 60 s, inf for no
            limit. Before the first `should_stop` there is none.

    Raises:
        ArgumentError: there is no such signal, or it cannot be handled, or not in this thread; or `step_timeout` is not
            above 0.
    """

    def __init__(
        self, signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1), *, step_timeout: float | None = None
    ) -> None:
        super().__init__()
        if step_timeout is not None and not step_timeout > 0:
            raise ArgumentError(f"RunMonitor was given step_timeout={step_timeout!r}; it is in seconds, above 0")
        self._signals, self._got, self._is_stopping, self._timeout_s = tuple(signals), 0, False, step_timeout
        self._watchdog: _Watchdog | None = None

    def __enter__(self) -> RunMonitor:
        for number in self._signals:
            try:
                before: Any = signal.signal(number, self._note)
            except (ValueError, TypeError, OSError) as error:
                self.close()
                thread = threading.current_thread().name
                raise ArgumentError(
                    f"RunMonitor was given the signal {shown(number)} in the thread {thread} ({error}); give signals "
                    "that can be handled, in the main thread, or none: signals=()"
                ) from error
            self.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        # It is the first to end: torchrun sends SIGTERM when a process has died, which must not cut the report short.
        if is_distributed() and not is_fake_world():
            self._watchdog = _Watchdog(self._timeout_s)
            self.push(self._watchdog.close)
        return self

    def _note(self, number: int, _: object) -> None:
        self._got = number

    def should_stop(self) -> bool:
        """True, on all processes alike, once any of them got one of the signals.

        Collective and cheap, one exchange of a number over the hosts: all processes call it equally often, where
        they could save. That is after an optimizer step, or between two batches of an evaluation.
        """
        rank = dist.get_rank() if is_distributed() else 0
        # One number, so that the signal and the rank that are told belong together.
        (signal_and_rank,) = all_reduce_max([(self._got << 32) + rank if self._got else 0])
        if self._watchdog is not None:
            self._watchdog.step()
        if signal_and_rank and not self._is_stopping:
            self._is_stopping = True
            name = signal.Signals(signal_and_rank >> 32).name
            logger.warning("rank %d got %s; all processes stop after this step", signal_and_rank & 0xFFFFFFFF, name)
        return self._is_stopping


class _Watchdog:
    """Asks all processes where they are, and answers for this one from a thread: that of a dead process does not.

    Where nobody asks, it writes nothing to the job's store, and reads one number from it each POLL_S.
    """

    def __init__(self, timeout_s: float | None) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]  # public, but not re-exported in annotations
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        number = store.add(f"atorch/monitor/{self._rank}", 1)  # of this block among those of the process
        # A connection of its own: a wait of the main thread keeps others from using the same one.
        self._store = prefixed(f"atorch/monitor/{number}", store.clone())
        self._timeout_s, self._limit_s, self._durations_s = timeout_s, math.inf, deque[float](maxlen=100)
        self._num_steps, self._num_answered, self._num_warnings = 0, 0, 0
        self._began, self._next = time.monotonic(), math.inf
        self._main, self._done = threading.get_ident(), threading.Event()
        self._answer(0, f"on {socket.gethostname()}, process {os.getpid()},")
        self._thread = threading.Thread(target=self._run, name="atorch-watchdog", daemon=True)
        self._thread.start()

    def step(self) -> None:
        now = time.monotonic()
        self._durations_s.append(now - self._began)
        self._began, self._num_steps, self._num_warnings = now, self._num_steps + 1, 0
        self._limit_s = self._timeout_s or max(LEAST_S, STEPS * median(self._durations_s))
        self._next = now + 0.75 * self._limit_s  # the answers have the rest of the time

    def close(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """End, and let the others know how; of an error between processes, raise one that says where they were."""
        self._done.set()
        self._thread.join()
        is_lost = isinstance(error, (dist.DistError, MissingRanksError)) or "gloo" in str(error)
        what = "lost a connection" if is_lost else "left the loop" if kind is None else f"raised {kind.__name__}"
        message = f"{what} in step {self._num_steps + 1}"
        try:
            has_failed = isinstance(error, Exception) and not is_lost
            self._answer(sys.maxsize, f"{message}: {error}" if has_failed else message, has_failed)
            if is_lost:
                message = self._verdict() or self._ask(GRACE_S)[0]
        except RuntimeError:
            message = f"{message}, and the process that holds the job's store has ended"
        if is_lost:
            raise MissingRanksError(f"{message} ({str(error).splitlines()[0]})") from error

    def _run(self) -> None:
        try:
            while not self._done.wait(POLL_S):
                if (verdict := self._verdict()) and not self._done.wait(GRACE_S):  # its main thread may raise by itself
                    self._end(verdict)
                asked, num_steps = self._store.add("asked", 0), self._num_steps
                if asked > self._num_answered:
                    self._answer(asked, self._place())
                    self._next = max(self._next, time.monotonic() + self._limit_s)
                elif time.monotonic() > self._next:
                    text, is_failure = self._ask(max(0.25 * self._limit_s, 2 * POLL_S))
                    if self._done.is_set() or self._num_steps != num_steps:
                        continue
                    if is_failure:
                        self._store.set("verdict", text)
                        self._end(text)
                    logger.warning("no step for %.0f s: %s", time.monotonic() - self._began, text, extra=OF_THIS_RANK)
                    self._num_warnings += 1
                    self._next = time.monotonic() + self._limit_s * 2**self._num_warnings
        except RuntimeError:  # the process that holds the store has ended
            return

    def _end(self, text: str) -> None:
        """End this process, whose main thread may wait for the others for good."""
        logger.error("%s. This process ends", text, extra=OF_THIS_RANK)
        os._exit(1)

    def _verdict(self) -> str:
        """Text of the failure that another process found; empty if there is none."""
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else ""

    def _answer(self, number: int, text: str, has_failed: bool = False) -> None:
        self._num_answered = number
        self._store.set(str(self._rank), json.dumps([number, has_failed, text]))

    def _place(self) -> str:
        """The step, and the place in the user's code and the innermost function that the main thread is in."""
        frame, inner = sys._current_frames().get(self._main), ""
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
            inner, frame = inner or f" in {frame.f_code.co_name}", frame.f_back
        code = "" if frame is None else f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return f"is in step {self._num_steps + 1}{code}{inner}"

    def _ask(self, grace_s: float) -> tuple[str, bool]:
        """Text that says where all processes are; and True if one failed, or did not answer within `grace_s`."""
        number, end = self._store.add("asked", 1), time.monotonic() + grace_s
        if self._num_answered < number:
            self._answer(number, self._place())
        while True:
            came = [rank for rank in range(self._size) if self._store.check([str(rank)])]
            answers = dict(zip(came, map(json.loads, self._store.multi_get(list(map(str, came)))), strict=True))
            silent = [rank for rank in range(self._size) if answers.get(rank, (-1,))[0] < number]
            if not silent or time.monotonic() > end:
                break
            time.sleep(POLL_S / 10)
        places: dict[str, list[int]] = {}
        for rank in range(self._size):
            _, _, place = answers.get(rank, (-1, False, "before the loop"))
            end_of = " does not respond: it has ended or is stopped" if rank in silent else ""
            places.setdefault(f"{place}{end_of}", []).append(rank)
        places_text = [f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} {place}" for place, ranks in places.items()]
        return "; ".join(places_text), bool(silent) or any(has_failed for _, has_failed, _ in answers.values())
