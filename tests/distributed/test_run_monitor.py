"""Signals stop all processes after the same step; one that dies, stops, raises or is slow is named by the others."""

import itertools
import logging
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import atorch
from atorch import RunMonitor
from atorch.errors import ArgumentError
from atorch.logs import logger
from tests.auto.restarting_job import job, losses_of
from tests.auto.training import messages
from tests.pool import GRACE_S, Pool, RankFailure, on_ranks


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
    text = f"rank 1 got {signal.Signals(number).name}; all processes stop after this step"
    assert rank or any(line.endswith(text) for line in told)  # once a job began, rank 0 alone logs it
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
    assert "in the thread a worker's thread (signal only works in main thread" in errors[0]


def stopped(rank: int, size: int, folder: str, strategy: list[object], call: int, number: int) -> list[str]:
    """Losses until a signal in a `call` of the model after the second step, and of the run that resumes.

    The calls are those of a step, whose micro-batches may be several, and of an evaluation after it.
    """
    result, calls = job(strategy), itertools.count(1)
    losses: list[str] = []
    with RunMonitor() as monitor:
        for loss in losses_of(result, 0, 5):
            losses.append(loss)
            if len(losses) == 2 and rank == 1:
                result.model.register_forward_pre_hook(
                    lambda *_: signal.raise_signal(number) if next(calls) == call else None
                )
            if monitor.should_stop() or len(losses) == 3 and stops_evaluation(result, monitor):
                atorch.save_checkpoint(folder, result, len(losses))
                break
    assert len(losses) == 3
    result = job(strategy)
    return losses + list(losses_of(result, atorch.resume_or_start(folder, result), 5))


def stops_evaluation(result: Any, monitor: RunMonitor) -> bool:
    """Evaluate four batches, or until a signal, which the second one gets."""
    result.model.eval()
    with torch.no_grad():
        calls = [result.model(torch.ones(2, 8)) for _ in range(4) if not monitor.should_stop()]
    result.model.train()
    assert len(calls) == 2
    return True


MICRO = ["fsdp", ("micro_batch", {"size": 1})]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("strategy", "call"), [(["ddp"], 1), (["ddp"], 3), (MICRO, 1), (MICRO, 2)],
    ids=["step", "evaluation", "first micro-batch", "second micro-batch"],
)  # fmt: skip
def test_what_is_saved_at_a_signal_goes_on_bit_for_bit(
    pool: Pool, tmp_path: Path, strategy: list[object], call: int, number: int
) -> None:
    whole = pool.run(uninterrupted, strategy)
    assert pool.run(stopped, str(tmp_path), strategy, call, number) == whole


def uninterrupted(rank: int, size: int, strategy: list[object]) -> list[str]:
    return list(losses_of(job(strategy), 0, 5))


def failing(rank: int, size: int, folder: str, place: str, number: int, strategy: str) -> None:
    """Train until rank 1 sends itself a signal in step 3 or in a save before or beside it; write what rank 0 says."""
    result, told = job([STRATEGIES[strategy]]), Path(folder, f"told-{rank}")
    register_at = {
        "forward": result.model.register_forward_pre_hook,
        "backward": result.model.layers[-1].register_full_backward_pre_hook,
        "step": result.optim.register_step_pre_hook,
    }

    def fail(*_: object) -> None:
        Path(folder, "failed").write_text(str(time.time()))
        os.kill(os.getpid(), number)
        time.sleep(60)  # the main thread may have to run first, before a signal stops this one

    handler = logging.FileHandler(told)
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch, RunMonitor(step_timeout=4.0) as monitor:
            for step, _ in enumerate(losses_of(result, 0, 9), 1):
                monitor.should_stop()
                if step == 2 and rank == 1 and place in register_at:
                    register_at[place](fail)
                if step == 1:
                    atorch.save_checkpoint(folder, result, step)
                if step == 2 and place in ("save", "background"):
                    if rank == 1:
                        patch.setattr(os, "fsync", fail)
                    atorch.save_checkpoint(folder, result, step, background=place == "background")
            atorch.wait_for_checkpoint(result)
    except ArgumentError as error:
        told.write_text(str(error))
        raise
    finally:
        logger.removeHandler(handler)


