"""A plan for a cluster as text: what was chosen, where its bytes and seconds go, what came near, and why not others.

All functions take what `Plan.to_json_data` gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atorch.report.figures import (
    composition,
    counted,
    counterfactual,
    headline,
    held,
    nearest_changes,
    shared_methods,
    shown_estimates,
    simulated,
    slower,
    summary,
    varied,
)
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

PlanData = Mapping[str, Any]

BAR_COLUMNS = 20
NOTHING = 1e-6  # of what a bar is of: rounding
MAX_ROWS = 8  # of what came near, and of why not


def answer_report(plan: PlanData, title: str = "", max_rows: int = MAX_ROWS) -> RenderableType:
    """The plan as a rich renderable; `max_rows` of each long table."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(line, style="dim") for line in (title, headline(plan)) if line]
    parts.append(Text(f"Chosen: {composition(plan['strategy'])}", style="bold"))
    parts.append(Text(summary(plan)))
    parts.append(_spent(plan))
    parts += _near(plan, max_rows)
    if plan.get("counterfactuals"):
        parts.append(_listed("If it were otherwise", map(counterfactual, nearest_changes(plan["counterfactuals"]))))
    if plan.get("simulated"):
        told = (f"{composition(each['strategy'])}: {simulated(each)}" for each in plan["simulated"])
        parts.append(_listed("Simulated", told))
    parts += _why_not(plan["rejected"], max_rows)
    if plan.get("counts_by_axis"):
        counts = (f"{axis}  {counted(values)}" for axis, values in varied(plan["counts_by_axis"]))
        parts.append(_listed(f"{plan['num_compositions']:,} compositions, by axis", counts))
    return Group(*parts)


def _spent(plan: PlanData) -> RenderableType:
    """The choice's bytes and seconds by category, side by side."""
    from rich.table import Table

    estimate = plan["estimate"]
    both = Table.grid(padding=(0, 4))
    memory = _shares("Memory of a device", held(estimate["memory"]), plan["memory_bytes"], format_bytes)
    both.add_row(memory, _shares("A step", estimate["time"], estimate["step_s"], format_seconds))
    return both


def _shares(title: str, values: Mapping[str, float], whole: float, form: Any) -> RenderableType:
    """Every category with its figure and a bar, of which a full one is `whole`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1))
    table.add_column(min_width=12)
    table.add_column(justify="right", min_width=9)
    table.add_column()
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        share = value / whole if whole else 0.0
        if share < NOTHING:
            continue
        bar = Text("█" * min(BAR_COLUMNS, round(share * BAR_COLUMNS)), style="cyan")
        table.add_row(Text(name.replace("_", " ")), form(value), Text.assemble(bar, f" {share:.0%}"))
    return table


def _near(plan: PlanData, max_rows: int) -> Iterator[RenderableType]:
    """The choice among those that came near, and what can be applied today."""
    from rich.table import Table
    from rich.text import Text

    shown = list(shown_estimates(plan))[:max_rows]
    shared = shared_methods(each["strategy"] for _, each in shown)
    if shared:
        yield Text(f"In all of these: {composition(shared)}")
    table = Table(title="What came near", title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("composition", overflow="fold")
    for name in ("step", "", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for why, each in shown:
        apart = [name for name in each["strategy"] if name not in shared]
        behind = "" if why == "chosen" else slower(plan, each["estimate"])
        step, peak = format_seconds(each["estimate"]["step_s"]), format_bytes(each["estimate"]["peak_bytes"])
        table.add_row(why, Text(" + ".join(apart) or "no more"), step, behind, peak)
    yield table
    if "best_applicable" in plan and not plan["best_applicable"]:
        yield Text("None of what fits can be applied today: it needs methods that can only be planned for yet.")


def _why_not(rejected: Sequence[Mapping[str, Any]], max_rows: int) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    shown = rejected[:max_rows]
    shared = shared_methods(each["strategy"] for each in shown) if len(shown) > 1 else []
    if shared:
        yield Text(f"In all of these: {composition(shared)}")
    table = Table(title="Why not", title_justify="left")
    table.add_column("composition", overflow="fold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for each in shown:
        step = peak = ""
        if each.get("estimate"):
            step, peak = format_seconds(each["estimate"]["step_s"]), format_bytes(each["estimate"]["peak_bytes"])
        apart = [name for name in each["strategy"] if name not in shared]
        table.add_row(Text(" + ".join(apart) or "no more"), step, peak, Text(each["reason"]))
    yield table
    rest = Counter(each["why"] for each in rejected[max_rows:])
    if rest:
        yield Text(f"and {', '.join(f'{number:,} {why}' for why, number in rest.items())} more", style="dim")


def _listed(title: str, lines: Iterable[str]) -> RenderableType:
    from rich.text import Text

    return Text.assemble((f"{title}\n", "italic"), "\n".join(f"  {line}" for line in lines))
