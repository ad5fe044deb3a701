"""A plan for a cluster as text: the choice, its bytes and seconds, the runners-up, and the reasons against others.

All functions take the data of `Plan.to_json_data`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atorch.report.explanation import explained, improvements, setting
from atorch.report.figures import (
    PlanData,
    band,
    composition,
    counted,
    counterfactual,
    headline,
    held,
    left_out,
    legend,
    memory_band,
    nearest_changes,
    reserved,
    shared_methods,
    shown_estimates,
    shown_name,
    simulations,
    slower,
    step_of,
    summary,
    usable_bytes,
    varied,
)
from atorch.report.text import WidthAware, named, one_line, table
from atorch.report.training import compared, of_search
from atorch.units import format_bytes, format_seconds, plural

Answers = Sequence[tuple[str, PlanData | str]]
"""Plans by the name of their cluster; in place of a missing plan, the reason in words."""

BESIDE = 76  # columns from which bytes and seconds are side by side
FULL_BAR = 20
NOTHING = 1e-6  # share of a full bar that counts as rounding
MAX_ROWS = 8  # of the runners-up, and of the reasons against others
CHANGES = 7  # lines of "What if"
SHORT = 2  # of these, the most for changes that do not fit
WIDTH = 110  # columns of text that is no terminal's
NAMES, EACH = 13, 19  # widths: of the first column, and the least of a cluster's


def answer_report(plan: PlanData, title: str = "", max_rows: int = MAX_ROWS, verbose: bool = False) -> RenderableType:
    """The plan as a rich renderable; `max_rows` of each long table.

    verbose: also all counterfactuals, and the number of compositions by axis.
    """
    shown = shown_estimates(plan, max_rows)
    parts: list[RenderableType] = [*_solved(plan), answer_summary(plan, title), "", _spent(plan), _legend(plan)]
    parts += ["", *_runners_up(plan, shown)]
    changes = list(plan.get("counterfactuals") or ())
    if changes:
        parts.append(_listed("What if", map(counterfactual, changes if verbose else _picked(nearest_changes(changes)))))
    if plan.get("simulated"):
        parts.append(_listed("Simulated", simulations(plan["simulated"])))
    listed = [entry["strategy"] for _, entry in shown]
    parts += _why_not(
        [entry for entry in plan["rejected"] if entry["strategy"] not in listed], None if verbose else max_rows
    )
    if plan.get("counts_by_axis") and verbose:
        counts = (f"{axis}  {counted(values)}" for axis, values in varied(plan["counts_by_axis"]))
        parts.append(_listed(f"{plan['num_compositions']:,} compositions, by axis", counts))
    parts += [Text(f"Note: {note}.") for note in plan.get("notes", ())]
    return Group(*parts)


def answer_text(plan: PlanData, verbose: bool = False) -> str:
    with StringIO() as text:
        Console(file=text, width=WIDTH).print(answer_report(plan, verbose=verbose))
        return text.getvalue()


def _picked(changes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The nearest changes that fit, and a few that do not."""
    listed = list(changes)
    kept = [change for change in listed if change["ratio"] is None][:SHORT]
    fitting = [change for change in listed if change["ratio"] is not None]
    return [*fitting[: CHANGES - len(kept)], *kept]


def _solved(plan: PlanData) -> Iterator[RenderableType]:
    """The size that was looked for, and the models that were tried."""
    if plan.get("solved"):
        yield Text(plan["solved"]["words"], style="bold")
    if tried := list(of_search(plan)):
        yield table("Models that were tried", ("model", ">parameters", "", ">step"), tried)


def answer_summary(plan: PlanData, title: str = "") -> RenderableType:
    """The first lines: the choice and its main figures."""
    return Group(one_line(headline(plan, title)), named(summary(plan), bold=("chosen", "step")))


def _spent(plan: PlanData) -> RenderableType:
    """The choice's bytes and seconds by category, side by side if there is room."""
    estimate = plan["estimate"]

    def drawn(width: int) -> RenderableType:
        half = width if width < BESIDE else (width - 3) // 2
        memory = _shares("Memory of a device", held(estimate["memory"]), plan["memory_bytes"], format_bytes, half)
        seconds = _shares("A step", estimate["time"], estimate["step_s"], format_seconds, half)
        grid = Table.grid(padding=(0, 3, 0, 0))
        for shown in [(memory,), (seconds,)] if width < BESIDE else [(memory, seconds)]:
            grid.add_row(*shown)
        return grid

    return WidthAware(drawn)