STRATEGIES: dict[str, Any] = {name: name for name in ("ddp", "zero1", "fsdp")} | {
    "chunk": ("chunk", {"budget_bytes": 2**20})
}
PLACES = [("ddp", "forward"), ("ddp", "save"), ("ddp", "background")]
MORE = [(strategy, place) for strategy in STRATEGIES for place in ("forward", "backward", "step", "save")]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("strategy", "place"), PLACES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in PLACES]
)
def test_a_rank_that_dies_or_stops_is_named(pool: Pool, tmp_path: Path, strategy: str, place: str, number: int) -> None:
    with pytest.raises(RankFailure):  # a stopped process never answers
        pool.run(failing, str(tmp_path), place, number, strategy, grace=GRACE_S if number == signal.SIGKILL else 0.5)
    told = (tmp_path / "told-0").read_text()
    after_s = (tmp_path / "told-0").stat().st_mtime - float((tmp_path / "failed").read_text())
    logging.getLogger("measured").warning(f"{place}, {number!r}: {after_s:.1f} s: {told}")
    assert re.search(r"rank 1 on .*, process \d+, does not respond: it has ended or is stopped", told)
    where = "lost a connection in step 3" if number == signal.SIGKILL else r"is in step 3, at \w+.py:\d+ in \w+"
    if place == "background":  # in any step, or in `wait_for_checkpoint`
        where = r"(lost a connection|is) in step \d+"
    assert re.search(f"rank 0 {where}", told)
    assert atorch.resume_or_start(tmp_path, job([])) == 1


@on_ranks(2)
def test_a_step_has_twenty_medians_and_a_minute_at_least(rank: int, size: int) -> None:
    with RunMonitor() as monitor:
        monitor.should_stop()
        assert monitor._watchdog._limit_s == 60.0
        monitor._watchdog._durations_s.extend([7.0] * 9)
        monitor.should_stop()
        assert monitor._watchdog._limit_s == 140.0


@on_ranks(2)
def test_a_long_step_is_told_and_goes_on(rank: int, size: int) -> None:
    """Rank 1 waits until a warning says so."""
    store, told = dist.distributed_c10d._get_default_store(), []
    handler = logging.Handler()
    handler.emit = lambda record: (told.append(record.getMessage()), store.set("told", ""))  # type: ignore[assignment,return-value]
    logger.addHandler(handler)
    with RunMonitor(step_timeout=2.0) as monitor:
        monitor.should_stop()
        if rank == 1:
            store.clone().wait(["told"])
        assert not monitor.should_stop()
    logger.removeHandler(handler)
    for text in told:
        assert re.search(r"no step for \d+ s: rank 0 is in step 2, at test_run_monitor.py:\d+ in all_reduce; ", text)
        assert re.search(r"rank 1 is in step 2, at test_run_monitor.py:\d+$", text)


def failing_alone(rank: int, size: int, number: int | None) -> None:
    """A signal to stop, as torchrun sends it when a process has died, arrives while the others look for it."""
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        with RunMonitor([signal.SIGALRM]) as monitor:
            monitor.should_stop()
            if rank == 1 and number is not None:
                signal.raise_signal(number)
            if rank == 1:
                raise KeyError("a name")
            monitor.should_stop()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("number", [None, signal.SIGKILL], ids=["raises", "killed"])
def test_all_others_name_the_one_that_fails(pool: Pool, number: int | None) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.run(failing_alone, number, ranks=3)
    named = re.findall("MissingRanksError: (ranks? 0, .*?) \\(rank", str(failure.value))
    what = "raised KeyError in step 2: 'a name'" if number is None else "does not respond: it has ended or is stopped"
    for text in named:
        assert re.fullmatch(rf"ranks 0, 2 lost a connection in step 2; rank 1 (on .*, process \d+, )?{what}", text)
    assert len(named) == 2
