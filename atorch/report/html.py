"""A plan as one self-contained page: the choice, every candidate, and the reasons against others.

The page is built as a tree of elements: names and reasons, which any model's author may have written, become text
and never markup. A content security policy allows only the page's own style and script, by their hashes, and no
request. Bars and tables are in the page itself; the script draws the scatter plot and filters.

All functions take the data of `Plan.to_json_data`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, tostring

from atorch.report import HtmlNode, element, row, section, table
from atorch.report.figures import (
    SLACK,
    PlanData,
    as_list,
    cluster_rows,
    composition,
    counted,
    counterfactual,
    facts,
    headline,
    held,
    legend,
    nearest_changes,
    remarks,
    reserved,
    shown_estimates,
    simulated,
    slower,
    step_of,
    summary,
    usable_bytes,
    varied,
    why_not,
)
from atorch.report.training import of_search
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from atorch.report.answer import Answers

MAX_BARS = 12
SEPARATOR = " + "  # of the methods in a label
NUM_COLOURS = 10  # in the page's style
Values = Mapping[str, float]


def plan_page(plan: PlanData, title: str = "", command: str = "") -> str:
    """The page of a plan as text, under a title; `command` is the one that made it."""
    return _plan_page(title, (*_choice(plan, title), *_details(plan)), columns(plan), command)


def plans_page(answers: Answers, title: str = "", command: str = "") -> str:
    """As `plan_page` for several clusters: their plans side by side, and each plan's choice below."""
    from atorch.report.answer import rate, side_by_side

    rows = side_by_side([answer for _, answer in answers], max(rate(answer) for _, answer in answers))
    below = (
        element("details", element("summary", name), *_choice(answer))
        for name, answer in answers
        if not isinstance(answer, str)
    )
    compared = table(("", *(name for name, _ in answers)), rows, class_="clusters")
    return _plan_page(title, (element("h1", title or "Plans"), compared, *below), {"step_s": []}, command)


def plan_fragment(plan: PlanData) -> str:
    """The choice and its main figures as a table, without a style, for a notebook."""
    rows: Iterable[tuple[str, str]] = summary(plan)
    if not plan.get("cluster"):
        rows = [("chosen", composition(plan["strategy"])), *_remarks(plan)]
    return tostring(element("table", *map(row, rows)), encoding="unicode", method="html")


def _plan_page(title: str, content: Iterable[Element], data: Mapping[str, Any], command: str) -> str:
    script = _piece("plan.js")
    made: list[HtmlNode] = [f"atorch {version('atorch')}, {date.today()}"]
    made += [": ", element("code", command)] if command else []
    embedded = element("script", _embedded(data), id="plan-data", type="application/json")
    content = (*content, element("footer", *made, class_="soft"), embedded, element("script", script))
    return page(f"Plan: {title}" if title else "Plan", content, f"script-src '{_hash(script)}'")


def page(title: str, content: Iterable[Element], allowed: str) -> str:
    """A page whose content security policy allows the common style, and the sources in `allowed`."""
    style = _piece("plan.css")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; {allowed}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    body = element("body", *content)
    return "<!DOCTYPE html>\n" + tostring(element("html", head, body, lang="en"), encoding="unicode", method="html")


def _choice(plan: PlanData, title: str = "") -> Iterator[Element]:
    """The strategy, its figures, and what it is compared with."""
    if title or not plan.get("cluster"):
        yield element("h1", title or "Plan")
    yield element("p", headline(plan), class_="soft")
    if plan.get("solved"):
        yield element("p", plan["solved"]["words"])
        if tried := list(of_search(plan)):
            yield table(("model", "parameters", "", "step"), tried)
    yield element("p", *(element("span", name, class_="method") for name in plan["strategy"] or ("plain training",)))
    if plan.get("load_strategy") is not None:
        copied = element("pre", as_list(plan["load_strategy"]))
        button = element("button", "Copy", type="button", class_="copy")
        yield element("details", element("summary", "The strategy, for load_strategy or a file"), button, copied)
    if plan["estimate"]:
        boxes = (element("div", element("dt", name), element("dd", figure)) for name, figure in facts(plan))
        yield element("dl", *boxes, class_="facts")
    yield table(("", ""), _remarks(plan), class_="remarks")
    yield from (element("p", f"Note: {note}.") for note in plan.get("notes", ()))
    if plan["estimate"]:
        yield from _estimates(plan)


