"""Counts the legal compositions of a space, over which optimality is proved.

The count below nodes with the same legal continuations is computed once. Such nodes can be recognized only for the
methods that `bounds` covers: recomputation, compilation, data parallelism, host memory and micro-batches. Their
refusals depend on a process's batch, the pipeline and kept gradients. Only `micro_batch` also checks for ample memory,
and only without a pipeline.
"""

from __future__ import annotations

from collections.abc import Hashable

from atorch.auto.opt_lib.micro_batch import MicroBatch, is_ample
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.planner.search_space.bounds import COVERED
from atorch.auto.planner.search_space.space import SearchNode, Space
from atorch.cost import Cost
from atorch.cost.parallelism import REPLICA_AXES

_ROUNDS = frozenset(("interleaved", "zero_bubble"))  # schedules that take micro-batches in rounds of stages


def num_legal(space: Space, start: Cost) -> int:
    return _Counter(space).below(space.root(start))


class _Counter:
    def __init__(self, space: Space) -> None:
        self._space, self._counts = space, dict[Hashable, int]()
        kinds = [level.kind for level in space.levels]
        self._covered = next((at for at in range(len(kinds) + 1) if COVERED.issuperset(kinds[at:])), len(kinds))
        self._last = len(kinds) - 1 if kinds and kinds[-1] is MicroBatch else len(kinds)
        self._later = [frozenset(kind.slot for kind in kinds[at:]) for at in range(len(kinds) + 1)]
        self._asks_stages = Offload in kinds  # it offloads activations of whole blocks of a stage

    def below(self, node: SearchNode) -> int:
        """The number of complete compositions below a node, itself included."""
        if node.depth == len(self._space.levels):
            return 1
        key = self._alike(node)
        if key is None:
            return sum(map(self.below, self._space.children(node)))
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = sum(map(self.below, self._space.children(node)))
        return count

    def _alike(self, node: SearchNode) -> Hashable | None:
        """A key that is equal for nodes with the same legal continuations; None if it would not pay to compute one."""
        cost = node.cost
        if node.depth < self._covered or (cost.stages == 1 and node.depth < self._last):
            return None
        return (
            node.depth, cost.batch_size, cost.schedule, cost.interleave,
            cost.stages if self._asks_stages or cost.schedule in _ROUNDS else min(cost.stages, 2),
            bool(cost.gathered_itemsize), cost.grads_persist, cost.budget_bytes, cost.fp8 is None,
            cost.stages == 1 and is_ample(cost),
            node.slots & self._later[node.depth], node.large - node.split, node.large.isdisjoint(REPLICA_AXES),
            node.lacks,
        )  # fmt: skip
