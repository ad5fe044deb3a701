"""A plan as one page that needs nothing else: what was chosen, every candidate, and why not the others.

The page is built as a tree of elements, so that names and reasons, which are whatever a model's author wrote, become
text and never markup. Its own style and script are the only ones it accepts: a content security policy names them by
their hash and allows no request. Bars and tables are in the page itself; the script draws the scatter and filters.

All functions take what `Plan.to_json_data` gives.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element, tostring

from atorch.report.columns import columns
from atorch.report.figures import (
    cluster_rows,
    composition,
    counted,
    counterfactual,
    facts,
    headline,
    shown_estimates,
    simulated,
    slower,
    usable_bytes,
)
from atorch.units import format_bytes, format_seconds

PlanData = Mapping[str, Any]
Node = Element | str

MAX_BARS = 12
NUM_COLOURS = 10


def plan_page(plan: PlanData, title: str = "") -> str:
    """The page of a plan, as text; `title` says what it is of."""
    style, script = _piece("plan.css"), _piece("plan.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    head = _element(
        "head",
        _element("meta", charset="utf-8"),
        _element("meta", http_equiv="Content-Security-Policy", content=policy),
        _element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _element("title", f"Plan: {title}" if title else "Plan"),
        _element("style", style),
    )
    data = _element("script", _embedded(columns(plan)), id="plan-data", type="application/json")
    body = _element("body", *_sections(plan, title), data, _element("script", script))
    return "<!DOCTYPE html>\n" + tostring(_element("html", head, body, lang="en"), encoding="unicode", method="html")


def _sections(plan: PlanData, title: str) -> Iterator[Element]:
    yield _element("h1", title or "Plan")
    yield _element("p", headline(plan), class_="soft")
    yield _element("p", *_methods(plan["strategy"]))
    boxes = (_element("div", _element("dt", name), _element("dd", figure)) for name, figure in facts(plan))
    yield _element("dl", *boxes, class_="facts")
    shown = list(shown_estimates(plan))[:MAX_BARS]
    yield _section("What came near", _ranking(plan, shown))
    yield _section("Memory of a device, by category", _memory_bars(plan, shown))
    yield _section("Where the step's time goes", _time_bars(shown))
    if plan.get("counterfactuals"):
        sentences = (_element("li", counterfactual(each)) for each in plan["counterfactuals"])
        yield _section("If it were otherwise", _element("ul", *sentences))
    if plan.get("simulated"):
        rows = ((composition(each["strategy"]), simulated(each)) for each in plan["simulated"])
        yield _section("Simulated", _table(("composition", "found"), rows))
    yield _candidates(plan)
    yield _search(plan)
    if plan.get("cluster"):
        yield _section(
            "The cluster", _table(("figure", "value", "source"), cluster_rows(plan["cluster"])), is_long=True
        )


def _memory_bars(plan: PlanData, shown: Sequence[tuple[str, PlanData]]) -> Element:
    """A bar for each stage of the choice where they are told, then one for each strategy that is compared."""
    stages = plan["estimate"].get("stages") or ()
    bars = [(f"1 chosen, stage {index}", each) for index, each in enumerate(stages) if len(stages) > 1]
    bars += _of_each(shown, "memory")
    limits = {"limit": plan["memory_bytes"], "usable": usable_bytes(plan)}
    said = (
        f"The line is what a device has, {format_bytes(plan['memory_bytes'])}; the dashed one, what may be used of it."
    )
    return _bars(bars, format_bytes, limits, said)


def _time_bars(shown: Sequence[tuple[str, PlanData]]) -> Element:
    return _bars(
        _of_each(shown, "time"), format_seconds, {}, "One step of the slowest device, each kind of work together."
    )


def _of_each(shown: Sequence[tuple[str, PlanData]], figures: str) -> list[tuple[str, Mapping[str, float]]]:
    """A bar of each strategy that is compared, under its number in the table."""
    return [(f"{number} {why}", each["estimate"][figures]) for number, (why, each) in enumerate(shown, 1)]


def _bars(
    bars: Sequence[tuple[str, Mapping[str, float]]], form: Any, limits: Mapping[str, float], caption: str
) -> Element:
    """Stacked bars to one scale, with a legend; every category keeps its colour."""
    names = list(dict.fromkeys(name for _, values in bars for name, value in values.items() if value > 0))
    scale = max([sum(values.values()) for _, values in bars] + list(limits.values())) or 1.0
    legend = (_element("span", _key(index), name.replace("_", " ")) for index, name in enumerate(names))
    rows = []
    for label, values in bars:
        pieces, start = [], 0.0
        for index, name in enumerate(names):
            width = values.get(name, 0.0) / scale * 100
            tip = _element("title", f"{name}: {form(values.get(name, 0.0))}")
            pieces.append(_rectangle(tip, x=f"{start:.3f}", width=f"{width:.3f}", height="1", class_=_colour(index)))
            start += width
        for name, value in limits.items():
            at = f"{value / scale * 100:.3f}"
            pieces.append(_element("line", x1=at, x2=at, y1="0", y2="1", class_=name))
        picture = _element("svg", *pieces, viewBox="0 0 100 1", preserveAspectRatio="none", role="img")
        figure = _element("output", form(sum(values.values())))
        rows.append(_element("div", _element("span", label), picture, figure, class_="bar"))
    return _element("figure", *rows, _element("div", *legend, class_="legend"), _element("figcaption", caption))


def _ranking(plan: PlanData, shown: Sequence[tuple[str, PlanData]]) -> Element:
    rows = (
        (
            f"{number} {why}",
            composition(each["strategy"]),
            format_seconds(each["estimate"]["step_s"]),
            slower(plan, each["estimate"]) if number > 1 else "",
            format_bytes(each["estimate"]["peak_bytes"]),
        )
        for number, (why, each) in enumerate(shown, 1)
    )
    return _table(("", "composition", "step", "", "peak"), rows, numbers={2, 3, 4})


def _candidates(plan: PlanData) -> Element:
    """The scatter and what the script fills, and the rejected ones with their reasons."""
    controls = _element(
        "div",
        _element("input", id="filter", type="search", placeholder="filter, such as: tensor 8 + fsdp"),
        _element("span", id="kinds", class_="controls"),
        _element("output", id="count"),
        class_="controls",
    )
    canvas = _element("canvas", id="scatter", tabindex="0", aria_label="every candidate, memory against time")
    pointer = [_element("div", id=name, hidden="hidden") for name in ("ring", "tip")]
    plot = _element("div", canvas, *pointer, class_="plot")
    matches = _element("tbody", id="matches")
    head = _head(("the fastest of these", "step", "peak", "why not"), {1, 2})
    listed = _element("table", head, matches)
    pareto = (
        (composition(each["strategy"]), format_seconds(each["step_s"]), format_bytes(each["peak_bytes"]))
        for each in plan.get("pareto", ())
    )
    front = _table(("least time for its memory", "step", "peak"), pareto, numbers={1, 2})
    return _element(
        "section",
        _element("h2", "Every candidate"),
        controls,
        plot,
        listed,
        _element("details", _element("summary", "The Pareto front as a table"), front),
        _element("h2", "Why not"),
        _why_not(plan),
        class_="long",
    )


def _why_not(plan: PlanData) -> Element:
    body = _element("tbody")
    for each in plan["rejected"]:
        step = peak = ""
        if each.get("estimate"):
            step, peak = format_seconds(each["estimate"]["step_s"]), format_bytes(each["estimate"]["peak_bytes"])
        row = _row((composition(each["strategy"]), each["why"], step, peak, each["reason"]), {2, 3})
        row.set("data-kind", each["why"])
        body.append(row)
    return _element("table", _head(("composition", "", "step", "peak", "reason"), {2, 3}), body, id="why-not")


def _search(plan: PlanData) -> Element:
    counts = ((axis, counted(values)) for axis, values in plan.get("counts_by_axis", {}).items())
    return _section("What was searched", _table(("axis", "compositions by value"), counts))


def _methods(strategy: Sequence[str]) -> Iterator[Element]:
    for each in strategy or ("plain training",):
        yield _element("span", each, class_="method")


def _section(heading: str, *content: Node, is_long: bool = False) -> Element:
    return _element("section", _element("h2", heading), *content, class_="long" if is_long else "short")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> Element:
    return _element("table", _head(head, numbers), _element("tbody", *(_row(cells, numbers) for cells in rows)))


def _head(cells: Sequence[str], numbers: Iterable[int]) -> Element:
    return _element("thead", _row(cells, numbers, "th"))


def _row(cells: Sequence[str], numbers: Iterable[int], tag: str = "td") -> Element:
    columns_of_numbers = set(numbers)
    made = [_element(tag, cell) for cell in cells]
    for index in columns_of_numbers:
        made[index].set("class", "number")
    return _element("tr", *made)


def _key(index: int) -> Element:
    return _element("svg", _rectangle(width="1", height="1", class_=_colour(index)), viewBox="0 0 1 1")


def _rectangle(*content: Node, **attributes: str) -> Element:
    return _element("rect", *content, **attributes)


def _colour(index: int) -> str:
    return f"k{index % NUM_COLOURS}"


def _element(tag: str, *content: Node, **attributes: str) -> Element:
    """An element with text and elements in it; a keyword's underscores stand for what Python's names cannot have."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for each in content:
        if isinstance(each, Element):
            made.append(each)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + each
        else:
            made.text = (made.text or "") + each
    return made


def _embedded(data: Any) -> str:
    """JSON that no browser takes for the end of its element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _piece(name: str) -> str:
    return files("atorch.report").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source expression that allows exactly this text, W3C Content Security Policy 3, section 2.3.1."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