def _remarks(plan: PlanData) -> Iterator[tuple[str, str]]:
    if plan.get("cluster"):
        yield from remarks(plan)
    else:
        from atorch.report.text import steps

        yield from (("", sentence) for sentence in steps(plan).splitlines())
    if plan.get("numbers"):
        yield "numbers", plan["numbers"]


def _estimates(plan: PlanData) -> Iterator[Element]:
    shown = shown_estimates(plan, MAX_BARS)
    memory = _memory_bars(plan, shown)
    time = Bars.of([entry["estimate"]["time"] for _, entry in shown], format_seconds)
    yield section("Runners-up", _ranking(plan, shown))
    yield section("Memory of a device, by category", _memory_chart(plan, shown, memory))
    caption = f"One step of the slowest device, each kind of work together. {_legend(time)}"
    yield section("Where the step's time goes", time.chart(_of_each(shown, "time", dict), caption))
    if plan.get("counterfactuals"):
        nearest = _listed(nearest_changes(plan["counterfactuals"]))
        more = element("details", element("summary", "All that was tried"), _listed(plan["counterfactuals"]))
        yield section("What if", nearest, more)
    if plan.get("simulated"):
        rows = ((composition(entry["strategy"]), simulated(entry)) for entry in plan["simulated"])
        yield section("Simulated", table(("composition", "found"), rows))


def _details(plan: PlanData) -> Iterator[Element]:
    """Every candidate, the reasons against them, and the basis of the search."""
    memory = _memory_bars(plan, shown_estimates(plan, MAX_BARS) if plan["estimate"] else ())
    yield element(
        "section", element("h2", "Every candidate"), *_candidates(plan), *_why_not(plan, memory), class_="long"
    )
    counts = ((axis, counted(values)) for axis, values in varied(plan.get("counts_by_axis", {})))
    yield section("What was searched", table(("axis", "compositions by value"), counts))
    if plan.get("cluster"):
        figures = table(("figure", "value", "source"), cluster_rows(plan["cluster"]))
        yield section("The cluster", figures, is_long=True)


def _memory_bars(plan: PlanData, shown: Sequence[tuple[str, PlanData]]) -> Bars:
    """Bars to the scale of the device; longer ones are cut off at twice its memory."""
    compositions = [*(entry for _, entry in shown), *plan["rejected"]]
    estimates = [entry["estimate"] for entry in compositions if entry.get("estimate")]
    limits = {"limit": plan["memory_bytes"], "usable": usable_bytes(plan)}
    bars = Bars.of([held(estimate["memory"]) for estimate in estimates], format_bytes, limits)
    return replace(bars, whole=min(bars.whole, 2 * plan["memory_bytes"]))


def _memory_chart(plan: PlanData, shown: Sequence[tuple[str, PlanData]], bars: Bars) -> Element:
    """A bar for each strategy that is compared."""
    has = format_bytes(plan["memory_bytes"])
    near = Bars.of([held(entry["estimate"]["memory"]) for _, entry in shown], format_bytes, bars.limits)
    more = reserved(plan["estimate"]["memory"])
    caption = f"The line is what a device has, {has}; the dashed one, what may be used of it."
    caption += f" In addition to the tensors of the chosen one, {more}." if more else ""
    caption += f" {_legend(near)}"
    return replace(near, names=bars.names).chart(_of_each(shown, "memory", held), caption)


