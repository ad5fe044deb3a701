"""Prefers the simplest of the compositions that the estimate cannot distinguish.

Simpler means: no use of host memory, then fewer methods, then fewer axes of the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atorch.auto.opt_lib.shared.defaults import SLOT as DATA_PARALLEL
from atorch.auto.planner.estimate.candidate_table import CandidateTable
from atorch.auto.planner.search_space.space import MESH, Only, SearchNode
from atorch.auto.strategy import Method
from atorch.cost.parallelism import REPLICA_AXES

TIE = 0.03  # share of a step: smaller differences are below the accuracy of estimates
EQUAL = 1e-3  # share of a step: compositions that differ by less are equally fast

Intricacy = tuple[bool, int, int]  # use of host memory, number of methods, number of mesh axes


def intricacy(methods: Sequence[Method], *, on_host: bool) -> Intricacy:
    return on_host, len(methods), _num_axes(methods)


def least_intricacy(node: SearchNode, only: Only) -> Intricacy:
    """The least possible intricacy below a node, limited to `only`."""
    slots = {choice.method.slot for choices in only.values() if None not in choices for choice in choices if choice}
    if not node.large.isdisjoint(REPLICA_AXES):
        slots.add(DATA_PARALLEL)  # a method must keep the parameters of replicas equal
    number = len(slots | node.slots)
    return False, number, _num_axes(node.methods)


def preferred(columns: CandidateTable, expected: Mapping[int, float] | None = None) -> int:
    """The simplest of the rows that tie with the fastest.

    `expected`: row → seconds in place of the estimate's; only these rows are considered.
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
    return sum(len(getattr(method, "slices", ())) for method in methods if method.slot == MESH)
