"""A figure as a file: PNG for papers, or a page that needs nothing else, with the figures behind it in words."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from atorch.report.elements import element, table
from atorch.report.html import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 200


def png(figure: Figure) -> bytes:
    return _drawn(figure, "png")


def picture_page(
    title: str,
    said: str,
    figure: Figure,
    facts: Iterable[tuple[str, str]],
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> str:
    """A page with the figure, `said` in words for who cannot see it, and the figures behind it as facts and a table."""
    source = "data:image/svg+xml;base64," + base64.b64encode(_drawn(figure, "svg")).decode()
    drawn = element("img", src=source, alt=said)
    boxes = (element("div", element("dt", name), element("dd", value)) for name, value in facts)
    content = (
        element("h1", title),
        element("p", said, class_="soft"),
        element("figure", drawn),
        element("dl", *boxes, class_="facts"),
        table(head, rows, numbers=range(1, len(head))),
    )
    return page(title, content, "img-src data:")


def _drawn(figure: Figure, kind: str) -> bytes:
    from matplotlib import rc_context

    file = io.BytesIO()
    # Without a date and random names, the same profile makes the same file.
    unnamed = {"Date": None} if kind == "svg" else {}
    with rc_context({"svg.hashsalt": "atorch"}):
        figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=unnamed)
    return file.getvalue()