def _of_each(
    shown: Sequence[tuple[str, PlanData]], figures: str, of: Callable[[Mapping[str, float]], Mapping[str, float]]
) -> list[tuple[str, Mapping[str, float]]]:
    """(label, values) of each strategy that is compared, with its number in the table."""
    return [(_numbered(number, why), of(entry["estimate"][figures])) for number, (why, entry) in enumerate(shown, 1)]


def _numbered(number: int, why: str) -> str:
    return f"{number}\u00a0{why}".replace(" ", "\u00a0")  # on one line


def _ranking(plan: PlanData, shown: Sequence[tuple[str, PlanData]]) -> Element:
    rows = (
        (
            _numbered(number, why),
            composition(entry["strategy"]),
            format_seconds(entry["estimate"]["step_s"]),
            "" if why == "chosen" else slower(plan, entry["estimate"]),
            format_bytes(entry["estimate"]["peak_bytes"]),
        )
        for number, (why, entry) in enumerate(shown, 1)
    )
    made = table(("", "composition", "step", "vs chosen", "peak"), rows, numbers={2, 3, 4})
    for line, (why, _) in zip(made[-1], shown, strict=True):
        line.set("class", why)
    return made


def _legend(bars: Bars) -> str:
    text = legend(bars.names)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _listed(counterfactuals: Iterable[PlanData]) -> Element:
    return element("ul", *(element("li", counterfactual(entry)) for entry in counterfactuals))


def _candidates(plan: PlanData) -> Iterator[Element]:
    """The scatter plot, and the elements that the script fills."""
    yield element(
        "div",
        element("input", id="filter", type="search", placeholder="filter, such as: tensor 8 + fsdp"),
        element("span", id="kinds", class_="controls"),
        element("output", id="count"),
        class_="controls",
    )
    canvas = element("canvas", id="scatter", tabindex="0", aria_label="every candidate, memory against time")
    yield element("div", canvas, *(element("div", id=name, hidden="hidden") for name in ("ring", "tip")), class_="plot")
    yield table(("the first of these", "step", "peak", "why not"), (), numbers={1, 2}, id="matches")
    yield element("p", "No candidate matches the filter.", id="no-match", hidden="hidden")
    pareto = (
        (composition(point["strategy"]), format_seconds(point["step_s"]), format_bytes(point["peak_bytes"]))
        for point in plan.get("pareto", ())
    )
    front = table(("least time for its memory", "step", "peak"), pareto, numbers={1, 2})
    yield element("details", element("summary", "The Pareto front as a table"), front)


def _why_not(plan: PlanData, bars: Bars) -> Iterator[Element]:
    """The rejected compositions of the plan, each with a bar of its bytes by category, to one scale."""
    yield element("h2", "Why not")
    made = table(("composition", "", "step", "peak", "of the device", "reason"), (), numbers={2, 3}, id="why-not")
    for entry in sorted(plan["rejected"], key=step_of):
        step, peak, memory = "", "", element("span")
        if entry.get("estimate"):
            step, peak = format_seconds(entry["estimate"]["step_s"]), format_bytes(entry["estimate"]["peak_bytes"])
            memory = bars.bar(held(entry["estimate"]["memory"]))
        line = row((composition(entry["strategy"]), why_not(entry["why"]), step, peak, memory, entry["reason"]), {2, 3})
        line.set("data-kind", entry["why"])
        made[-1].append(line)
    yield made
    yield element("p", "None of these matches the filter.", id="no-reason", hidden="hidden")
    yield bars.legend()


