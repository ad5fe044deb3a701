"""A plan for a cluster as text: what was chosen, where its bytes and seconds go, the runners-up, and why not others.

All functions take what `Plan.to_json_data` gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atorch.report.figures import (
    PlanData,
    composition,
    counted,
    counterfactual,
    headline,
    held,
    nearest_changes,
    reserved,
    shared_methods,
    shown_estimates,
    simulations,
    slower,
    step_of,
    summary,
    varied,
)
from atorch.report.labels import left_out, legend, shown_name
from atorch.report.width_aware import Sized, columns_of, table
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


BESIDE = 76  # columns at which bytes and seconds stand side by side
FULL_BAR = 20
NOTHING = 1e-6  # of what a bar is of: rounding
MAX_ROWS = 8  # of the runners-up, and of why not
CHANGES = 7  # lines of what if,
SHORT = 2  # of which so many are of what does not fit


def answer_report(plan: PlanData, title: str = "", max_rows: int = MAX_ROWS, verbose: bool = False) -> RenderableType:
    """The plan as a rich renderable; `max_rows` of each long table.

    verbose: all that was tried instead, and how many compositions there were by axis.
    """
    from rich.console import Group
    from rich.text import Text

    shown = shown_estimates(plan, max_rows)
    parts: list[RenderableType] = [answer_summary(plan, title), "", _spent(plan), _legend(plan)]
    parts += ["", *_runners_up(plan, shown)]
    changes = list(plan.get("counterfactuals") or ())
    if changes:
        parts.append(_listed("What if", map(counterfactual, changes if verbose else _few(nearest_changes(changes)))))
    if plan.get("simulated"):
        parts.append(_listed("Simulated", simulations(plan["simulated"])))
    seen = [each["strategy"] for _, each in shown]
    parts += _why_not(
        [each for each in plan["rejected"] if each["strategy"] not in seen], None if verbose else max_rows
    )
    if plan.get("counts_by_axis") and verbose:
        counts = (f"{axis}  {counted(values)}" for axis, values in varied(plan["counts_by_axis"]))
        parts.append(_listed(f"{plan['num_compositions']:,} compositions, by axis", counts))
    parts += [Text(f"Note: {each}.") for each in plan.get("notes", ())]
    return Group(*parts)


def _few(changes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nearest of those that fit, and a few that do not."""
    fitting: list[Mapping[str, Any]] = []
    short: list[Mapping[str, Any]] = []
    for each in changes:
        (short if each["ratio"] is None else fitting).append(each)
    kept = short[:SHORT]
    return [*fitting[: CHANGES - len(kept)], *kept]


def answer_summary(plan: PlanData, title: str = "") -> RenderableType:
    """The first lines: what was chosen, and the figures that matter most of it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, words in summary(plan):
        grid.add_row(name, Text(words, style="bold" if name in ("chosen", "step") else ""))
    return Group(Text(headline(plan, title), style="dim", no_wrap=True, overflow="ellipsis"), grid)


def _spent(plan: PlanData) -> RenderableType:
    """The choice's bytes and seconds by category, side by side where there is room."""
    estimate = plan["estimate"]

    def drawn(width: int) -> RenderableType:
        each = width if width < BESIDE else (width - 3) // 2
        memory = _shares("Memory of a device", held(estimate["memory"]), plan["memory_bytes"], format_bytes, each)
        seconds = _shares("A step", estimate["time"], estimate["step_s"], format_seconds, each)
        return columns_of((memory, seconds), 1 if width < BESIDE else 2)

    return Sized(drawn)


def _shares(title: str, values: Mapping[str, float], whole: float, form: Any, width: int) -> RenderableType:
    """Every category with its figure and a bar, of which a full one is `whole`, in so many columns."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1, 0, 0))
    grid.add_column(min_width=12, no_wrap=True)
    grid.add_column(justify="right", min_width=9, no_wrap=True)
    grid.add_column(justify="right", min_width=4, no_wrap=True)
    grid.add_column(no_wrap=True)
    full = max(0, min(FULL_BAR, width - 12 - 9 - 4 - 4))
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        share = value / whole if whole else 0.0
        if share >= NOTHING:
            bar = Text("█" * min(full, round(share * full)), style="cyan")
            grid.add_row(Text(shown_name(name)), form(value), f"{share:.0%}", bar)
    return grid


def _legend(plan: PlanData) -> RenderableType:
    """A legend of the categories, and what the allocator takes beside them."""
    from rich.text import Text

    estimate = plan["estimate"]
    memory, seconds = held(estimate["memory"]), estimate["time"]
    named = [name for name, size in memory.items() if size > NOTHING * plan["memory_bytes"]]
    named += [name for name, spent in seconds.items() if spent > NOTHING * estimate["step_s"]]
    told = "; ".join(each for each in (legend(named), reserved(estimate["memory"])) if each)
    return Text(f"{told[:1].upper()}{told[1:]}.", style="dim") if told else Text("", end="")


def _runners_up(plan: PlanData, shown: Sequence[tuple[str, PlanData]]) -> Iterator[RenderableType]:
    """The choice among the runners-up, the fastest first."""

    shared = shared_methods(each["strategy"] for _, each in shown)
    rows = []
    for why, each in shown:
        apart = [name for name in each["strategy"] if name not in shared]
        behind = "" if why == "chosen" else slower(plan, each["estimate"])
        step, peak = format_seconds(each["estimate"]["step_s"]), format_bytes(each["estimate"]["peak_bytes"])
        chance = "" if each.get("chance") is None or why == "chosen" else f" {each['chance']:.0%}"
        rows.append((f"{why}{chance}", " + ".join(apart) or "nothing else", step, behind, peak))
    said = ", how likely each is faster" if any(each.get("chance") is not None for _, each in shown) else ""
    title = f"Runners-up{said}{_all_with(shared)}"
    yield table(title, ("", "composition", ">step", ">vs chosen", ">peak"), rows)


def _why_not(rejected: Sequence[Mapping[str, Any]], max_rows: int | None) -> Iterator[RenderableType]:
    """The fastest of each reason, and how many more there are."""
    from rich.text import Text

    of_reason = Counter[str]()
    turns = []  # the first of every reason, then the second
    for each in sorted(rejected, key=step_of):
        of_reason[each["why"]] += 1
        turns.append((of_reason[each["why"]], each))
    turns.sort(key=lambda item: item[0])
    shown = sorted((each for _, each in turns[:max_rows]), key=step_of)
    shared = shared_methods(each["strategy"] for each in shown) if len(shown) > 1 else []
    rows = []
    for each in shown:
        step = format_seconds(step_of(each)) if each.get("estimate") else ""
        apart = [name for name in each["strategy"] if name not in shared]
        rows.append((" + ".join(apart) or "nothing else", step, each["reason"]))
    if rows:
        yield table(f"Why not{_all_with(shared)}", ("composition", ">step", "reason"), rows)
    rest = [] if max_rows is None else [each for _, each in turns[max_rows:]]
    if rest:
        yield Text(left_out(rest), style="dim")


def _all_with(shared: Sequence[str]) -> str:
    return f", all with {composition(shared)}" if shared else ""


def _listed(title: str, lines: Iterable[str]) -> RenderableType:
    """Lines under a title, each with what it needs more than the width indented below it."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    return Group(Text(title, style="italic"), *(Padding(Text(line), (0, 0, 0, 2), expand=False) for line in lines))
