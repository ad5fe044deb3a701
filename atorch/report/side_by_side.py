"""Plans of one job for several clusters side by side, one column per cluster.

All functions take the data of `Plan.to_json_data`; in place of a missing plan, they take the reason in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atorch.report.figures import band, composition, memory_band, usable_bytes
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

Answer = Mapping[str, Any] | str  # a plan, or why there is none
Answers = Sequence[tuple[str, Answer]]  # by the name of the cluster

NAMES, EACH = 13, 19  # widths: of the first column, and the least of a cluster's


def beside_report(answers: Answers, title: str = "") -> RenderableType:
    """The plans as a rich renderable, with as many clusters in a table as there is room for."""
    from rich.console import Group
    from rich.text import Text

    from atorch.report.width_aware import Sized

    plans = [answer for _, answer in answers if not isinstance(answer, str)]
    fastest = max(map(_rate, plans), default=0.0)

    def drawn(width: int) -> RenderableType:
        number = max(1, (width - NAMES) // EACH)
        parts = (_table(answers[start : start + number], fastest) for start in range(0, len(answers), number))
        return Group(Text(title, style="dim", no_wrap=True, overflow="ellipsis"), *parts)

    return Sized(drawn)


def _table(answers: Answers, fastest: float) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True, style="dim")
    for name, _ in answers:
        table.add_column(Text(name, overflow="fold"), overflow="fold", ratio=1)
    cells = [dict(_rows(answer, fastest)) for _, answer in answers]
    for name in dict.fromkeys(name for column in cells for name in column):
        table.add_row(name, *(Text(column.get(name, "")) for column in cells))
    return table


def _rate(plan: Mapping[str, Any]) -> float:
    """Samples a second, since batches may differ between clusters."""
    return float(plan["global_batch"] / plan["estimate"]["step_s"])


def _rows(answer: Answer, fastest: float) -> Iterator[tuple[str, str]]:
    """(name, figure) of one cluster's plan."""
    if isinstance(answer, str):
        yield "step", answer
        return
    estimate, cluster = answer["estimate"], answer["cluster"]
    devices = cluster.get("num_nodes", 1) * cluster.get("devices_per_node", 1)
    yield "devices", f"{devices} × {cluster['device']['name']}"
    yield "batch", f"{answer['global_batch']:,} samples"
    yield "step", format_seconds(estimate["step_s"])
    if band(estimate):
        yield "between", band(estimate)
    yield "a sample", "fastest" if _rate(answer) == fastest else f"{fastest / _rate(answer):.3g}× as long"
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
    if answer.get("fit"):
        yield "fits", f"{answer['fit']['what']} {answer['fit']['size']:,}"
    yield "chosen", composition(answer["strategy"])
