"""A table of all scored compositions, stored by column: tens of thousands need no object each.

Of compositions that the estimate cannot distinguish, one that fits with room is preferred, then the simplest: without
use of host memory, then with fewer methods, then with fewer axes of the mesh.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from atorch.auto.opt_lib.shared.defaults import SLOT as DATA_PARALLEL
from atorch.auto.planner.space import MESH, Only, SearchNode
from atorch.auto.strategy import Method
from atorch.cost import Memory
from atorch.cost.memory import CATEGORIES, high_needed
from atorch.cost.parallelism import REPLICA_AXES

FITS, DEVICE, HOST = 0, 1, 2  # codes of `binds`


class CandidateTable:
    """One row per composition: its methods, seconds, bytes by category, and whether it fits."""

    def __init__(self, limit_bytes: float, host_bytes: float) -> None:
        self.limit_bytes = limit_bytes  # usable of a device
        self.host_bytes = host_bytes  # of host memory for a device
        self.methods: list[tuple[Method, ...]] = []
        self.step_s, self.peak_bytes, self.on_host = array("d"), array("d"), array("d")
        self.short_bytes = array("d")  # missing on the device, or on the host if only that is short
        self.least_short = math.inf
        self.binds = array("b")  # the limit that each row exceeds: DEVICE or HOST, or FITS
        self._narrow = array("b")
        self._memory = array("d")

    def __len__(self) -> int:
        return len(self.methods)

    def add(self, methods: tuple[Method, ...], step_s: float, memory: Memory) -> bool:
        """Add a row; returns True if it fits."""
        binds = DEVICE if memory.needed > self.limit_bytes else HOST if memory.on_host > self.host_bytes else FITS
        on_host = memory.on_host - self.host_bytes
        short = on_host if binds == HOST else max(0.0, memory.needed - self.limit_bytes)
        self.methods.append(methods)
        self.step_s.append(step_s)
        self.peak_bytes.append(memory.total)
        self.on_host.append(memory.on_host)
        self.short_bytes.append(short)
        self.least_short = min(self.least_short, short)
        self.binds.append(binds)
        self._narrow.append(binds == FITS and high_needed(memory) > self.limit_bytes)
        self._memory.extend(memory[: len(CATEGORIES)])
        return binds == FITS

    def memory(self, category: int) -> array[float]:
        """Bytes of a category of `CATEGORIES`, by row."""
        return self._memory[category :: len(CATEGORIES)]

    @property
    def fitting(self) -> list[int]:
        return [row for row, binds in enumerate(self.binds) if binds == FITS]

    def why(self) -> list[str]:
        """The exceeded limit of each composition, with the largest category of a device's memory; "" if it fits."""
        names = {HOST: ["host memory"] * len(CATEGORIES), FITS: [""] * len(CATEGORIES)}
        names[DEVICE] = [f"memory: {category}" for category in CATEGORIES]
        rows = zip(*(self.memory(category) for category in range(len(CATEGORIES))), strict=True)
        return [names[binds][held.index(max(held))] for binds, held in zip(self.binds, rows, strict=True)]

    def labels(self) -> list[str]:
        texts: dict[int, str] = {}  # a method is shared by many rows, and its text is slow to make

        def label(methods: tuple[Method, ...]) -> str:
            named = [texts.get(id(method)) or texts.setdefault(id(method), str(method)) for method in methods]
            return " + ".join(named) or "plain"

        return list(map(label, self.methods))

    def intricacy(self, row: int) -> Intricacy:
        return intricacy(self.methods[row], on_host=self.on_host[row] > 0, is_narrow=bool(self._narrow[row]))

    def fastest(self, number: int | None = None) -> list[int]:
        """Rows that fit, the fastest first; equally fast ones by number of methods, then by peak bytes."""

        def order(row: int) -> tuple[float, int, float]:
            return self.step_s[row], len(self.methods[row]), self.peak_bytes[row]

        return sorted(self.fitting, key=order)[:number]

    def nearest(self, number: int) -> list[int]:
        """Rows that miss by the fewest bytes, for a table where none fits."""
        return sorted(range(len(self)), key=self.short_bytes.__getitem__)[:number]

    def pareto(self) -> list[int]:
        """The Pareto front of seconds and peak bytes among rows that fit, the smallest first."""
        front: list[int] = []
        for row in sorted(self.fitting, key=lambda row: (self.peak_bytes[row], self.step_s[row])):
            if not front or self.step_s[row] < self.step_s[front[-1]]:
                front.append(row)
        return front


TIE = 0.03  # share of a step: smaller differences are below the accuracy of estimates
EQUAL = 1e-3  # share of a step: compositions that differ by less are equally fast

Intricacy = tuple[bool, bool, int, int]  # fits narrowly, uses host memory, number of methods, number of mesh axes


def intricacy(methods: Sequence[Method], *, on_host: bool, is_narrow: bool) -> Intricacy:
    return is_narrow, on_host, len(methods), _num_axes(methods)


def least_intricacy(node: SearchNode, only: Only) -> Intricacy:
    """The least possible intricacy below a node, limited to `only`."""
    slots = {choice.method.slot for choices in only.values() if None not in choices for choice in choices if choice}
    if not node.large.isdisjoint(REPLICA_AXES):
        slots.add(DATA_PARALLEL)  # a method must keep the parameters of replicas equal
    number = len(slots | node.slots)
    return False, False, number, _num_axes(node.methods)


def preferred(columns: CandidateTable, expected: Mapping[int, float] | None = None) -> int:
    """The simplest of the rows that tie with the fastest and fit with room, or of all that tie if none does.

    `expected`: row → seconds in place of the estimate's; only these rows are considered.
    """
    seconds = columns.step_s if expected is None else expected
    rows = columns.fastest()
    if expected is not None:
        rows = sorted((row for row in rows if row in expected), key=lambda row: expected[row])
    limit = seconds[rows[0]] * (1 + TIE)
    near = [row for row in rows if seconds[row] <= limit]

    return min(near, key=lambda row: (columns.intricacy(row), seconds[row]))


def _num_axes(methods: Sequence[Method]) -> int:
    return sum(len(getattr(method, "slices", ())) for method in methods if method.slot == MESH)