def _embedded(data: Any) -> str:
    """JSON that cannot end the element that it is in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _piece(name: str) -> str:
    return files("atorch.report").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source expression that allows exactly this text, W3C Content Security Policy 3, section 2.3.1."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def columns(plan: PlanData) -> dict[str, Any]:
    """Plain JSON data: `labels` index `parts`, `why` indexes `reasons`, `shares` are percents of the peak."""
    candidates = plan.get("candidates") or {"step_s": [], "peak_bytes": [], "label": [], "why": []}
    parts: dict[str, int] = {}
    reasons: dict[str, int] = {}
    labels = [_indices(label.split(SEPARATOR), parts) for label in candidates["label"]]
    why = _indices(candidates["why"], reasons)
    return {
        "step_s": _rounded(candidates["step_s"]),
        "peak_bytes": _rounded(candidates["peak_bytes"]),
        "labels": labels,
        "parts": list(parts),
        "why": why,
        "reasons": list(reasons),
        "shares": {
            name: _percent(values, candidates["peak_bytes"])
            for name, values in candidates.get("memory", {}).items()
            if name != SLACK and any(values)
        },
        "pareto": [{name: point[name] for name in ("step_s", "peak_bytes")} for point in plan.get("pareto", ())],
        "chosen": {"label": composition(plan["strategy"])}
        | {name: (plan["estimate"] or {}).get(name) for name in ("step_s", "peak_bytes")},
        "limit_bytes": usable_bytes(plan),
    }


def _indices(names: Iterable[str], numbers: dict[str, int]) -> list[int]:
    """The number of each name; a new name gets the next one."""
    return [numbers.setdefault(name or "", len(numbers)) for name in names]


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _percent(values: Iterable[float], wholes: Iterable[float]) -> list[int]:
    return [round(100 * value / whole) if whole else 0 for value, whole in zip(values, wholes, strict=True)]


@dataclass(frozen=True)
class Bars:
    """The common parts of bars: the categories, the value of a full bar, the form of figures, and limits."""

    names: Sequence[str]
    whole: float
    form: Callable[[float], str]
    limits: Values = field(default_factory=dict)  # class of a line → its value

    @classmethod
    def of(cls, values: Sequence[Values], form: Callable[[float], str], limits: Values | None = None) -> Bars:
        """Bars with room for all of `values` and their limits."""
        names = dict.fromkeys(name for bar in values for name, value in bar.items() if value > 0)
        whole = max([sum(bar.values()) for bar in values] + list((limits or {}).values()), default=0.0)
        return cls(tuple(names), whole or 1.0, form, limits or {})

    def bar(self, values: Values) -> Element:
        """One bar; each piece has its figure as a tooltip."""
        pieces, start = [], 0.0
        for index, name in enumerate(self.names):
            width = values.get(name, 0.0) / self.whole * 100
            tip = element("title", f"{name.replace('_', ' ')}: {self.form(values.get(name, 0.0))}")
            place = {"x": f"{start:.3f}", "width": f"{width:.3f}", "height": "1"}
            pieces.append(element("rect", tip, **place, class_=_colour(index)))
            start += width
        for name, value in self.limits.items():
            at = f"{value / self.whole * 100:.3f}"
            pieces.append(element("line", x1=at, x2=at, y1="0", y2="1", class_=name))
        return element("svg", *pieces, viewBox="0 0 100 1", preserveAspectRatio="none", role="img")

    def chart(self, rows: Sequence[tuple[str, Values]], caption: str) -> Element:
        """A labelled bar of each row, with a legend."""
        lines = [
            element(
                "div",
                element("span", label),
                self.bar(values),
                element("output", self.form(sum(values.values()))),
                class_="bar chosen" if "chosen" in label else "bar",
            )
            for label, values in rows
        ]
        return element("figure", *lines, self.legend(), element("figcaption", caption))

    def legend(self) -> Element:
        keys = []
        for index, name in enumerate(self.names):
            square = element("rect", width="1", height="1", class_=_colour(index))
            keys.append(element("span", element("svg", square, viewBox="0 0 1 1"), name.replace("_", " ")))
        return element("div", *keys, class_="legend")


def _colour(index: int) -> str:
    return f"k{index % NUM_COLOURS}"
