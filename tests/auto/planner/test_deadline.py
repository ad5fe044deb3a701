"""Work is given up when its time is over, and nothing of it stays."""

import gc
import importlib
import math
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from unittest import mock

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode

from atorch.auto.planner import deadline as deadlines
from atorch.auto.planner.candidate import Feed
from atorch.auto.planner.deadline import Overdue, deadline, running
from atorch.auto.planner.planner import starting_point
from tests.auto.planner.jobs import context
from tests.pool import modes


def forever():
    while True:
        try:
            sum(range(1000))
        except Exception:  # as compilers and libraries do
            continue


def test_python_code_is_interrupted():
    with pytest.raises(Overdue), deadline(0.05):
        forever()


def test_what_waits_for_a_program_is_interrupted_and_the_program_ended():
    with pytest.raises(Overdue), deadline(0.2):
        subprocess.run(["sleep", "600"], check=True)
    assert not [each for each in psutil.Process().children(recursive=True) if each.name() == "sleep"]


def test_programs_of_other_threads_and_those_that_are_queued_are_ended():
    ran, done = [], threading.Event()

    def queue():
        for _ in range(5):
            ran.append(subprocess.run(["sleep", "600"], check=False).returncode)
        done.set()

    thread = threading.Thread(target=queue)
    before = running()
    thread.start()
    with pytest.raises(Overdue), deadline(0.2, before):
        done.wait()
    thread.join()
    assert ran == [-signal.SIGTERM] * 5


def test_programs_that_ran_before_go_on():
    other = subprocess.Popen(["sleep", "600"])
    try:
        with pytest.raises(Overdue), deadline(0.1):
            forever()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_interruption_that_is_swallowed_comes_again(monkeypatch):
    monkeypatch.setattr("atorch.auto.planner.deadline.AGAIN_S", 0.05)
    swallowed = []

    def stubborn():
        try:
            forever()
        except Overdue:
            swallowed.append(True)
        forever()

    with pytest.raises(Overdue), deadline(0.05):
        stubborn()
    assert swallowed


def test_an_import_is_not_torn_apart(tmp_path, monkeypatch):
    """Half a package would stay in `sys.modules`: parts of it that no later import makes attributes of it."""
    (tmp_path / "slowly").mkdir()
    (tmp_path / "slowly" / "__init__.py").write_text("import slowly.part, slowly.rest\n")
    (tmp_path / "slowly" / "part.py").write_text("")
    (tmp_path / "slowly" / "rest.py").write_text("import signal\nsignal.raise_signal(signal.SIGALRM)\n")
    monkeypatch.syspath_prepend(tmp_path)
    imported = []

    def work():
        imported.append(importlib.import_module("slowly"))
        forever()

    with pytest.raises(Overdue), deadline(1000):
        work()
    assert [each.part.__name__ for each in imported] == ["slowly.part"]
    assert imported[0].rest


def test_nor_is_that_of_the_compiler_itself(tmp_path, monkeypatch):
    package = tmp_path / "own" / "torch" / "_dynamo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from . import convert_frame\nfrom . import decorators\n")
    (package / "convert_frame.py").write_text("import signal\nsignal.raise_signal(signal.SIGALRM)\n")
    (package / "decorators.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    imported = []

    def work():
        imported.append(importlib.import_module("own.torch._dynamo"))
        forever()

    with pytest.raises(Overdue), deadline(1000.0):
        work()
    assert imported[0].decorators


def test_what_is_done_in_time_leaves_signals_as_they_were():
    def handler(number, frame):
        """The user's own."""

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 600.0, 30.0)
    try:
        for seconds in (60.0, math.inf):
            with deadline(seconds):
                sum(range(1000))
        with pytest.raises(Overdue), deadline(0.05):
            forever()
        assert signal.getsignal(signal.SIGALRM) is handler
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 500 < left <= 600
        assert interval == 30.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_another_thread_is_interrupted_as_well():
    seen = []

    def work():
        try:
            with deadline(0.05):
                forever()
        except Overdue:
            seen.append("overdue")
        with deadline(60.0):
            seen.append("in time")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == ["overdue", "in time"]


