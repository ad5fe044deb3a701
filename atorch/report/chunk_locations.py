"""Chunk locations over time: a row a chunk, a section a kind of chunk, red on the device and blue on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from atorch.report.phases import Scale, Shade, in_style, over_time, shade, time_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEVICE, HOST = "#cf3a3a", "#3f77bd"
_MANY = 4000  # rectangles, above which a page would be slow to draw: they become dots
_DISTINCT_ROWS = 160  # above which there is no room for a line between rows


class Bar(NamedTuple):
    """A chunk in one place, from one time to another, in seconds."""

    row: int
    start_s: float
    end_s: float
    on_device: bool


def locations_figure(
    title: str, sections: Mapping[str, Sequence[Bar]], shades: Sequence[Shade], end_s: float
) -> Figure:
    """The sections from the bottom to the top, each with as many rows as it has chunks, under a strip of the phases."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    scale = time_scale(end_s)
    with in_style():
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 30))
        strip.set_axis_off()
        strip.set_title(title, loc="left")
        phases = shade(strip, shades, scale, opacity=0.4)
        _draw(axes, sections, scale)
        over_time(axes, end_s, scale)
        places = [Patch(facecolor=DEVICE, label="on the device"), Patch(facecolor=HOST, label="on the host")]
        figure.legend(handles=[*places, *phases], loc="outside lower center", ncols=len(places) + len(phases))
    return figure


def _draw(axes: Axes, sections: Mapping[str, Sequence[Bar]], scale: Scale) -> None:
    from matplotlib.collections import PolyCollection

    heights = {name: 1 + max(bar.row for bar in bars) for name, bars in sections.items() if bars}
    total = sum(heights.values())
    gap = max(0.02 * total, 0.6)
    inset = 0.06 if total <= _DISTINCT_ROWS else 0.0
    corners: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
    middles, names, base = [], [], 0.0
    for name, height in heights.items():
        for bar in sections[name]:
            left, right = bar.start_s * scale.per_s, bar.end_s * scale.per_s
            low, high = base + bar.row + inset, base + bar.row + 1 - inset
            corners[bar.on_device].append([(left, low), (left, high), (right, high), (right, low)])
        middles.append(base + height / 2)
        names.append(f"{name}\n{height} chunk{'s' * (height > 1)}")
        base += height + gap
    many = sum(map(len, corners.values())) > _MANY
    for on_device, rectangles in corners.items():
        colour = DEVICE if on_device else HOST
        axes.add_collection(PolyCollection(rectangles, facecolors=colour, linewidths=0, snap=False, rasterized=many))
    axes.set_ylim(0, max(base - gap, 1.0))
    axes.set_yticks(middles, names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
