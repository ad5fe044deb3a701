"""Common parts of charts over the seconds of a training run, with its phases in the background."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

PHASES: Mapping[str, str] = {"forward": "#2e9e4f", "backward": "#2f6db5", "optimizer": "#8e5bbf"}
"""The colours of PatrickStar's visualizer: green, blue and purple."""
_STYLE: Mapping[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#667085",
    "axes.labelcolor": "#1d2430",
    "xtick.color": "#667085",
    "ytick.color": "#667085",
    "xtick.labelcolor": "#1d2430",
    "ytick.labelcolor": "#1d2430",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}


class Shade(NamedTuple):
    """A phase from one time to another, in seconds."""

    name: str
    start_s: float
    end_s: float


class Scale(NamedTuple):
    """A unit of time, and its number in a second."""

    unit: str
    per_s: float


def in_style() -> AbstractContextManager[None]:
    """A context in which figures have one style."""
    from matplotlib import rc_context

    settings: Any = dict(_STYLE)
    return rc_context(settings)


def time_scale(end_s: float) -> Scale:
    """Seconds, or milliseconds below two seconds."""
    return Scale("s", 1.0) if end_s >= 2.0 else Scale("ms", 1e3)


def shade(axes: Axes, shades: Sequence[Shade], scale: Scale, opacity: float) -> list[Patch]:
    """Colour the phases over the full height of `axes`; return the patches for the legend."""
    from matplotlib.patches import Patch

    patches: list[Patch] = []
    for name, colour in PHASES.items():
        spans = [
            (phase.start_s * scale.per_s, (phase.end_s - phase.start_s) * scale.per_s)
            for phase in shades
            if phase.name == name
        ]
        if spans:
            axes.broken_barh(
                spans,
                (0, 1),
                transform=axes.get_xaxis_transform(),
                facecolor=colour,
                alpha=opacity,
                zorder=0,
                linewidth=0,
            )
            patches.append(Patch(facecolor=colour, alpha=opacity, label=name))
    return patches


def over_time(axes: Axes, end_s: float, scale: Scale) -> None:
    """Let the axis of time run from 0 to `end_s`."""
    axes.set_xlim(0, max(end_s * scale.per_s, 1e-9))
    axes.set_xlabel(f"time ({scale.unit})")
