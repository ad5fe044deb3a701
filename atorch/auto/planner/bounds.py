"""Lower bounds on the seconds and bytes of all compositions below a node of the tree.

A node's cost is relaxed to one that is no worse than that of any composition below it, and then estimated by the usual
functions. The compositions below are divided by recomputation and kept logits, then by the number of micro-batches, so
that seconds and bytes belong to the same ones. The remaining choices can at best have these effects:

- compile only reduces traffic, launches and activations, so it is on;
- data-parallel methods send messages and hold states: at best they send nothing, and shard parameters, gradients and
  optimizer states as far as any of them does;
- states on the host take at least their size after that sharding; chunk moves them at no cost;
- micro_batch cuts the batch into n. A micro-batch takes a start-up time and a time in proportion to its samples (or the
  largest of several such sums). So the total is smallest for n = 1. The time to fill and drain a pipeline is that of
  single micro-batches and smallest for the largest n. So are activations, since a stage holds no more of them.

Only the methods in `COVERED` may remain below a node; above a level of any other method, nodes have no bound. Tests
compare the results with brute force.

Legal compositions below nodes with the same legal continuations are counted once. Such nodes can be recognized only for
the methods in `COVERED`. Their refusals depend on a process's batch, the pipeline, splits and kept gradients. Only
`micro_batch` also checks for ample memory, and only without a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atorch.auto.opt_lib.checkpoint import ActivationCheckpoint
from atorch.auto.opt_lib.chunk import Chunk
from atorch.auto.opt_lib.compile import Compile
from atorch.auto.opt_lib.cross_entropy import CrossEntropy
from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.micro_batch import MicroBatch, is_ample
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.opt_lib.zero1 import Zero1
from atorch.auto.opt_lib.zero2 import Zero2
from atorch.auto.planner.space import Choice, Level, Only, SearchNode, Space
from atorch.auto.strategy import Method, Phase
from atorch.cost import Cost, StepTimes, peak_bytes
from atorch.cost.memory import least_on_host, uses_host
from atorch.cost.parallelism import REPLICA_AXES

SHARING: frozenset[type[Method]] = frozenset((Ddp, Zero1, Zero2, Fsdp, Chunk))
COVERED = SHARING | {ActivationCheckpoint, CrossEntropy, Compile, Offload, MicroBatch}
SLACK = 1e-9  # relative reduction of a bound, for rounding

Fold = Callable[[Cost], Cost]


class LowerBound(NamedTuple):
    """The compositions below a node with the same recomputation; once settled, also the same micro-batches, compilation
    and use of the host."""

    short_bytes: float  # at least
    seconds: float  # of a step, at least; set if `short_bytes` is 0
    only: Only
    cost: Cost  # the node's, with the chosen recomputation and micro-batches
    shard: Fold  # shards as far as any data-parallel method
    is_settled: bool = False


@dataclass(frozen=True)
class Bounds:
    """The bounds of one space on one cluster, below one of its depths."""

    space: Space
    times: StepTimes
    device_bytes: float  # usable of a device
    host_bytes: float  # of host memory for a device

    @cached_property
    def depth(self) -> int:
        """The depth of nodes with bounds: before recomputation and after the last uncovered method."""
        levels = self.space.levels
        first = next((depth for depth, level in enumerate(levels) if level.kind.phase >= Phase.RECOMPUTE), len(levels))
        others = [depth for depth, level in enumerate(levels) if level.kind not in COVERED]
        return max([first, *(depth + 1 for depth in others)])

    def least_seconds(self, node: SearchNode) -> float:
        """A lower bound on the seconds of a step of all compositions below a node at the depth of bounds."""
        return self._seconds_of_any(self._compiled(node.cost.replace(cast_traffic_bytes=0.0)))

    def parts(self, node: SearchNode) -> Iterator[LowerBound]:
        """The parts of a node at the depth of bounds, by recomputation."""
        shard = self._sharing(node.cost)
        for only, cost in self._kept(node.cost):
            part = LowerBound(0.0, 0.0, only, cost, shard)
            if MicroBatch not in self._below:
                yield from self._settled(part._replace(is_settled=True))
                continue
            compiled, alone = self._compiled(cost), {"grad_itemsize": 0.0, "cast_itemsize": 0.0}
            finest = compiled.replace(num_micro_batches=max(1.0, compiled.batch_size))
            short = min((self._short(fold(finest).replace(**alone)) for _, fold in self._ways(part)), default=None)
            if short is None:
                continue  # no use of the host is legal with the node's methods
            if short > 0:
                yield part._replace(short_bytes=short)
            else:
                yield part._replace(seconds=self._seconds_of_any(shard(compiled)))

    def cut(self, part: LowerBound, enough_s: float = math.inf) -> Iterator[LowerBound]:
        """Divide a part by the number of micro-batches, the use of the host, and compilation.

        Parts slower than `enough_s` are not divided further than by micro-batches.
        """
        depth, _ = self._below[MicroBatch]
        quick = part.shard(self._compiled(_without_reductions(part.cost)))
        for number, choices in self._numbers(part.cost).items():
            cost = part.cost.replace(num_micro_batches=number)
            piece = part._replace(only={**part.only, depth: choices}, cost=cost, is_settled=True)
            seconds = self._seconds(quick.replace(num_micro_batches=number))
            if seconds > enough_s:
                yield piece._replace(seconds=seconds)
            else:
                yield from self._settled(piece, seconds)

    @cached_property
    def _below(self) -> Mapping[type[Method], tuple[int, Level]]:
        """Kinds of the levels below the depth of bounds, each with its depth and level."""
        return {level.kind: (depth, level) for depth, level in enumerate(self.space.levels) if depth >= self.depth}

    def _legal(self, kind: type[Method], cost: Cost) -> Iterator[Choice]:
        if kind in self._below:
            for choice in self._below[kind][1].choices:
                if self._is_trusted(choice) or choice.method.unfit(cost) is None:
                    yield choice

    def _is_trusted(self, choice: Choice) -> bool:
        return choice.is_given and not self.space.is_checked

    def _each(self, kind: type[Method], cost: Cost) -> Iterator[tuple[Only, Cost]]:
        if kind not in self._below:
            yield {}, cost
            return
        depth, level = self._below[kind]
        for choice in self._legal(kind, cost):
            yield {depth: (choice,)}, choice.method.cost(cost)
        if not level.is_needed:
            yield {depth: (None,)}, cost

    def _kept(self, cost: Cost) -> Iterator[tuple[Only, Cost]]:
        """The cost with each combination of kept activations and kept logits."""
        for of_blocks, recomputed in self._each(ActivationCheckpoint, cost):
            for of_logits, kept in self._each(CrossEntropy, recomputed):
                yield {**of_blocks, **of_logits}, kept

    def _numbers(self, cost: Cost) -> Mapping[float, Sequence[Choice | None]]:
        """Number of micro-batches → the choices that give it."""
        level = self._below[MicroBatch][1]
        numbers: dict[float, list[Choice | None]] = {} if level.is_needed else {cost.num_micro_batches: [None]}
        for choice in level.choices:
            cut = choice.method.cost(cost)
            if self._is_trusted(choice) or (cut.num_micro_batches > 1 and cut.batch_size == cost.batch_size):
                numbers.setdefault(cut.num_micro_batches, []).append(choice)
        return numbers

    def _sharing(self, cost: Cost) -> Fold:
        """A fold to the most shards and the fewest casts of any data-parallel method."""
        ways = [cost, *(choice.method.cost(cost) for kind in SHARING for choice in self._legal(kind, cost))]
        most = {
            name: max(getattr(way, name) for way in ways) for name in ("param_shards", "grad_shards", "optim_shards")
        }
        least = {name: min(getattr(way, name) for way in ways) for name in ("cast_itemsize", "cast_traffic_bytes")}
        return lambda cost: cost.replace(**most, **least)

    def _compiled(self, cost: Cost) -> Cost:
        return next((choice.method.cost(cost) for choice in self._legal(Compile, cost)), cost)

    def _settled(self, part: LowerBound, least_s: float | None = None) -> Iterator[LowerBound]:
        """Divide a part with a known number of micro-batches by the use of the host and compilation.

        `least_s`: seconds of a step without the host and with compilation if possible, if known.
        """
        for of_host, fold in self._ways(part):
            way = part._replace(only={**part.only, **of_host})
            short = self._short(fold(self._compiled(part.cost)))
            if short > 0:
                yield way._replace(short_bytes=short)
                continue
            for of_compile, cost in self._each(Compile, _without_reductions(part.cost)):
                is_least = fold is part.shard and (cost.compiled or not of_compile)
                seconds = least_s if is_least and least_s is not None else self._seconds(fold(cost))
                yield way._replace(seconds=seconds, only={**way.only, **of_compile})

    def _ways(self, part: LowerBound) -> Iterator[tuple[Only, Fold]]:
        """Ways to use host memory, first without, each with its fold of a cost."""
        for of_chunk, chunked in self._each_fold(Chunk, part.cost):
            shard = part.shard if chunked is None else chunked.cost
            for of_offload, offload in self._each_fold(Offload, shard(part.cost)):
                yield {**of_chunk, **of_offload}, shard if offload is None else _both(shard, offload.cost)

    def _each_fold(self, kind: type[Method], cost: Cost) -> Iterator[tuple[Only, Method | None]]:
        if kind not in self._below:
            yield {}, None
            return
        depth, level = self._below[kind]
        if not level.is_needed:
            yield {depth: (None,)}, None
        for choice in self._legal(kind, cost):
            yield {depth: (choice,)}, choice.method

    def _short(self, cost: Cost) -> float:
        """A lower bound on the bytes missing on the device, or on the host if only that is short."""
        short = peak_bytes(cost) * (1 - SLACK) - self.device_bytes
        if short > 0 or not uses_host(cost):
            return max(0.0, short)
        return max(0.0, least_on_host(cost) * (1 - SLACK) - self.host_bytes)

    def _seconds(self, quick: Cost) -> float:
        """Seconds of a step without the optimizer's part, which may be sharded further or wait on the host."""
        whole = self.times.of(quick)
        return (whole.total_s - whole.optimizer_s) * (1 - SLACK)

    def _seconds_of_any(self, cost: Cost) -> float:
        """A lower bound on the seconds of a step, for any number of micro-batches."""
        quick = _without_reductions(cost)
        if MicroBatch not in self._below:
            return self._seconds(quick)
        one = self.times.of(quick.replace(num_micro_batches=1.0))
        finest_s = one.bubble_s / max(1.0, cost.batch_size)
        return (one.total_s - one.optimizer_s - one.bubble_s + finest_s) * (1 - SLACK)


def _without_reductions(cost: Cost) -> Cost:
    """The cost for bounds of seconds: nothing on the host, and only the gathers of every micro-batch as messages.

    Gradient reductions are left out, since micro-batches change their time and kind.
    """
    gathers = tuple(comm for comm in cost.comm if comm.per_micro_batch and comm.kind == "all_gather")
    return cost.replace(
        comm=gathers, param_offload=0.0, optim_offload=0.0, activation_offload=0.0, budget_bytes=math.inf,
        grad_itemsize=0.0,
    )  # fmt: skip


def _both(first: Fold, second: Fold) -> Fold:
    return lambda cost: second(first(cost))


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
        self._asks_splits = CrossEntropy in kinds  # it needs all tokens and classes

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
            node.lacks, self._asks_splits and max(cost.tensor, cost.sequence, cost.context) > 1,
        )  # fmt: skip
