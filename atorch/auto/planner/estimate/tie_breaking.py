"""The preference among compositions that the estimate cannot tell apart: the simplest.

What waits on the host is less simple than what does not, and a method more than one less; then what splits the model
along fewer axes of the mesh is simpler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atorch.auto.opt_lib.shared.defaults import SLOT as DATA_PARALLEL
from atorch.auto.planner.estimate.candidate_table import CandidateTable
from atorch.auto.planner.search.space import MESH, Only, SearchNode
from atorch.auto.strategy import Method
from atorch.cost.parallelism import REPLICA_AXES

TIE = 0.03  # of a step: nearer than the estimate is right
EQUAL = 1e-3  # a share of a step: what differs by less is as fast

Intricacy = tuple[bool, int, int]  # whether something waits on the host, methods, axes of the mesh


def intricacy(methods: Sequence[Method], *, on_host: bool) -> Intricacy:
    return on_host, len(methods), _num_axes(methods)


def least_intricacy(node: SearchNode, only: Only) -> Intricacy:
    """The least intricacy that is possible below a node, of these alone."""
    slots = {choice.method.slot for choices in only.values() if None not in choices for choice in choices if choice}
    if not node.large.isdisjoint(REPLICA_AXES):
        slots.add(DATA_PARALLEL)  # for something keeps parameters equal that several processes hold
    number = len(slots | node.slots)
    return False, number, _num_axes(node.methods)


def preferred(columns: CandidateTable, expected: Mapping[int, float] | None = None) -> int:
    """The simplest of the rows that are as good as the fastest.

    `expected`: seconds in place of the estimate's, of the rows that are to be chosen from.
    """
    seconds = columns.step_s if expected is None else expected
    rows = columns.fastest()
    if expected is not None:
        rows = sorted((row for row in rows if row in expected), key=lambda row: expected[row])
    limit = seconds[rows[0]] * (1 + TIE)
    near = [row for row in rows if seconds[row] <= limit]

    def order(row: int) -> tuple[Intricacy, float]:
        return intricacy(columns.methods[row], on_host=bool(columns.on_host[row] > 0)), seconds[row]

    return min(near, key=order)


def is_simpler(columns: CandidateTable, one: int, other: int) -> bool:
    mine, yours = (intricacy(columns.methods[row], on_host=bool(columns.on_host[row] > 0)) for row in (one, other))
    return mine < yours


def _num_axes(methods: Sequence[Method]) -> int:
    return sum(len(getattr(each, "slices", ())) for each in methods if each.slot == MESH)
