"""Plans, figures and schedules as text and pages.

A page is a tree of elements: text that is put in comes out as text, and never as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element

HtmlNode = Element | str


def element(tag: str, *content: HtmlNode, **attributes: str) -> Element:
    """An element with text and elements in it; underscores in keywords become hyphens, but not a trailing one."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for node in content:
        if isinstance(node, Element):
            made.append(node)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + node
        else:
            made.text = (made.text or "") + node
    return made


def section(heading: str, *content: HtmlNode, is_long: bool = False) -> Element:
    """A part of the page under a heading; a long one may be split between printed pages."""
    return element("section", element("h2", heading), *content, class_="long" if is_long else "short")


def table(
    head: Sequence[str], rows: Iterable[Sequence[HtmlNode]], numbers: Iterable[int] = (), **attributes: str
) -> Element:
    """A table; `numbers` are the columns that hold figures."""
    figures = frozenset(numbers)
    body = element("tbody", *(row(cells, figures) for cells in rows))
    return element("table", element("thead", row(head, figures, "th")), body, **attributes)


def row(cells: Sequence[HtmlNode], numbers: Iterable[int] = (), tag: str = "td") -> Element:
    made = [element(tag, cell) for cell in cells]
    for index in numbers:
        made[index].set("class", "number")
    return element("tr", *made)
