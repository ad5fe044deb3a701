"""A training step under StragglerDetector against the same step alone, and the cost of the step that reports.

Variants run interleaved, on one process and under `ddp` on two, in a shuffled order that both processes share. "alone
again" is the noise floor.

    python benchmarks/straggler_detector.py [--quick]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from command import answer_of, as_rank, main
from compare import Row, interleave
from step_overhead import Step, loss_func, make_batch, make_model

from atorch import StragglerDetector, auto_accelerate

EVERY = 50


def make_step(width: int, strategy: list[str], *, is_measured: bool) -> Step:
    """The documented loop's step."""
    _, result, _ = auto_accelerate(make_model(width), torch.optim.AdamW, loss_func=loss_func, load_strategy=strategy)
    assert result is not None
    model, optim, _, loss, _, _ = result
    batch = make_batch(width)
    if is_measured:
        StragglerDetector(model, optim, every=EVERY)

    def step() -> None:
        loss(batch, model(batch)).backward()
        optim.step()
        optim.zero_grad()

    return step


def rows_of(where: str, strategy: list[str], width: int, rounds: int) -> list[tuple[Any, ...]]:
    """The rows of one width."""
    variants = {name: make_step(width, strategy, is_measured=False) for name in ("alone", "alone again")}
    variants["measured"] = make_step(width, strategy, is_measured=True)
    samples = interleave(variants, rounds, warmup=EVERY)
    title = f"{where}, width {width} ({samples.median_ms('alone'):.2f} ms a step)"
    ratio, difference = samples.ratio("measured", "alone"), samples.difference_us("measured", "alone")
    times = samples.seconds["measured"]
    report_us = float(np.median(times[EVERY - 1 :: EVERY]) - np.median(times)) * 1e6
    holds = ratio.value <= 1.01 or difference.value <= 30
    return [
        (f"{title}: measured / alone", f"{ratio:.3f}", "≤ 1.01, or ≤ 30 µs", holds),
        (f"{title}: alone again / alone", f"{samples.ratio('alone again', 'alone'):.3f}", "", None),
        (f"{title}: measured − alone, µs", f"{difference:.1f}", "", None),
        (f"{title}: alone again − alone, µs", f"{samples.difference_us('alone again', 'alone'):.1f}", "", None),
        (f"{title}: a step that reports, µs more", f"{report_us:.0f}", "", None),
    ]


def in_process(width: int, rounds: int) -> list[tuple[Any, ...]] | None:
    """Two processes in one group."""
    rank = as_rank()
    rows = rows_of("ddp on 2 processes", ["parallel_mode", "ddp"], width, rounds)
    return rows if rank == 0 else None


def measure(quick: bool = False) -> list[Row]:
    torch.set_num_threads(1)
    few, many = (100, 200) if quick else (400, 1000)
    rows = [row for width, rounds in ((32, many), (256, few)) for row in rows_of("one process", [], width, rounds)]
    return [Row(*row) for row in (*rows, *answer_of(__file__, 256, few))]


if __name__ == "__main__":
    main(measure, in_process=in_process)
