"""The two pictures of a profile: memory over time, and locations of chunks; each as PNG and as an HTML page.

They follow PatrickStar's visualizer. Memory: red is all memory in use, blue that of chunks, on a background of green,
blue and purple for forward, backward and optimizer. Access: one row per chunk, fp16 parameters at the bottom, red while
it is on the device and blue while it is on the host.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from atorch.errors import ArgumentError, CapabilityError
from atorch.patrickstar.profiler import MemoryTier, PhaseSpan, Profile
from atorch.report import element
from atorch.report.html import page
from atorch.units import GiB, KiB, MiB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

FigType = Literal["memory", "access"]
TOTAL, CHUNKS = "#cf3a3a", "#2f6db5"
ORDER = ("PARAM_FP16", "PARAM_FP32", "VARIANCE", "MOMENTUM")
"""The guide's sections, from the bottom."""
NAMES: Mapping[MemoryTier, str] = {"GPU": "device", "CPU": "host"}
DOTS_PER_INCH = 200
DEVICE, HOST = "#cf3a3a", "#3f77bd"
_MANY = 4000  # rectangles; above it they are rasterized, since a page would draw them slowly
_DISTINCT_ROWS = 160  # above it there is no room for a gap between rows

PHASES: Mapping[str, str] = {"forward": "#2e9e4f", "backward": "#2f6db5", "optimizer": "#8e5bbf"}
_STYLE: Mapping[str, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": "#667085", "axes.labelcolor": "#1d2430", "xtick.color": "#667085",
    "ytick.color": "#667085", "xtick.labelcolor": "#1d2430", "ytick.labelcolor": "#1d2430", "legend.frameon": False,
    "legend.fontsize": 8.5,
}  # fmt: skip
Curve = tuple[str, str, list[float], list[int]]
"""A name, a colour, and bytes over seconds, as steps: each value lasts until the next."""
Bar = tuple[int, float, float, bool]
"""A row with a chunk, the start and end of its stay in seconds, and True if that is on the device."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its title, and what it shows in words."""

    title: str
    said: str
    figure: Figure

    def png(self) -> bytes:
        return _drawn(self.figure, "png")

    def page(self) -> bytes:
        """A self-contained HTML page: the figure with alternative text."""
        source = "data:image/svg+xml;base64," + base64.b64encode(_drawn(self.figure, "svg")).decode()
        content = (
            element("h1", self.title),
            element("p", self.said, class_="soft"),
            element("figure", element("img", src=source, alt=self.said)),
        )
        return page(self.title, content, "img-src data:").encode()


