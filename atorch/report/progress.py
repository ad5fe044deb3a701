"""How far a search is, by a bar with the time left or a line for every dry run; and what takes more than a moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from atorch.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console


MOMENT_S = 1.0


@contextmanager
def telling(what: str, after_s: float = MOMENT_S) -> Iterator[None]:
    """Says what is being done on standard error, in a line, where it takes more than a moment."""
    said = threading.Timer(after_s, sys.stderr.write, (f"{what} …\n",))
    said.daemon = True
    said.start()
    try:
        yield
    finally:
        said.cancel()


class State(Protocol):
    """What a search says of itself after a dry run."""

    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def strategy(self) -> str: ...
    @property
    def step_s(self) -> float | None: ...
    @property
    def best_s(self) -> float | None: ...
    @property
    def left_s(self) -> float: ...


def line(state: State) -> str:
    """One dry run in one line."""
    found = "rejected" if state.step_s is None else format_seconds(state.step_s)
    best = "" if state.best_s is None else f", best {format_seconds(state.best_s)}"
    left = f", at most {format_seconds(state.left_s)} left" if state.done < state.total else ""
    return f"dry run {state.done} of at most {state.total}: {found}{best}{left}: {state.strategy}"


@contextmanager
def search_progress(console: Console | None = None, *, verbose: bool = False) -> Iterator[Callable[[State], None]]:
    """A function that shows each State it is given, by default on standard error; `verbose` adds lines to the bar."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn

    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda state: console.print(line(state), markup=False, soft_wrap=True)
        return
    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("the first dry run", total=None)

        def show(state: State) -> None:
            if verbose:
                console.print(line(state), markup=False, soft_wrap=True)
            bar.update(task, total=state.total, completed=state.done, description=escape(line(state)))

        yield show
