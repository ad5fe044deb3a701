"""A run that was saved goes on under any strategy, on any number of processes, as the uninterrupted one.

A pair's states are equal bit for bit: parameters, and both moments of Adam. On the same processes so are the next
losses; elsewhere they are equal up to rounding.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import atorch
from atorch.checkpoint import files
from atorch.checkpoint.shard_file import write_shard
from tests.auto.checkpointing import (
    FOUR,
    RANKS,
    SCRIPTS,
    STEPS,
    STRATEGIES,
    Script,
    batches,
    end,
    in_file,
    job,
    losses,
    savable,
)
from tests.pool import Pool


def save(rank: int, size: int, folder: str, model: str, strategy: str, options: Any) -> tuple[list[float], list[float]]:
    """Train, save, and go on: the losses before and after."""
    result = job(model, strategy, **options)
    loop = batches(result)
    before = [float(result.step(next(loop))) for _ in range(STEPS)]
    atorch.save_checkpoint(folder, savable(result), STEPS)
    after = [float(result.step(next(loop))) for _ in range(STEPS)]
    end(result)
    return before, after


def go_on(
    rank: int, size: int, folder: str, model: str, strategy: str, again: str, options: Any, skips: bool
) -> list[float]:
    """Load, save what was loaded, and go on: the losses."""
    torch.manual_seed(rank)
    result = job(model, strategy, **options)
    if isinstance(result, Script):
        losses(result, 1)  # its model is divided in the first step
        result.at = STEPS
    for parameter in result.model.parameters():  # nothing of the start is left
        if not hasattr(parameter, "home"):
            torch.nn.init.zeros_(parameter.to_local() if hasattr(parameter, "to_local") else parameter)
    resumed = atorch.load_checkpoint(folder, savable(result))
    assert resumed.step == STEPS
    atorch.save_checkpoint(again, savable(result), STEPS)
    # A checkpoint of a script has no position of a loader.
    after = losses(result, STEPS, skipped=STEPS if skips and not isinstance(result, Script) else 0)
    end(result)
    return after


def check(pool: Pool, tmp_path: Path, model: str, origin: str, target: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = {} if {origin, target}.isdisjoint(SCRIPTS) else {"shuffle": False}
    saved = pool.run(save, str(first), model, origin, options, ranks=RANKS[origin])
    more = (str(second), options, origin in SCRIPTS)
    found = pool.run(go_on, str(first), model, target, *more, ranks=RANKS[target])
    one, other = in_file(first), in_file(second)
    names = one.keys() | other.keys()
    assert {name for name in names if name not in one or name not in other} <= tied(names)
    for name in one.keys() & other.keys():
        assert torch.equal(one[name], other[name].to(one[name].dtype)), name
    means = [sum(by_rank) / len(by_rank) for by_rank in zip(*(after for _, after in saved), strict=True)]
    got = [sum(by_rank) / len(by_rank) for by_rank in zip(*found, strict=True)]
    if origin == target:
        assert got == means
    else:
        is_half = "half" in origin or "half" in target
        assert got == pytest.approx(means, rel=2e-2 if is_half else 1e-4)


def tied(names: Any) -> set[str]:
    """A pipeline's last stage has a tied head under a name of its own."""
    return {name for name in names if "lm_head" in name}


ALL = [*STRATEGIES, "smp"]
# Files have no trace of the strategy that wrote them: each is origin and target three times.
FEW = {(ALL[at], ALL[(at + shift) % len(ALL)]) for at in range(len(ALL)) for shift in (2, 5, 9)}
QUICK = [
    ("fsdp", "plain"), ("plain", "zero1"), ("tensor x fsdp", "chunk 2"), ("chunk 2", "pipeline"),
    ("plain", "smp tensor"), ("ddp", "smp"), ("smp", "patrickstar in half 2"),
]  # fmt: skip
BESIDE_SCRIPTS = ("plain", "tensor x fsdp", "pipeline", "chunk 2", "half x fsdp")


