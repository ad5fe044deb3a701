"""Text on a terminal: a plan with its choice, estimate, measurement and rejections, and the progress of a search.

Functions of plans take the data of `Plan.to_json_data`, so they also show a plan from a strategy file. Progress is a
bar with the time left, or a line for every dry run.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import progress
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atorch.report.figures import PlanData, Progress, composition, left_out, shared_methods
from atorch.units import format_bytes, format_seconds

NARROW = 64  # columns below which the rows of a table become lines


@dataclass(frozen=True)
class WidthAware:
    """A renderable that is made for the width that it gets."""

    made: Callable[[int], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.made(options.max_width)


def named(rows: Iterable[tuple[str, str]], bold: Collection[str]) -> Table:
    """Names beside words, which are bold for the names in `bold`."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, words in rows:
        grid.add_row(name, Text(words, style="bold" if name in bold else ""))
    return grid


def one_line(text: str) -> Text:
    """A text that is cut at the end of the line."""
    return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> WidthAware:
    """A table whose long cells fold; a heading that begins with ">" marks a column of figures, which do not fold."""
    listed = list(rows)

    def made(width: int) -> RenderableType:
        return _lines(title, head, listed) if width < NARROW else _drawn(title, head, listed)

    return WidthAware(made)


def _drawn(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    drawn = Table(title=title, title_justify="left", show_header=any(head))
    for name in head:
        is_figure = name.startswith(">")
        drawn.add_column(
            name.removeprefix(">"), justify="right" if is_figure else "left", no_wrap=is_figure, overflow="fold"
        )
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def _lines(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """Each row as a line of its figures, with the cells that fold below it."""
    parts: list[RenderableType] = [Text(title, style="italic")]
    for row in rows:
        short = [cell for name, cell in zip(head, row, strict=True) if cell and (not name or name.startswith(">"))]
        long = [cell for name, cell in zip(head, row, strict=True) if cell and name and not name.startswith(">")]
        parts.append(Text("- " + ", ".join(short)))
        parts += [Padding(Text(cell), (0, 0, 0, 2), expand=False) for cell in long]
    return Group(*parts)


Rejections = Sequence[Mapping[str, Any]]

MAX_ROWS = 12
_ORDER = ("slower", "failed", "time", "memory", "refused", "hardware", "not run")
"""Reasons in the order of rows: those that were learnt in a run come first."""


def plan_report(plan: PlanData, max_rows: int | None = MAX_ROWS) -> RenderableType:
    """The plan as a rich renderable; `max_rows` of the why-not table, None for all."""
    others = (entry["strategy"] for entry in plan["rejected"] if entry["why"] != "hardware")
    common = shared_methods((plan["strategy"], *others))
    parts: list[RenderableType] = [plan_summary(plan)]
    if common:
        parts.append(Text(f"In every composition: {' + '.join(common)}"))
    if plan["rejected"]:
        parts.append(_table(plan["rejected"], common, max_rows, is_chosen=plan["measured"] is not None))
    parts += _left_out(plan["rejected"], max_rows)
    return Group(*parts)


def plan_summary(plan: PlanData) -> RenderableType:
    """The choice, its estimate and measurement, and its effect on the numbers."""
    parts: list[RenderableType] = [Text(f"Chosen: {composition(plan['strategy'])}", style="bold")]
    parts.append(Text(steps(plan)))
    if plan.get("numbers"):
        parts.append(Text(f"Numbers: {plan['numbers']}."))
    parts += [Text(f"Note: {note}.") for note in plan.get("notes", ())]
    return Group(*parts)


def show_plan(plan: PlanData) -> None:
    """Write the plan to standard error."""
    _standard_error().print(plan_report(plan))


def show_rejections(rejected: Rejections, max_rows: int | None = MAX_ROWS, console: Console | None = None) -> None:
    """Write the reason against each composition, if none was chosen."""
    console = console or _standard_error()
    console.print(_table(rejected, (), max_rows))
    console.print(*_left_out(rejected, max_rows))


def _standard_error() -> Console:
    return Console(stderr=True, highlight=False)


def steps(plan: PlanData) -> str:
    """The choice's step, measured and estimated, that of the baseline, and the search, a sentence a line."""
    estimate, measured = plan["estimate"], plan["measured"]
    expected = "not estimated"
    if estimate is not None:
        expected = f"estimated {format_seconds(estimate['step_s'])} and {format_bytes(estimate['peak_bytes'])}"
    if measured is None:
        step = "not measured"
    else:
        peak = f"{format_bytes(measured['peak_bytes'])} ({measured['memory_kind']})"
        step = f"measured {format_seconds(measured['step_s'])} and {peak}"
    return (
        f"Step: {step}; {expected} of {format_bytes(plan['memory_bytes'])} a device.\n"
        f"{_baseline(plan)}"
        f"{plan['num_compositions']} compositions, {plan['num_dry_runs']} of them run, in "
        f"{format_seconds(plan['seconds'])}."
    )


def _baseline(plan: PlanData) -> str:
    """The baseline, and the choice's gain on it, as measured or expected."""
    baseline = plan.get("baseline")
    if baseline is None:
        return ""
    methods = _shown(baseline["strategy"], ()) or "plain training"
    if baseline["strategy"] == plan["strategy"]:
        return "That is the baseline; nothing was clearly faster.\n"
    basis = "measured" if baseline["measured"] is not None else "expected, not measured"
    step = f"{format_seconds(baseline['expected_s'])} ({basis})"
    return f"Baseline: {methods}, {step}; the choice takes {baseline['gain']:.0%} less.\n"


def _table(
    rejected: Rejections, common: Sequence[str], max_rows: int | None, *, is_chosen: bool = False
) -> RenderableType:
    title = "Why not (shares are of the chosen one's step)" if is_chosen else "Why not"
    rows = (
        (_shown(item["strategy"], common) or "plain", _step(item["estimate"]), _step(item["measured"]), item["reason"])
        for item in _sorted(rejected)[:max_rows]
    )
    return table(title, ("composition", ">expected", ">measured", "reason"), rows)


def _sorted(rejected: Rejections) -> list[Mapping[str, Any]]:
    """Rejections in the order of their reasons, and of each reason the fastest first."""

    def key(entry: Mapping[str, Any]) -> tuple[int, float]:
        figures = entry["measured"] or entry["estimate"]
        return _ORDER.index(entry["why"]), figures["step_s"] if figures else 0.0

    return sorted(rejected, key=key)


def _left_out(rejected: Rejections, max_rows: int | None) -> list[RenderableType]:
    rest = [] if max_rows is None else _sorted(rejected)[max_rows:]
    return [Text(left_out(rest), style="dim")] if rest else []


def _shown(strategy: Sequence[str], common: Sequence[str]) -> str:
    return " + ".join(method for method in strategy if method not in common)


def _step(figures: Mapping[str, Any] | None) -> str:
    return "" if figures is None else format_seconds(figures["step_s"])


MOMENT_S = 1.0
AGAIN_S = 10.0  # between lines about work that continues, where there is no terminal


@contextmanager
def status_line(what: str, after_s: float = MOMENT_S) -> Iterator[None]:
    """Report on standard error what is being done, and for how long, if it takes more than a moment.

    On a terminal, a line changes and disappears in the end; elsewhere, a line is added every ten seconds.
    """
    is_over, began = threading.Event(), time.monotonic()
    teller = threading.Thread(target=_report, args=(what, is_over, began, after_s), daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


def _report(what: str, is_over: threading.Event, began: float, after_s: float) -> None:
    out = sys.stderr
    if is_over.wait(after_s):
        return
    if not out.isatty():
        for number in itertools.count():
            out.write(f"{what} …{f' {format_seconds(time.monotonic() - began)}' if number else ''}\n")
            out.flush()
            if is_over.wait(AGAIN_S):
                return

    with Console(stderr=True).status("") as status:
        while True:
            status.update(Text(f"{what} … {time.monotonic() - began:.0f} s", no_wrap=True, overflow="ellipsis"))
            if is_over.wait(0.5):
                return


def line(state: Progress) -> str:
    outcome = "rejected" if state.step_s is None else format_seconds(state.step_s)
    best = "" if state.best_s is None else f", best {format_seconds(state.best_s)}"
    left = f", at most {format_seconds(state.left_s)} left" if state.done < state.total else ""
    return f"dry run {state.done} of at most {state.total}: {outcome}{best}{left}: {state.strategy}"


@contextmanager
def search_progress(console: Console | None = None, *, verbose: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A function that shows each state, by default on standard error; `verbose` adds lines to the bar."""
    console = console or _standard_error()
    if not console.is_terminal:
        yield lambda state: console.print(line(state), markup=False, soft_wrap=True)
        return
    columns = (progress.TextColumn("searching"), progress.BarColumn(), progress.TextColumn("{task.description}"))
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("the first dry run", total=None)

        def show(state: Progress) -> None:
            if verbose:
                console.print(line(state), markup=False, soft_wrap=True)
            bar.update(task, total=state.total, completed=state.done, description=escape(line(state)))

        yield show
