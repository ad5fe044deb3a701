"""Stacked bars as SVG: figures by category, all to one scale, every category in its own colour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from atorch.report.elements import element

NUM_COLOURS = 10  # that the page's style has

Values = Mapping[str, float]


@dataclass(frozen=True)
class Bars:
    """Properties that bars share: the categories, the full length, the form of figures, and lines across."""

    names: Sequence[str]
    whole: float
    form: Callable[[float], str]
    limits: Values = field(default_factory=dict)  # class of a line → where it stands

    @classmethod
    def of(cls, values: Sequence[Values], form: Callable[[float], str], limits: Values | None = None) -> Bars:
        """Bars that have room for all of `values` and their limits."""
        names = dict.fromkeys(name for each in values for name, value in each.items() if value > 0)
        whole = max([sum(each.values()) for each in values] + list((limits or {}).values()), default=0.0)
        return cls(tuple(names), whole or 1.0, form, limits or {})

    def bar(self, values: Values) -> Element:
        """One bar; each piece says its figure where it is pointed at."""
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
        """A labelled bar of each, with a legend."""
        lines = [
            element(
                "div",
                element("span", label),
                self.bar(values),
                element("output", self.form(sum(values.values()))),
                class_="bar",
            )
            for label, values in rows
        ]
        return element("figure", *lines, self.legend(), element("figcaption", caption))

    def legend(self) -> Element:
        """The colour of each category."""
        keys = []
        for index, name in enumerate(self.names):
            square = element("rect", width="1", height="1", class_=_colour(index))
            keys.append(element("span", element("svg", square, viewBox="0 0 1 1"), name.replace("_", " ")))
        return element("div", *keys, class_="legend")


def _colour(index: int) -> str:
    return f"k{index % NUM_COLOURS}"
