"""Jobs whose good answer is published: the planner's estimate of that answer, and the planner's own choice.

    python benchmarks/known_jobs.py [--json FILE] [--only WORD] [--without-plans]

The jobs are the rows of `published/known_runs.csv` that name one, each with its source. The estimated speed at the
published layout, in its framework's way of working, must be within ±15 % of the measurement. Then the planner chooses
for the same model, devices, batch and precision. One estimate compares its choice with the published layout in atorch's
own methods. The choice must be no slower, except within the planner's tie margin, where it prefers the simpler one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from atorch.auto.planner.best_first import TIE
from atorch.auto.planner.cluster_search import answer
from atorch.auto.planner.estimate import estimate_of, usable_bytes
from atorch.cost import ModelProfile, plain_cost, step_seconds
from atorch.cost.adapted_profile import adapted_profile
from atorch.cost.transformer import Implementation, transformer_profile
from atorch.errors import AtorchError
from benchmarks.published.adapters import adapters_of
from benchmarks.published.evaluate import Case
from benchmarks.published.layout import framework_for, layout_of
from benchmarks.published.shapes import shape_of
from benchmarks.published.strategies import strategy_of
from benchmarks.published.table import Row, read_rows
from benchmarks.published.words import precision_of

TABLE = Path(__file__).parent / "published" / "known_runs.csv"
SPEED = 0.15  # allowed error of an estimated speed


@dataclass(frozen=True, kw_only=True)
class Job:
    """A published answer, its estimates, and the planner's choice."""

    name: str
    source: str
    measured_s: float | None = None
    estimated_s: float | None = None  # at the published layout, under its framework
    published: str = ""  # the layout in atorch's methods
    published_s: float | None = None
    published_fits: bool = False
    chosen: str = ""
    chosen_s: float | None = None
    seconds: float = 0.0  # of planning
    refused: str = ""

    @property
    def error(self) -> float:
        """Signed relative error of the estimate at the published layout; -1 for a refused job."""
        return self.estimated_s / self.measured_s - 1 if self.estimated_s and self.measured_s else -1.0

    @property
    def gain(self) -> float:
        """Time that the choice saves against the published layout, by one estimate; NaN if either is missing."""
        return 1 - self.chosen_s / self.published_s if self.chosen_s and self.published_s else math.nan

    @property
    def holds(self) -> tuple[bool, bool]:
        """True for a speed within the bar, and true for a choice no slower than the published layout."""
        return abs(self.error) <= SPEED, self.gain >= -TIE or (self.chosen_s is not None and not self.published_fits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="WORD", help="jobs whose name has it")
    parser.add_argument("--without-plans", action="store_true", help="the speeds alone")
    arguments = parser.parse_args()
    jobs = []
    for row in known_jobs():
        if arguments.only.lower() in row.name.lower():
            jobs.append(judged(row, plans=not arguments.without_plans))
            print(shown(jobs[-1]), flush=True)
    right, taken = (sum(job.holds[place] for job in jobs) for place in (0, 1))
    print(f"\nspeed within {SPEED:.0%}: {right} of {len(jobs)} jobs")
    if not arguments.without_plans:
        print(f"the choice no slower than what was published: {taken} of {len(jobs)} jobs")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(job) for job in jobs], indent=2) + "\n", encoding="utf-8")


def known_jobs() -> Iterator[Row]:
    """Rows of the table that name a job."""
    return (row for row in read_rows(TABLE) if row.name)


def judged(row: Row, *, plans: bool) -> Job:
    """A job with its estimates, and with its plan if `plans`."""
    case = Case.of(row)
    job = Job(name=row.name, source=row.source, measured_s=case.measured_s, refused=case.refused)
    if case.cost is None or case.cluster is None:
        return job
    job = _with(job, estimated_s=step_seconds(case.cost, case.cluster))
    if not plans:
        return job
    try:
        return _planned(job, row, case)
    except AtorchError as error:
        return _with(job, refused=str(error))


def _planned(job: Job, row: Row, case: Case) -> Job:
    assert case.cluster is not None
    profile, batch = _profile(row), int(layout_of(row).global_batch)
    published, began = strategy_of(row), time.monotonic()
    start = plain_cost(profile, batch, case.cluster.device.memory_bytes)
    estimate = estimate_of(published.cost(start), case.cluster)
    job = _with(
        job,
        published=str(published),
        published_s=estimate.step_s,
        published_fits=estimate.needed_bytes <= usable_bytes(case.cluster),
    )
    precision = "fp8" if precision_of(row).dtype == "float8" else "half"
    plan = answer(profile, case.cluster, global_batch=batch, precision=precision, advise=False)
    assert plan.estimate is not None
    return _with(job, chosen=str(plan.strategy), chosen_s=plan.estimate.step_s, seconds=time.monotonic() - began)


def _profile(row: Row) -> ModelProfile:
    """The model operation by operation, as a plan reads it: in fp32, or in the frozen type with adapters."""
    shape, adapters = shape_of(row), adapters_of(row, framework_for(row))
    eager = Implementation(itemsize=4.0, fused_norm=False, fused_activation=False)
    if adapters is None:
        return transformer_profile(shape, 1, eager)
    return adapted_profile(shape, adapters, 1, replace(eager, itemsize=adapters.base_itemsize))


def _with(job: Job, **changes: object) -> Job:
    return Job(**{**asdict(job), **changes})  # type: ignore[arg-type]


def shown(job: Job) -> str:
    """A job in a few lines."""
    if job.estimated_s is None:
        return f"{job.name}: refused, {job.refused}"
    lines = [
        f"{job.name}: {job.measured_s:.3g} s measured, {job.estimated_s:.3g} s estimated, {job.error:+.1%}"
        f"{'' if job.holds[0] else '  ✗'}"
    ]
    if job.published_s is not None:
        fits = "" if job.published_fits else ", which does not fit"
        lines.append(f"    published {job.published}: {job.published_s:.3g} s{fits}")
    if job.chosen_s is not None:
        verdict = "" if job.holds[1] else "  ✗"
        lines.append(
            f"    chosen    {job.chosen}: {job.chosen_s:.3g} s, {job.gain:+.1%} less, in {job.seconds:.1f} s{verdict}"
        )
    if job.refused:
        lines.append(f"    refused: {job.refused}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
