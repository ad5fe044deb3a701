"""Work of this process that is given up when its time is over, wherever it then is.

Compiling a candidate takes as long as it takes, and its first step comes after it. So `deadline` interrupts it: Python
code anywhere, compilers' included, between two operations, and what waits for a process or a thread at once. What does
not return to Python is waited for: one operation, one pass backward. Compilers that were started are ended, too.

An import is waited for as well: of a package that was interrupted in it, parts stay in `sys.modules`, and no later
import mends it, so that the process could never use it again. And so is an operation that torch hands to Python, as on
fake tensors: it asks for a tensor's device or strides where no exception may pass, and would end the process.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import takewhile
from types import FrameType
from typing import Any

import psutil
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

AGAIN_S = 1.0  # an interruption that is swallowed, as in a destructor, is repeated after this
SOON_S = 0.002  # how often it is looked whether what must not be torn apart is through
CASTING = ("cpu", "cuda")  # devices whose autocast has a state of its own
COMPILES = os.path.join("torch", "_dynamo", "convert_frame.py")
CALLED_BY_TORCH = tuple(
    os.path.join("torch", *each) for each in (("_compile.py",), ("_library", "simple_registry.py"))
)  # of an operation on tensors that Python handles, before it gets to __torch_dispatch__
DRAIN_S, LOOK_S = 3.0, 0.02  # how long, and how often, it is looked for compilers that are queued


class Overdue(BaseException):
    """The time is over. No Exception: compilers and libraries catch those, and go on another way."""


def running() -> frozenset[int]:
    """The numbers of the processes that descend from this one."""
    return frozenset(each.pid for each in psutil.Process().children(recursive=True))


@contextmanager
def deadline(seconds: float, before: AbstractSet[int] | None = None) -> Iterator[None]:
    """Inside, raise Overdue once `seconds` have passed; programs that were not `running` `before` are then ended.

    In the main thread by a timer's signal, whose handler and timer are put back; in others by the interpreter, which
    wakes nothing that waits.
    """
    if math.isinf(seconds):
        yield
        return
    if seconds <= 0:
        raise Overdue
    before = running() if before is None else before
    is_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    try:
        with same_modes(), _by_signal(seconds) if is_main else _by_interpreter(seconds):
            yield
    except Overdue:
        _end_programs(before)
        raise


@contextmanager
def same_modes() -> Iterator[None]:
    """torch's modes in this thread are afterwards as they were before.

    What is interrupted when a mode is about to be left leaves it on for ever. Or later: a generator that is suspended
    in a frame of the traceback ends when that is forgotten, and puts back what was on around it.
    """
    modes, outer = _Modes(), sys.exc_info()[1]
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        if error is not outer and not isinstance(error, Exception):  # others leave what they pass as usual
            _end_what_is_suspended(error, outer)
        modes.put_back()


def _end_what_is_suspended(error: BaseException | None, outer: BaseException | None) -> None:
    """Generators, that is, which an interruption holds, or what it came from; those from outside stay."""
    while error is not None and error is not outer:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()  # some are cycles


class _Modes:
    """State of torch for this thread, or for all, that code sets for what is inside of it."""

    def __init__(self) -> None:
        self._gradients, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._autocast = {each: (torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in CASTING}
        self._cache, self._num_autocasts = torch.is_autocast_cache_enabled(), _num_autocasts()
        self._hooks = _saved_tensors_hooks()
        self._dispatch, self._function = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()

    def put_back(self) -> None:
        """Leave those that were entered since, and enter again those that were left."""
        while (now := _get_current_dispatch_mode_stack()) != self._dispatch:
            common = _num_alike(now, self._dispatch)
            if len(now) > common:
                _pop_mode(getattr(now[-1], "_mode_key", None))
            else:
                _push_mode(self._dispatch[common])
        while len(_get_current_function_mode_stack()) > len(self._function):
            _pop_function_mode()
        while (hooks := _saved_tensors_hooks()) not in (None, self._hooks):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if hooks is None and self._hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)
        self._put_autocast_back()
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._gradients)

    def _put_autocast_back(self) -> None:
        for device, (is_on, dtype) in self._autocast.items():
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._cache)
        while (more := _num_autocasts() - self._num_autocasts) != 0:
            torch.autocast_decrement_nesting() if more > 0 else torch.autocast_increment_nesting()
        if self._num_autocasts == 0:
            torch.clear_autocast_cache()  # else a cast that is kept would stand for weights that have moved on


def _num_autocasts() -> int:
    """The number of autocasts around: torch keeps casts until the last is left."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The innermost pair that is handed what is saved for backward passes."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _num_alike(now: Sequence[Any], then: Sequence[Any]) -> int:
    """The length of the common prefix, by identity."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(now, then, strict=False)))


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """`deadline` for what takes errors for an answer: TimeoutError, outside of which nothing is interrupted."""
    try:
        with deadline(seconds):
            yield
    except Overdue:
        raise TimeoutError("the time was over") from None


@contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    is_armed, before_it = True, _num_unbreakable(sys._getframe())

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_armed and _num_unbreakable(frame) > before_it:
            signal.setitimer(signal.ITIMER_REAL, SOON_S, AGAIN_S)
        elif is_armed:
            raise Overdue

    before, started = signal.signal(signal.SIGALRM, interrupt), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - started)), interval)


@contextmanager
def _by_interpreter(seconds: float) -> Iterator[None]:
    thread, done, lock = threading.get_ident(), threading.Event(), threading.Lock()
    before_it, was_raised = _num_unbreakable(sys._getframe()), False

    def interrupt() -> None:
        nonlocal was_raised
        wait = seconds
        while not done.wait(wait):
            wait = SOON_S
            with lock:
                if not done.is_set() and _num_unbreakable(sys._current_frames().get(thread)) <= before_it:
                    was_raised = True
                    _raise_in(thread, Overdue)
                    wait = AGAIN_S

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            done.set()
        if was_raised:
            _take_what_is_on_its_way(thread)


def _num_unbreakable(frame: FrameType | None) -> int:
    """Frames under way that must come to their end: of imports, and what torch calls for an operation's sake.

    Of the latter those outside of a compilation are not looked at: an exception ends that as any other does. Imports
    are, everywhere: the compiler is a package that is imported, too.
    """
    num, is_inside = 0, True
    while frame is not None:
        code = frame.f_code
        is_inside = is_inside and not code.co_filename.endswith(COMPILES)
        if is_inside:
            num += code.co_name == "__torch_dispatch__" or code.co_filename.endswith(CALLED_BY_TORCH)
        num += code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return num


class _Through(BaseException):
    """Takes the place of an interruption that is on its way."""


def _take_what_is_on_its_way(thread: int) -> None:
    """Let nothing more interrupt this thread."""
    # One that is withdrawn, and never taken, leaves CPython 3.11 looking for it for ever: under a later debugger or
    # coverage tool it would not come past the beginning of a function.
    try:
        _raise_in(thread, _Through)
        while True:
            time.sleep(0)
    except _Through:
        return


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _end_programs(before: AbstractSet[int]) -> None:
    """End what was not there before, but for Python itself, until nothing follows: compilers wait in queues.

    They are asked to end, since a compiler then takes half-written files away.
    """
    own, until = psutil.Process(), time.monotonic() + DRAIN_S
    quiet = 0
    while quiet < 5 and time.monotonic() < until:
        found = [each for each in own.children(recursive=True) if each.pid not in before and _is_program(each)]
        for each in found:
            try:
                each.terminate()
            except psutil.NoSuchProcess:  # ended by itself
                continue
        quiet = 0 if found else quiet + 1
        time.sleep(LOOK_S)


def _is_program(process: psutil.Process) -> bool:
    try:
        is_python = os.path.realpath(process.exe()) == os.path.realpath(sys.executable)
        return bool(process.status() != psutil.STATUS_ZOMBIE) and not is_python
    except psutil.Error:
        return False
