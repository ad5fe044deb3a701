"""The timeline of a pipeline, and drawings of it, on a terminal and as a self-contained picture.

A row is a process, a box is a pass with the number of its micro-batch, and gaps are waiting. Of several stages on one
process, the later ones are lighter, as in Narayanan et al. 2021, arXiv 2104.04473, figure 4.

The clock is simulated: a forward pass takes one tick, a backward pass two, one each for gradients of inputs and of
weights if these are separate. Sending takes none. A pass starts when its process is free and its inputs are there:
activations of the previous stage, gradients of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import TYPE_CHECKING, NamedTuple
from xml.etree.ElementTree import Element, tostring

from atorch.errors import StrategyError
from atorch.report import element

if TYPE_CHECKING:
    from rich.text import Text

PassId = tuple[str, int, int]
"""(kind, stage, micro-batch); the kinds are those of `TICKS`."""
TICKS: Mapping[str, int] = {"forward": 1, "backward": 2, "input": 1, "weight": 1}
"""The ticks of a pass. `input` and `weight` are a backward pass in two parts."""


@dataclass(frozen=True, slots=True)
class TimedPass:
    kind: str
    stage: int
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The passes of each process, in order."""

    processes: Sequence[Sequence[TimedPass]]

    @property
    def num_ticks(self) -> int:
        """Ticks from the start of the first pass to the end of the last one."""
        return max(timed.end for placed in self.processes for timed in placed)

    @property
    def bubble(self) -> float:
        busy = sum(timed.end - timed.start for placed in self.processes for timed in placed)
        return 1.0 - busy / (self.num_ticks * len(self.processes))

    def stages(self, process: int) -> list[int]:
        """The stages that a process holds, in the order of the model."""
        return sorted({timed.stage for timed in self.processes[process]})

    def most_held(self, process: int) -> float:
        """The most micro-batches whose activations a process holds at once, as a mean over its stages."""
        placed = self.processes[process]
        begun = [(timed.start, 1) for timed in placed if timed.kind == "forward"]
        done = [(timed.end, -1) for timed in placed if timed.kind in ("backward", "weight")]
        held = most = 0
        for _, change in sorted(begun + done):
            held += change
            most = max(most, held)
        return most / len(self.stages(process))


def timeline(order: Sequence[Sequence[PassId]]) -> Timeline:
    """The timeline in which each process runs its passes in its order, as early as possible.

    Raises:
        StrategyError: the orders of the processes deadlock.
    """
    last = max(stage for passes in order for _, stage, _ in passes)
    ends: dict[PassId, int] = {}
    placed: list[list[TimedPass]] = [[] for _ in order]
    moved = True
    while moved:
        moved = False
        for done, passes in zip(placed, order, strict=True):
            for kind, stage, micro_batch in passes[len(done) :]:
                ready = [_end(ends, kinds, at, micro_batch) for kinds, at in _needed(kind, stage, last)]
                if None in ready:
                    break
                start = max([0, *(end for end in ready if end is not None), *(timed.end for timed in done[-1:])])
                done.append(TimedPass(kind, stage, micro_batch, start, start + TICKS[kind]))
                ends[kind, stage, micro_batch] = start + TICKS[kind]
                moved = True
    for process, (done, passes) in enumerate(zip(placed, order, strict=True)):
        if len(done) < len(passes):
            kind, stage, micro_batch = passes[len(done)]
            raise StrategyError(
                f"process {process} waits forever to do {kind} of micro-batch {micro_batch} on stage {stage}; order "
                "every pass after those that it needs"
            )
    return Timeline(placed)