def _shares(title: str, values: Mapping[str, float], whole: float, form: Any, width: int) -> RenderableType:
    """Every category with its figure and a bar, in `width` columns; a full bar is `whole`."""
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
    """A legend of the categories, and the bytes that the allocator reserves in addition."""
    estimate = plan["estimate"]
    memory, seconds = held(estimate["memory"]), estimate["time"]
    named = [name for name, size in memory.items() if size > NOTHING * plan["memory_bytes"]]
    named += [name for name, spent in seconds.items() if spent > NOTHING * estimate["step_s"]]
    words = "; ".join(part for part in (legend(named), reserved(estimate["memory"])) if part)
    return Text(f"{words[:1].upper()}{words[1:]}.", style="dim") if words else Text("", end="")


def _runners_up(plan: PlanData, shown: Sequence[tuple[str, PlanData]]) -> Iterator[RenderableType]:
    """The choice among the runners-up, the fastest first."""
    shared = shared_methods(entry["strategy"] for _, entry in shown)
    rows = []
    for why, entry in shown:
        differing = [name for name in entry["strategy"] if name not in shared]
        behind = "" if why == "chosen" else slower(plan, entry["estimate"])
        step, peak = format_seconds(entry["estimate"]["step_s"]), format_bytes(entry["estimate"]["peak_bytes"])
        chance = "" if entry.get("chance") is None or why == "chosen" else f" {entry['chance']:.0%}"
        rows.append((f"{why}{chance}", " + ".join(differing) or "nothing else", step, behind, peak))
    likelihood = ", how likely each is faster" if any(entry.get("chance") is not None for _, entry in shown) else ""
    title = f"Runners-up{likelihood}{_all_with(shared)}"
    yield table(title, ("", "composition", ">step", ">vs chosen", ">peak"), rows)


def _why_not(rejected: Sequence[Mapping[str, Any]], max_rows: int | None) -> Iterator[RenderableType]:
    """The fastest rejected compositions of each reason, and the number of others."""
    of_reason = Counter[str]()
    turns = []  # the first of every reason, then the second
    for entry in sorted(rejected, key=step_of):
        of_reason[entry["why"]] += 1
        turns.append((of_reason[entry["why"]], entry))
    turns.sort(key=lambda item: item[0])
    shown = sorted((entry for _, entry in turns[:max_rows]), key=step_of)
    shared = shared_methods(entry["strategy"] for entry in shown) if len(shown) > 1 else []
    rows = []
    for entry in shown:
        step = format_seconds(step_of(entry)) if entry.get("estimate") else ""
        differing = [name for name in entry["strategy"] if name not in shared]
        rows.append((" + ".join(differing) or "nothing else", step, entry["reason"]))
    if rows:
        yield table(f"Why not{_all_with(shared)}", ("composition", ">step", "reason"), rows)
    rest = [] if max_rows is None else [entry for _, entry in turns[max_rows:]]
    if rest:
        yield Text(left_out(rest), style="dim")


def _all_with(shared: Sequence[str]) -> str:
    return f", all with {composition(shared)}" if shared else ""


def _listed(title: str, lines: Iterable[str]) -> RenderableType:
    """Lines under a title; a line that is longer than the width continues indented."""
    return Group(Text(title, style="italic"), *(Padding(Text(line), (0, 0, 0, 2), expand=False) for line in lines))


