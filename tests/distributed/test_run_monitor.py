"""A signal on any process stops all of them after the same step."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import atorch
from atorch import RunMonitor
from atorch.errors import ArgumentError
from tests.auto.restarting_job import job, losses_of
from tests.auto.training import messages
from tests.pool import Pool, on_ranks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@on_ranks(2)
def test_a_signal_on_one_rank_stops_all_after_the_same_step(rank: int, size: int, number: int) -> None:
    """As does one in an evaluation, whose batches are as many on each rank."""
    before = signal.getsignal(number)
    with messages() as told, RunMonitor() as monitor:
        assert not monitor.should_stop()
        if rank == 1:
            os.kill(os.getpid(), number)
        assert monitor.should_stop()
        assert monitor.should_stop()
    assert told == [f"rank 1 got {signal.Signals(number).name}; all processes stop after this step"]
    assert signal.getsignal(number) is before


def test_signals_are_handled_as_before_also_after_an_error() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with suppress(KeyError), RunMonitor([signal.SIGUSR1]):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            raise KeyError
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_that_cannot_be_handled() -> None:
    with (
        pytest.raises(ArgumentError, match="given the signal .*SIGKILL.*Invalid argument"),
        RunMonitor([15, signal.SIGKILL]),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    errors: list[str] = []

    def enter() -> None:
        with pytest.raises(ArgumentError) as error, RunMonitor():
            pass
        errors.append(str(error.value))

    thread = threading.Thread(target=enter, name="a worker's thread")
    thread.start()
    thread.join()
    assert "in a worker's thread; the main thread handles signals" in errors[0]


def stopped(rank: int, size: int, folder: str, strategy: list[object]) -> list[str]:
    """Losses until a signal, which arrives within the third step, and of the run that resumes."""
    result = job(strategy)
    losses: list[str] = []
    with RunMonitor() as monitor:
        for loss in losses_of(result, 0, 5):
            losses.append(loss)
            if len(losses) == 2 and rank == 0:
                result.model.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGTERM))
            if monitor.should_stop():
                atorch.save_checkpoint(folder, result, len(losses))
                break
    assert len(losses) == 3
    result = job(strategy)
    return losses + list(losses_of(result, atorch.resume_or_start(folder, result), 5))


@pytest.mark.parametrize("strategy", [["ddp"], ["fsdp", ("micro_batch", {"size": 1})]], ids=["ddp", "micro-batches"])
def test_what_is_saved_at_a_signal_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, strategy: list[object]) -> None:
    whole = pool.run(uninterrupted, strategy)
    assert pool.run(stopped, str(tmp_path), strategy) == whole


def uninterrupted(rank: int, size: int, strategy: list[object]) -> list[str]:
    return list(losses_of(job(strategy), 0, 5))
