"""The two pictures of a profile: memory over time, and where chunks are; each as PNG and as a page.

They are those of PatrickStar's visualizer. Memory: red is all that is in use, blue what chunks take, over green, blue
and purple for forward, backward and optimizer. Access: a row a chunk, fp16 parameters at the bottom, red while it is on
the device and blue while it is on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from atorch.errors import ArgumentError, CapabilityError
from atorch.patrickstar.profile import MemoryEvent, Profile, Tier
from atorch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from atorch.report.phases import Shade

FigType = Literal["memory", "access"]
TOTAL, CHUNKS = "#cf3a3a", "#2f6db5"
ORDER = ("PARAM_FP16", "PARAM_FP32", "VARIANCE", "MOMENTUM")
"""The guide's sections, from the bottom; others come above them."""
NAMES: Mapping[Tier, str] = {"GPU": "device", "CPU": "host"}


@dataclass(frozen=True)
class Drawing:
    """A figure, and what it shows in words and numbers."""

    title: str
    said: str
    figure: Figure
    facts: tuple[tuple[str, str], ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def png(self) -> bytes:
        from atorch.report.picture import png

        return png(self.figure)

    def page(self) -> bytes:
        """As a page of HTML that needs nothing else."""
        from atorch.report.picture import picture_page

        return picture_page(self.title, self.said, self.figure, self.facts, self.head, self.rows).encode()


def draw(profile: Profile, fig_type: FigType, memory_type: Tier = "GPU") -> Drawing:
    """The picture of a profile from its first phase on; `memory_type` is for `memory` alone.

    Raises:
        ArgumentError: nothing that it would show was recorded.
        CapabilityError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401  what draws the figures
    except ImportError as error:
        raise CapabilityError("pictures of a profile need matplotlib; install atorch[plots]") from error
    training = profile.from_first_phase()
    return _memory(training, memory_type) if fig_type == "memory" else _access(training)


def _memory(profile: Profile, tier: Tier) -> Drawing:
    from atorch.report.memory_curves import Curve, memory_figure

    events = [each for each in profile.memory if each.tier == tier]
    if not events:
        raise ArgumentError(f"the profile has no memory of the {NAMES[tier]}: no engine worked while it was recorded")
    times = [each.time_s for each in events]
    curves = (
        Curve("all memory in use", TOTAL, times, [each.total_bytes for each in events]),
        Curve("chunks", CHUNKS, times, [each.chunk_bytes for each in events]),
    )
    budget = profile.budget_bytes if tier == "GPU" else None
    where = f"{NAMES[tier].capitalize()} memory" + (f" ({profile.device})" if tier == "GPU" and profile.device else "")
    most, most_chunks = (max(curve.num_bytes) for curve in curves)
    facts = [("most in use", format_bytes(most)), ("most in chunks", format_bytes(most_chunks))]
    facts += [("budget", format_bytes(budget))] if budget is not None else []
    facts += [("training", format_seconds(profile.end_s)), ("moments", f"{events[-1].moment:,}")]
    return Drawing(
        title=where,
        said=f"{where} over time: at most {format_bytes(most)} in use, of which chunks {format_bytes(most_chunks)}.",
        figure=memory_figure(where, curves, _shades(profile), profile.end_s, budget),
        facts=tuple(facts),
        head=("phase", "times", "time", "most in use", "most in chunks"),
        rows=tuple(_by_phase(profile, events)),
    )


def _by_phase(profile: Profile, events: list[MemoryEvent]) -> Iterator[tuple[str, ...]]:
    """(phase, times, seconds, most bytes in all and in chunks), in the order in which phases first come."""
    begins = [(each.moment, each.name) for each in profile.phases]
    within: dict[str, list[MemoryEvent]] = defaultdict(list)
    position = -1
    for event in events:
        while position + 1 < len(begins) and begins[position + 1][0] < event.moment:
            position += 1
        if position >= 0:
            within[begins[position][1]].append(event)
    spent: dict[str, list[float]] = defaultdict(list)
    for span in profile.spans():
        spent[span.name].append(span.end_s - span.start_s)
    for name, seconds in spent.items():
        total = max((each.total_bytes for each in within[name]), default=None)
        chunks = max((each.chunk_bytes for each in within[name]), default=None)
        most = ("" if size is None else format_bytes(size) for size in (total, chunks))
        yield name, f"{len(seconds):,}", format_seconds(sum(seconds)), *most


def _access(profile: Profile) -> Drawing:
    from atorch.report.chunk_locations import Bar, locations_figure

    kinds = sorted(profile.kinds(), key=lambda kind: (kind not in ORDER, ORDER.index(kind) if kind in ORDER else 0))
    if not kinds:
        raise ArgumentError("the profile has no chunks: no engine worked while it was recorded")
    sections = {}
    for kind in kinds:
        stays = list(profile.stays(kind))
        row = {chunk: index for index, chunk in enumerate(sorted({stay.chunk for stay in stays}))}
        sections[kind] = [Bar(row[chunk], start, end, tier == "GPU") for chunk, start, end, tier in stays]
    title = "Location of chunks" + (f" ({profile.device})" if profile.device else "")
    fetches = sum(each.tier == "GPU" and each.num_bytes > 0 for each in profile.chunks)
    fetched = sum(each.num_bytes for each in profile.chunks if each.tier == "GPU")
    facts = [("came to the device", f"{fetches:,} chunks"), ("of", format_bytes(fetched))]
    facts += [("training", format_seconds(profile.end_s))]
    return Drawing(
        title=title,
        said=f"Where chunks were over time, by kind, {' below '.join(kinds)}: red on the device, blue on the host.",
        figure=locations_figure(title, sections, _shades(profile), profile.end_s),
        facts=tuple(facts),
        head=("kind", "chunks", "came to the device", "bytes", "time on the device"),
        rows=tuple(_by_kind(profile, kind) for kind in kinds),
    )


def _by_kind(profile: Profile, kind: str) -> tuple[str, ...]:
    """(kind, chunks, how often one came to the device, with how many bytes, share of their time on it)."""
    came = [each for each in profile.chunks if each.kind == kind and each.tier == "GPU" and each.num_bytes]
    stays = list(profile.stays(kind))
    there, all_time = (
        sum(stay.end_s - stay.start_s for stay in stays if stay.tier in tiers) for tiers in (("GPU",), ("GPU", "CPU"))
    )
    share = f"{there / all_time:.1%}" if all_time else ""
    chunks = len({stay.chunk for stay in stays})
    return kind, f"{chunks:,}", f"{len(came):,}", format_bytes(sum(each.num_bytes for each in came)), share


def _shades(profile: Profile) -> list[Shade]:
    from atorch.report.phases import Shade

    return [Shade(*span) for span in profile.spans()]
