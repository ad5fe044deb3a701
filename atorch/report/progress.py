"""Progress of a search, as a bar with the time left or a line for every dry run, and of other long work."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atorch.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console


MOMENT_S = 1.0
AGAIN_S = 10.0  # between lines about work that continues, where there is no terminal


@contextmanager
def telling(what: str, after_s: float = MOMENT_S) -> Iterator[None]:
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
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        while True:
            status.update(Text(f"{what} … {time.monotonic() - began:.0f} s", no_wrap=True, overflow="ellipsis"))
            if is_over.wait(0.5):
                return


@dataclass(frozen=True)
class Progress:
    """The state of a search after a dry run."""

    done: int
    total: int  # at most
    strategy: str
    step_s: float | None  # None if it failed
    best_s: float | None
    left_s: float  # expected


def line(state: Progress) -> str:
    outcome = "rejected" if state.step_s is None else format_seconds(state.step_s)
    best = "" if state.best_s is None else f", best {format_seconds(state.best_s)}"
    left = f", at most {format_seconds(state.left_s)} left" if state.done < state.total else ""
    return f"dry run {state.done} of at most {state.total}: {outcome}{best}{left}: {state.strategy}"


@contextmanager
def search_progress(console: Console | None = None, *, verbose: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A function that shows each state, by default on standard error; `verbose` adds lines to the bar."""
    from rich import progress
    from rich.console import Console
    from rich.markup import escape

    console = console or Console(stderr=True, highlight=False)
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
