"""The number of legal compositions of a space, over which optimality is proved.

Nodes of the tree that may be followed by the same choices are counted once. That is known of methods which `bounds`
covers: of what is recomputed, compiled, shared out, kept on the host, and cut into micro-batches. What these refuse
follows from the batch of a process, the pipeline, and how gradients are kept; `micro_batch` alone asks besides whether
memory is ample, and only without a pipeline.
"""

from __future__ import annotations

from collections.abc import Hashable

from atorch.auto.opt_lib.micro_batch import MicroBatch, is_ample
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.planner.search.bounds import COVERED
from atorch.auto.planner.search.space import SearchNode, Space
from atorch.cost import Cost
from atorch.cost.parallelism import REPLICA_AXES

_ROUNDS = frozenset(("interleaved", "zero_bubble"))  # schedules that take micro-batches in rounds of stages


def num_legal(space: Space, start: Cost) -> int:
    return _Counter(space).below(space.root(start))


class _Counter:
    def __init__(self, space: Space) -> None:
        self._space, self._known = space, dict[Hashable, int]()
        kinds = [level.kind for level in space.levels]
        self._covered = next((at for at in range(len(kinds) + 1) if COVERED.issuperset(kinds[at:])), len(kinds))
        self._last = len(kinds) - 1 if kinds and kinds[-1] is MicroBatch else len(kinds)
        self._later = [frozenset(kind.slot for kind in kinds[at:]) for at in range(len(kinds) + 1)]
        self._asks_stages = Offload in kinds  # whose activations are whole blocks of a stage

    def below(self, node: SearchNode) -> int:
        """Whole compositions below a node, or itself."""
        if node.depth == len(self._space.levels):
            return 1
        alike = self._alike(node)
        if alike is None:
            return sum(map(self.below, self._space.children(node)))
        found = self._known.get(alike)
        if found is None:
            found = self._known[alike] = sum(map(self.below, self._space.children(node)))
        return found

    def _alike(self, node: SearchNode) -> Hashable | None:
        """A key that tells what may follow a node; None where that is more than is worth to be told apart."""
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