TRACED_LATER = """
import sys, threading
from tests.auto.planner.test_deadline import test_another_thread_is_interrupted_as_well

def traced():
    return sum(1 for _ in range(3))

test_another_thread_is_interrupted_as_well()
sys.settrace(lambda *event: None)
assert traced() == 3
"""


def test_a_debugger_works_after_an_interruption():
    subprocess.run([sys.executable, "-c", TRACED_LATER], check=True, timeout=100)


def test_no_time_at_all():
    ran = []
    with pytest.raises(Overdue), deadline(0.0):
        ran.append(True)
    assert not ran


def torn(rank, size):
    """Traces on fake tensors given up at all moments: torch asks Python for things where no exception may pass."""
    ctx, given_up = context(), 0
    feed = Feed(ctx)
    feed.batches(0, 1)
    started = time.perf_counter()
    starting_point(ctx, feed)
    took = time.perf_counter() - started
    with mock.patch.object(deadlines, "DRAIN_S", 0.0):
        for moment in range(1, 50):
            try:
                with deadline(took * moment / 50, frozenset()):
                    starting_point(ctx, feed)
            except Overdue:
                given_up += 1
    return given_up


def test_operations_that_torch_hands_to_python_come_to_their_end(pool):
    assert pool.run(torn, ranks=1)[0] > 0


class Slow(TorchDispatchMode):
    """Takes its time to be left."""

    def __exit__(self, *fault):
        spin(10)
        super().__exit__(*fault)


class SlowFunctions(TorchFunctionMode):
    def __exit__(self, *fault):
        spin(10)
        super().__exit__(*fault)


def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def leave_fakes():
    """Interrupted, fake tensors would stay on."""
    fakes = FakeTensorMode()
    fakes.__enter__()
    spin(10)


def leave_no_fakes():
    """Interrupted, the outer mode would be off."""
    with torch.no_grad():
        _pop_mode(FakeTensorMode()._mode_key)
        spin(10)


def leave_autocast():
    """Interrupted, later products would be in 16 bits, with casts of weights that are kept for ever."""
    torch.autocast("cpu", torch.float16).__enter__()
    spin(10)


def leave_no_autocast():
    """Interrupted, the outer one would be off."""
    torch.autocast("cpu", enabled=False, cache_enabled=False).__enter__()
    torch.autocast_decrement_nesting()
    torch.autocast_decrement_nesting()
    spin(10)


def leave_hooks():
    """Interrupted, what later passes save would go through them."""
    for _ in range(2):
        torch.autograd.graph.saved_tensors_hooks(str, str).__enter__()
    spin(10)


def leave_no_hooks():
    torch.autograd.graph.saved_tensors_hooks(str, str).__exit__()
    spin(10)


def leave_dtype():
    torch.set_default_dtype(torch.float64)
    spin(10)


@contextmanager
def stale():
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


def leave_suspended():
    """Interrupted, a generator's block ends when nobody holds it, after those around it, whose modes it puts back."""
    with torch.no_grad(), torch.autocast("cpu"):
        inside = stale()
        inside.__enter__()
        spin(10)


AROUND = {
    leave_no_fakes: FakeTensorMode,
    leave_no_autocast: lambda: torch.autocast("cpu", torch.float16),
    leave_no_hooks: lambda: torch.autograd.graph.saved_tensors_hooks(repr, repr),
}
LEFT = [leave_fakes, leave_autocast, leave_hooks, leave_dtype, leave_suspended, *AROUND]


@pytest.mark.parametrize("mode", [Slow, SlowFunctions, *LEFT])
def test_no_mode_stays_on_that_an_interruption_kept_from_being_left(mode, monkeypatch):
    monkeypatch.setattr(deadlines, "DRAIN_S", 0.0)
    with AROUND.get(mode, torch.enable_grad)():
        before = modes()
        with pytest.raises(Overdue), deadline(0.05, frozenset()), mode() or nullcontext():
            pass
        gc.collect()
        assert modes() == before