def draw(profile: Profile, fig_type: FigType, memory_type: MemoryTier = "GPU") -> Drawing:
    """Draw a profile from its first phase on; `memory_type` applies to `memory` only.

    Raises:
        ArgumentError: the profile has no events for the picture.
        CapabilityError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401  needed to draw the figures
    except ImportError as error:
        raise CapabilityError("pictures of a profile need matplotlib: pip install matplotlib") from error
    training = profile.from_first_phase()
    return _memory(training, memory_type) if fig_type == "memory" else _access(training)


def _memory(profile: Profile, tier: MemoryTier) -> Drawing:
    events = [event for event in profile.memory if event.tier == tier]
    if not events:
        raise ArgumentError(f"the profile has no memory of the {NAMES[tier]}: no engine worked while it was recorded")
    times = [event.time_s for event in events]
    curves = (
        ("all memory in use", TOTAL, times, [event.total_bytes for event in events]),
        ("chunks", CHUNKS, times, [event.chunk_bytes for event in events]),
    )
    budget = profile.budget_bytes if tier == "GPU" else None
    where = f"{NAMES[tier].capitalize()} memory" + (f" ({profile.device})" if tier == "GPU" and profile.device else "")
    most, most_chunks = (max(values) for *_, values in curves)
    said = f"{where} over time: at most {format_bytes(most)} in use, of which chunks {format_bytes(most_chunks)}."
    return Drawing(where, said, memory_figure(where, curves, profile.spans(), profile.end_s, budget))


def _access(profile: Profile) -> Drawing:
    kinds = [kind for kind in ORDER if kind in profile.kinds()]
    if not kinds:
        raise ArgumentError("the profile has no chunks: no engine worked while it was recorded")
    sections = {}
    for kind in kinds:
        stays = list(profile.stays(kind))
        row = {chunk: index for index, chunk in enumerate(sorted({stay.chunk for stay in stays}))}
        sections[kind] = [(row[chunk], start, end, tier == "GPU") for chunk, start, end, tier in stays]
    title = "Location of chunks" + (f" ({profile.device})" if profile.device else "")
    fetched = [event.num_bytes for event in profile.chunks if event.tier == "GPU" and event.num_bytes > 0]
    said = (
        f"Where chunks were over time, by kind, {' below '.join(kinds)}: red on the device, blue on the host. "
        f"{len(fetched):,} times a chunk came to the device, {format_bytes(sum(fetched))} in all."
    )
    return Drawing(title, said, locations_figure(title, sections, profile.spans(), profile.end_s))


def _drawn(figure: Figure, kind: str) -> bytes:
    from matplotlib import rc_context

    file = io.BytesIO()
    # Reproducible files: no date, and a fixed salt for element ids.
    unnamed = {"Date": None} if kind == "svg" else {}
    with rc_context({"svg.hashsalt": "atorch"}):
        figure.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=unnamed)
    return file.getvalue()


def _scale(end_s: float) -> tuple[str, float]:
    """The unit of time, and its number in a second."""
    return ("s", 1.0) if end_s >= 2.0 else ("ms", 1e3)


def _shaded(axes: Axes, spans: Sequence[PhaseSpan], per_s: float, opacity: float) -> list[Patch]:
    """Colour the phases over the full height of `axes`; return the patches for the legend."""
    from matplotlib.patches import Patch

    patches: list[Patch] = []
    for name, colour in PHASES.items():
        bars = [(start * per_s, (end - start) * per_s) for phase, start, end in spans if phase == name]
        if bars:
            full_height = axes.get_xaxis_transform()
            axes.broken_barh(
                bars, (0, 1), transform=full_height, facecolor=colour, alpha=opacity, zorder=0, linewidth=0
            )
            patches.append(Patch(facecolor=colour, alpha=opacity, label=name))
    return patches


def _let_time_run(axes: Axes, end_s: float) -> None:
    unit, per_s = _scale(end_s)
    axes.set_xlim(0, max(end_s * per_s, 1e-9))
    axes.set_xlabel(f"time ({unit})")


def memory_figure(
    title: str, curves: Sequence[Curve], spans: Sequence[PhaseSpan], end_s: float, budget_bytes: int | None
) -> Figure:
    """Plot the curves, and the budget as a dashed line unless it exceeds twice their maximum."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    most = max((value for *_, values in curves for value in values), default=0)
    unit, size = next(((unit, size) for unit, size in (("GiB", GiB), ("MiB", MiB)) if most >= size), ("KiB", KiB))
    _, per_s = _scale(end_s)
    with rc_context(cast(Any, _STYLE)):
        figure = Figure(figsize=(8.0, 3.8), layout="constrained")
        axes = figure.add_subplot()
        phases = _shaded(axes, spans, per_s, opacity=0.14)
        lines: list[Line2D] = []
        for name, colour, times, values in curves:
            along = [time * per_s for time in (*times, end_s)]
            up = [value / size for value in (*values, *values[-1:])]
            lines += axes.plot(along[: len(up)], up, color=colour, linewidth=1.4, drawstyle="steps-post", label=name)
        top = most
        if budget_bytes is not None and budget_bytes <= 2 * most:
            top = max(most, budget_bytes)
            lines.append(
                axes.axhline(budget_bytes / size, color="#1d2430", linewidth=0.9, linestyle=(0, (5, 4)), label="budget")
            )
        axes.set_ylim(0, 1.06 * top / size or 1.0)
        axes.set_ylabel(f"memory ({unit})")
        _let_time_run(axes, end_s)
        axes.set_title(title, loc="left")
        figure.legend(handles=[*lines, *phases], loc="outside lower center", ncols=len(lines) + len(phases))
    return figure


def locations_figure(
    title: str, sections: Mapping[str, Sequence[Bar]], spans: Sequence[PhaseSpan], end_s: float
) -> Figure:
    """Plot the sections from the bottom up, each with one row per chunk, under a strip of the phases."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    _, per_s = _scale(end_s)
    with rc_context(cast(Any, _STYLE)):
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        strip, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 30))
        strip.set_axis_off()
        strip.set_title(title, loc="left")
        phases = _shaded(strip, spans, per_s, opacity=0.4)
        _draw(axes, sections, per_s)
        _let_time_run(axes, end_s)
        places = [Patch(facecolor=DEVICE, label="on the device"), Patch(facecolor=HOST, label="on the host")]
        figure.legend(handles=[*places, *phases], loc="outside lower center", ncols=len(places) + len(phases))
    return figure


def _draw(axes: Axes, sections: Mapping[str, Sequence[Bar]], per_s: float) -> None:
    from matplotlib.collections import PolyCollection

    heights = {name: 1 + max(row for row, *_ in bars) for name, bars in sections.items() if bars}
    total = sum(heights.values())
    gap = max(0.02 * total, 0.6)
    inset = 0.06 if total <= _DISTINCT_ROWS else 0.0
    corners: dict[bool, list[list[tuple[float, float]]]] = {True: [], False: []}
    middles, names, base = [], [], 0.0
    for name, height in heights.items():
        for row, start_s, end_s, on_device in sections[name]:
            left, right = start_s * per_s, end_s * per_s
            low, high = base + row + inset, base + row + 1 - inset
            corners[on_device].append([(left, low), (left, high), (right, high), (right, low)])
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