def explanation_report(data: Mapping[str, Any], title: str = "", max_rows: int = MAX_ROWS) -> RenderableType:
    """A trainer's configuration as a rich renderable: each key, the estimate, the changes that gain, the best plan."""
    parts: list[RenderableType] = [one_line(headline(data, title)), named(explained(data), bold=("methods", "fits"))]
    parts += ["", _spent(data), _legend(data), ""]
    listed = [entry for entry in data["entries"] if entry["kind"] != "no effect"]
    rows = [(entry["key"], setting(entry["value"]), entry["kind"], entry["note"]) for entry in listed]
    whose = f"{data['trainer']}'{'' if data['trainer'].endswith('s') else 's'}"
    parts.append(table(f"{data['source']}, read as {whose}", ("key", "value", "", "meaning"), rows))
    idle = [entry["key"] for entry in data["entries"] if entry["kind"] == "no effect"]
    if idle:
        parts.append(Text(f"No effect on memory or time: {', '.join(idle)}.", style="dim"))
    gains = list(improvements(data, max_rows))
    head = ("change", ">step", ">saves", ">memory needed", ">saves memory")
    none = f"No single change {'gains more' if data['fits'] else 'makes it fit'}."
    parts.append(table("What one change gains", head, gains) if gains else Text(none))
    return Group(*parts)


def clusters_report(answers: Answers, title: str = "") -> RenderableType:
    """Plans of one job for several clusters as a rich renderable, with as many in a table as there is room for."""
    fastest = max(rate(answer) for _, answer in answers)
    plans = [answer for _, answer in answers if not isinstance(answer, str)]
    notes = [Text(f"Note: {note}.") for note in dict.fromkeys(note for plan in plans for note in plan.get("notes", ()))]

    def drawn(width: int) -> RenderableType:
        number = max(1, (width - NAMES) // EACH)
        parts = (_columns(answers[start : start + number], fastest) for start in range(0, len(answers), number))
        return Group(one_line(title), *parts, *notes)

    return WidthAware(drawn)


def _columns(answers: Answers, fastest: float) -> RenderableType:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("", no_wrap=True, style="dim")
    for name, _ in answers:
        drawn.add_column(Text(name, overflow="fold"), overflow="fold", ratio=1)
    for row in side_by_side([answer for _, answer in answers], fastest):
        drawn.add_row(*map(Text, row))
    return drawn


def side_by_side(answers: Sequence[PlanData | str], fastest: float) -> list[list[str]]:
    """Rows of a name and the figure of each cluster's plan; in place of a missing plan, the reason in words.

    fastest: the most samples a second of all clusters, see `rate`.
    """
    columns = [dict(_compared_figures(answer, fastest)) for answer in answers]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "") for column in columns)] for name in names]


def rate(plan: PlanData | str) -> float:
    """Samples a second, since batches may differ between clusters; 0 without a plan."""
    return 0.0 if isinstance(plan, str) else float(plan["global_batch"] / plan["estimate"]["step_s"])


def _compared_figures(answer: PlanData | str, fastest: float) -> Iterator[tuple[str, str]]:
    """(name, figure) of one cluster's plan."""
    if isinstance(answer, str):
        yield "step", answer
        return
    estimate, cluster = answer["estimate"], answer["cluster"]
    devices = cluster.get("num_nodes", 1) * cluster.get("devices_per_node", 1)
    yield "devices", f"{devices} × {cluster['device']['name']}"
    yield "batch", plural(answer["global_batch"], "sample")
    yield "step", format_seconds(estimate["step_s"])
    if band(estimate):
        yield "between", band(estimate)
    yield "a sample", "fastest" if rate(answer) == fastest else f"{fastest / rate(answer):.3g}× as long"
    if estimate.get("tokens_per_s"):
        yield "tokens/s", f"{estimate['tokens_per_s']:,.0f}"
        yield "… a device", f"{estimate['tokens_per_s'] / devices:,.0f}"
    elif estimate.get("samples_per_s"):
        yield "samples/s", f"{estimate['samples_per_s']:,.3g}"
    if estimate.get("flops_per_s"):
        yield "TFLOP/s each", f"{estimate['flops_per_s'] / 1e12:,.3g}"
    if estimate.get("mfu"):
        yield "MFU", f"{estimate['mfu']:.1%}"
    yield "memory", f"{format_bytes(estimate['peak_bytes'])} of {format_bytes(usable_bytes(answer))}"
    if memory_band(estimate):
        yield "… between", f"{memory_band(estimate)}{', narrow' if answer.get('fits_narrowly') else ''}"
    yield "host memory", format_bytes(estimate["on_host_bytes"]) if estimate.get("on_host_bytes") else "none"
    if solved := answer.get("solved"):
        yield "fits", solved.get("model") or f"{solved['what']} {solved['size']:,}"
    yield from compared(answer)
    yield "chosen", composition(answer["strategy"])
