"""Layouts that adapt to the width: tables that suit a narrow terminal, and parts side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

NARROW = 64  # columns below which the rows of a table become lines


@dataclass(frozen=True)
class Sized:
    """A renderable that is made for the width that it gets."""

    made: Callable[[int], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.made(options.max_width)


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Sized:
    """A table whose long cells fold; a heading that begins with ">" marks a column of figures, which do not fold."""
    listed = list(rows)

    def made(width: int) -> RenderableType:
        return _lines(title, head, listed) if width < NARROW else _drawn(title, head, listed)

    return Sized(made)


def _drawn(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left")
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
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(title, style="italic")]
    for row in rows:
        short = [cell for name, cell in zip(head, row, strict=True) if cell and (not name or name.startswith(">"))]
        long = [cell for name, cell in zip(head, row, strict=True) if cell and name and not name.startswith(">")]
        parts.append(Text("- " + ", ".join(short)))
        parts += [Padding(Text(cell), (0, 0, 0, 2), expand=False) for cell in long]
    return Group(*parts)


def columns_of(parts: Sequence[RenderableType], number: int) -> RenderableType:
    """Parts in `number` columns, row by row."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 3, 0, 0))
    for start in range(0, len(parts), number):
        grid.add_row(*parts[start : start + number])
    return grid
