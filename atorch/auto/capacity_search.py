"""The smallest cluster, largest batch or longest sequence that fits, found by a search over plans.

The search doubles the size until the answer changes, then bisects the last step down to an eighth of it. Sizes in
between rarely divide well and are not worth the time. A size that fits is assumed to fit at every easier size, which
holds except for sizes that nothing divides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atorch.cluster.spec import ClusterSpec
from atorch.errors import NoFeasiblePlanError

if TYPE_CHECKING:
    from atorch.auto.planner.plan import ClusterPlan

HALVINGS = 3

PlanForSize = Callable[[int], "ClusterPlan"]  # raises NoFeasiblePlanError
Tell = Callable[[int, "ClusterPlan | None"], None]


@dataclass(frozen=True)
class Fit:
    """The last size that fits, and the plan for it."""

    size: int
    plan: ClusterPlan
    tried: tuple[tuple[int, bool], ...]  # (size, whether it fits), in the order of the search
    is_bounded: bool = True  # False if every size that was tried fits


class _Questions:
    """Asks for plans and records the outcomes."""

    def __init__(self, ask: PlanForSize, tell: Tell) -> None:
        self.tried: list[tuple[int, bool]] = []
        self.refusal: NoFeasiblePlanError | None = None  # the last
        self._ask, self._tell = ask, tell

    def plan(self, size: int) -> ClusterPlan | None:
        plan: ClusterPlan | None = None
        try:
            plan = self._ask(size)
        except NoFeasiblePlanError as error:
            self.refusal = error
        self.tried.append((size, plan is not None))
        self._tell(size, plan)
        return plan


def largest(ask: PlanForSize, first: int, limit: int, tell: Tell) -> Fit:
    """The largest size up to `limit` that fits; the search begins at `first`.

    Raises:
        NoFeasiblePlanError: not even 1 fits.
    """
    questions = _Questions(ask, tell)
    size, plan = first, questions.plan(first)
    while plan is None:
        size //= 2
        if size < 1:
            assert questions.refusal is not None
            raise questions.refusal
        plan = questions.plan(size)
    if size == first:
        while 2 * size <= limit and (larger := questions.plan(2 * size)) is not None:
            size, plan = 2 * size, larger
        if 2 * size > limit:
            return Fit(size, plan, tuple(questions.tried), is_bounded=False)
    step = size // 2
    for _ in range(HALVINGS):
        if step >= 1 and (larger := questions.plan(size + step)) is not None:
            size, plan = size + step, larger
        step //= 2
    return Fit(size, plan, tuple(questions.tried))


def smallest_cluster(ask: Callable[[ClusterSpec], ClusterPlan], kind: ClusterSpec, limit: int, tell: Tell) -> Fit:
    """The fewest devices of this kind that fit, up to `limit`: part of one node, then whole nodes.

    Raises:
        NoFeasiblePlanError: not even `limit` devices fit.
    """
    questions = _Questions(lambda size: ask(sized(kind, size)), tell)
    below = 0
    for size in _ladder(kind.devices_per_node, limit):
        plan = questions.plan(size)
        if plan is not None:
            return _fewer(questions, kind.devices_per_node, below, size, plan)
        below = size
    assert questions.refusal is not None
    raise questions.refusal


def sized(kind: ClusterSpec, devices: int) -> ClusterSpec:
    per_node = kind.devices_per_node
    if devices <= per_node:
        return replace(kind, num_nodes=1, devices_per_node=devices)
    return replace(kind, num_nodes=devices // per_node)


def _ladder(per_node: int, limit: int) -> Iterator[int]:
    powers = [2**power for power in range(limit.bit_length())]
    yield from (size for size in powers if size < per_node)
    yield from (per_node * number for number in powers if per_node * number <= limit)


def _fewer(questions: _Questions, per_node: int, below: int, size: int, plan: ClusterPlan) -> Fit:
    """Bisect the number of whole nodes between the last that did not fit and the first that did."""
    best, low, high = plan, below // per_node, size // per_node
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        if below < per_node or middle in (low, high):
            break
        candidate = questions.plan(middle * per_node)
        if candidate is None:
            low = middle
        else:
            best, high, size = candidate, middle, middle * per_node
    return Fit(size, best, tuple(questions.tried))
