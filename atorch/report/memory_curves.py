"""Memory in use over time: in all, and by chunks, with the phases of training behind the curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from atorch.report.phases import Shade, in_style, over_time, shade, time_scale
from atorch.units import GiB, KiB, MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """Bytes over seconds; each value holds until the next."""

    name: str
    colour: str
    times_s: Sequence[float]
    num_bytes: Sequence[int]


def memory_figure(
    title: str, curves: Sequence[Curve], shades: Sequence[Shade], end_s: float, budget_bytes: int | None
) -> Figure:
    """The curves, and the budget as a dashed line where it is within twice what they reach."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    most = max((each for curve in curves for each in curve.num_bytes), default=0)
    unit, size = next(((unit, size) for unit, size in (("GiB", GiB), ("MiB", MiB)) if most >= size), ("KiB", KiB))
    scale = time_scale(end_s)
    with in_style():
        figure = Figure(figsize=(8.0, 3.8), layout="constrained")
        axes = figure.add_subplot()
        phases = shade(axes, shades, scale, opacity=0.14)
        lines: list[Line2D] = []
        for name, colour, times, values in curves:
            along = [each * scale.per_s for each in (*times, end_s)]
            up = [each / size for each in (*values, *values[-1:])]
            lines += axes.plot(along[: len(up)], up, color=colour, linewidth=1.4, drawstyle="steps-post", label=name)
        top = most
        if budget_bytes is not None and budget_bytes <= 2 * most:
            top = max(most, budget_bytes)
            lines.append(
                axes.axhline(budget_bytes / size, color="#1d2430", linewidth=0.9, linestyle=(0, (5, 4)), label="budget")
            )
        axes.set_ylim(0, 1.06 * top / size or 1.0)
        axes.set_ylabel(f"memory ({unit})")
        over_time(axes, end_s, scale)
        axes.set_title(title, loc="left")
        figure.legend(handles=[*lines, *phases], loc="outside lower center", ncols=len(lines) + len(phases))
    return figure