def _needed(kind: str, stage: int, last: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """(kinds, stage) of the passes that a pass of the same micro-batch needs; only one of the kinds exists."""
    if kind == "forward" and stage > 0:
        yield ("forward",), stage - 1
    if kind in ("backward", "input"):
        yield ("forward",), stage
        if stage < last:
            yield ("backward", "input"), stage + 1
    if kind == "weight":
        yield ("input",), stage


def _end(ends: Mapping[PassId, int], kinds: Sequence[str], stage: int, micro_batch: int) -> int | None:
    return next((ends[kind, stage, micro_batch] for kind in kinds if (kind, stage, micro_batch) in ends), None)


def expected_bubble(schedule: str, processes: int, micro_batches: int, pieces: int = 1) -> float:
    """The share of the processes' time in which they wait, by formula.

    To fill and drain a pipeline of p processes takes (p - 1) / pieces micro-batches, with `pieces` stages a process
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). It takes a third of p - 1 if weight gradients fill the gaps
    (Qi et al. 2023, arXiv 2401.10241, section 2, for passes of equal length).
    """
    waited = (processes - 1) / (3 if schedule == "zero_bubble" else pieces)
    return waited / (micro_batches + waited)


Colour = tuple[int, int, int]


class _Look(NamedTuple):
    letter: str
    words: str
    colour: Colour


# Colours that the colour-blind can distinguish, too: Okabe and Ito 2008, "Color Universal Design".
_LOOKS: Mapping[str, _Look] = {
    "forward": _Look("F", "forward", (0, 114, 178)),
    "backward": _Look("B", "backward", (230, 159, 0)),
    "input": _Look("I", "backward for inputs", (230, 159, 0)),
    "weight": _Look("W", "backward for weights", (204, 121, 167)),
}
_LIGHTEST = 0.6  # of the way to white, for the last of several stages

_TICK, _ROW, _GAP, _LEFT, _LINE, _KEY = 24, 26, 4, 80, 26, 14
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; }
.box { text-anchor: middle; fill: #000; }
.on-dark { fill: #fff; }
.idle { fill: #8b949e; fill-opacity: 0.18; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .box { fill: #000; } .on-dark { fill: #fff; } }
"""


def schedule_text(drawn: Timeline, width: int) -> Text:
    """The timeline for `width` columns, in several blocks of lines if it is longer.

    A capital letter is the kind of a pass: F, B, or I and W for gradients of inputs and of weights. A small letter is
    its stage on the process.
    """
    from rich.text import Text

    column = 1 + max(len(_label(drawn, process, timed)) for process, timed in _all(drawn))
    heads = [f"{process} │ " for process in range(len(drawn.processes))]
    margin = max(map(len, heads))
    across = max(1, (width - margin) // column)
    rows = [_cells(drawn, process, column) for process in range(len(drawn.processes))]
    text = Text(no_wrap=True)
    for first in range(0, drawn.num_ticks, across):
        for head, cells in zip(heads, rows, strict=True):
            text.append(head.rjust(margin), style="dim")
            for style, run in groupby(cells[first : first + across], key=lambda cell: cell[1]):
                text.append("".join(words for words, _ in run), style=style)
            text.append("\n")
        text.append("\n")
    for kind in _kinds(drawn):
        text.append(f" {_LOOKS[kind].letter} ", style=_style(_LOOKS[kind].colour))
        text.append(f" {_LOOKS[kind].words}   ")
    return text


def schedule_svg(drawn: Timeline, title: str) -> str:
    """The timeline as a file of SVG that follows the reader's light or dark mode."""
    height = _LINE + len(drawn.processes) * (_ROW + _GAP) + _LINE
    width = _LEFT + max(drawn.num_ticks * _TICK, 560) + _GAP
    content = [element("title", title), element("style", _STYLE)]
    content.append(element("text", title, x="4", y="16", class_="title"))
    for process, placed in enumerate(drawn.processes):
        top = _LINE + process * (_ROW + _GAP)
        content.append(element("text", f"process {process}", x="4", y=str(top + 17)))
        content.append(_box(_LEFT, top, drawn.num_ticks * _TICK, _ROW, class_="idle"))
        for timed in placed:
            content += _drawn(drawn, process, timed, top)
    content += _legend(drawn, height - _LINE + 6)
    picture = element("svg", *content, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", role="img")
    picture.set("width", str(width))
    return tostring(picture, encoding="unicode") + "\n"


def _drawn(drawn: Timeline, process: int, timed: TimedPass, top: int) -> Iterator[Element]:
    left, width = _LEFT + timed.start * _TICK, (timed.end - timed.start) * _TICK
    colour = _colour(drawn, process, timed)
    tip = f"{_LOOKS[timed.kind].words} of micro-batch {timed.micro_batch} on stage {timed.stage}"
    box = _box(left, top, width - 1, _ROW, element("title", tip), fill=_hex(colour))
    number = element("text", str(timed.micro_batch), x=str(left + width // 2), y=str(top + 17))
    number.set("class", "box on-dark" if _is_dark(colour) else "box")
    yield box
    yield number


def _legend(drawn: Timeline, top: int) -> Iterator[Element]:
    left = _LEFT
    for kind in _kinds(drawn):
        words = _LOOKS[kind].words
        yield _box(left, top, _KEY, _KEY, fill=_hex(_LOOKS[kind].colour))
        yield element("text", words, x=str(left + 20), y=str(top + 12))
        left += 40 + 7 * len(words)
    if len(drawn.stages(0)) > 1:
        yield element("text", "lighter: later stages of the process", x=str(left), y=str(top + 12))


def _box(left: int, top: int, width: int, height: int, *content: Element, **attributes: str) -> Element:
    place = {"x": str(left), "y": str(top), "width": str(width), "height": str(height), "rx": "2"}
    return element("rect", *content, **place, **attributes)


def _cells(drawn: Timeline, process: int, column: int) -> list[tuple[str, str]]:
    """(text, style) of each tick."""
    cells = [("·".ljust(column), "dim")] * drawn.num_ticks
    for timed in drawn.processes[process]:
        words = _label(drawn, process, timed).ljust(column * (timed.end - timed.start))
        style = _style(_colour(drawn, process, timed))
        for tick in range(timed.start, timed.end):
            at = (tick - timed.start) * column
            cells[tick] = words[at : at + column], style
    return cells


def _label(drawn: Timeline, process: int, timed: TimedPass) -> str:
    stages = drawn.stages(process)
    piece = ascii_lowercase[stages.index(timed.stage) % 26] if len(stages) > 1 else ""
    return f"{_LOOKS[timed.kind].letter}{timed.micro_batch}{piece}"


def _all(drawn: Timeline) -> Iterator[tuple[int, TimedPass]]:
    return ((process, timed) for process, placed in enumerate(drawn.processes) for timed in placed)


def _kinds(drawn: Timeline) -> Sequence[str]:
    kinds = {timed.kind for _, timed in _all(drawn)}
    return [kind for kind in _LOOKS if kind in kinds]


def _colour(drawn: Timeline, process: int, timed: TimedPass) -> Colour:
    stages = drawn.stages(process)
    light = _LIGHTEST * stages.index(timed.stage) / max(1, len(stages) - 1)
    red, green, blue = (round(part + light * (255 - part)) for part in _LOOKS[timed.kind].colour)
    return red, green, blue


def _is_dark(colour: Colour) -> bool:
    """True if white text reads better on it than black, by its luma (ITU-R BT.601)."""
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue < 128


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _style(colour: Colour) -> str:
    return f"{'white' if _is_dark(colour) else 'black'} on {_hex(colour)}"