def slow(origin: str, target: str, model: str) -> Any:
    return pytest.param(origin, target, model, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("origin", "target", "model"),
    [
        ("zero1", "zero1", "gpt2 with dropout"),
        *((*pair, "gpt2") for pair in QUICK),
        *(
            slow(*pair, model) if pair in FEW else pytest.param(*pair, model, marks=pytest.mark.nightly)
            for pair in itertools.product(ALL, ALL)
            for model in ("gpt2", "llama")
        ),
        *(slow(script, script, "gpt2 with dropout") for script in SCRIPTS),
        *(slow(*pair, "llama") for pair in itertools.product(SCRIPTS, BESIDE_SCRIPTS)),
        *(slow(*pair, "gpt2") for pair in itertools.product(BESIDE_SCRIPTS, SCRIPTS)),
        *(slow("interleaved", each, FOUR) for each in ("interleaved", "plain", "pipeline", "zero1")),
        *(slow(each, "interleaved", FOUR) for each in ("plain", "pipeline", "tensor x fsdp", "fsdp 4")),
    ],
)
def test_a_run_goes_on(pool: Pool, tmp_path: Path, origin: str, target: str, model: str) -> None:
    check(pool, tmp_path, model, origin, target)


MOMENTS = (3, 8, 11)  # within an epoch, at its end, within the next


def read_by(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}


def losses_after_each_moment(
    rank: int, size: int, folder: str, strategy: str, workers: int
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """The losses of the steps after each moment, without an interruption and resumed."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # a loader has children
    result = job("gpt2 with dropout", strategy, **read_by(workers))
    loop, all_losses = batches(result), []
    for step in range(1, MOMENTS[-1] + STEPS + 1):
        all_losses.append(float(result.step(next(loop))))
        if step in MOMENTS:
            atorch.save_checkpoint(folder, result, step)
    expected = {step: all_losses[step : step + STEPS] for step in MOMENTS}
    resumed = {}
    for step in MOMENTS:
        result = job("gpt2 with dropout", strategy, **read_by(workers))
        atorch.load_checkpoint(folder, result, step)
        resumed[step] = losses(result, STEPS, first_epoch=step // 8)
    return expected, resumed


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        pytest.param(name, num, marks=pytest.mark.slow if num == 0 or name == "fsdp" else pytest.mark.nightly)
        for name in STRATEGIES
        for num in (0, 2)
    ],
)
def test_a_run_goes_on_bit_for_bit(pool: Pool, tmp_path: Path, strategy: str, workers: int) -> None:
    ranks = STRATEGIES[strategy][0]
    for expected, resumed in pool.run(losses_after_each_moment, str(tmp_path), strategy, workers, ranks=ranks):
        assert resumed == expected


def go_on_at_once(rank: int, size: int, folder: str, strategy: str) -> list[float]:
    result = job("gpt2", strategy)
    result.at = STEPS
    atorch.load_checkpoint(folder, result.model)
    after = losses(result, STEPS)
    result.end()
    return after


@pytest.mark.parametrize("strategy", ["smp", "patrickstar in half 2"])
def test_a_script_loads_before_its_first_step(pool: Pool, tmp_path: Path, strategy: str) -> None:
    saved = pool.run(save, str(tmp_path), "gpt2", strategy, {})
    assert pool.run(go_on_at_once, str(tmp_path), strategy) == [after for _, after in saved]


def in_background(rank: int, size: int, folder: str, strategy: str) -> None:
    """Save three times; the next step is taken while the thread waits with its file."""
    result, taken = job("gpt2", strategy), threading.Event()
    loop = batches(result)

    def late(*args: Any) -> Any:
        assert taken.wait(60)
        return write_shard(*args)

    with mock.patch.object(files, "write_shard", late):
        for step in range(1, 4):
            result.step(next(loop))
            taken.clear()
            atorch.save_checkpoint(f"{folder}/beside", result, step, background=True)
            result.step(next(loop))
            taken.set()
    atorch.wait_for_checkpoint(result)


def in_foreground(rank: int, size: int, folder: str, strategy: str) -> None:
    result = job("gpt2", strategy)
    loop = batches(result)
    for step in range(1, 4):
        result.step(next(loop))
        atorch.save_checkpoint(f"{folder}/before", result, step)
        result.step(next(loop))


@pytest.mark.parametrize("strategy", ["chunk 2", pytest.param("half x zero1", marks=pytest.mark.slow)])
def test_a_checkpoint_in_the_background_has_the_values_of_its_step(pool: Pool, tmp_path: Path, strategy: str) -> None:
    for work in (in_background, in_foreground):
        pool.run(work, str(tmp_path), strategy, ranks=STRATEGIES[strategy][0])
    for step in range(1, 4):
        one, other = (in_file(tmp_path / name, step) for name in ("beside", "before"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
