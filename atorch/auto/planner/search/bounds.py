"""Lower bounds on the seconds and bytes of all compositions below a node of the tree.

A node's cost is relaxed to one that is no worse than that of any composition below it, and then estimated by the same
functions. What is below is told apart by what is recomputed and whether logits are kept, and then by the number of
micro-batches, so that seconds and bytes are of the same ones. What is still to be chosen can at best do this:

- compile only takes from traffic, launches and activations, so it is on;
- the data-parallel methods send something and hold something: at best they send nothing, and shard parameters,
  gradients and optimizer states as far as any of them does;
- what waits on the host takes at least what it takes of states that are sharded so; under chunk states make way for
  nothing;
- micro_batch cuts the batch into n. A micro-batch takes a start-up and a part in proportion to its samples, or the
  largest of several such sums, so that all of them take least where n is 1. What a pipeline waits to fill and drain is
  of single micro-batches and least where n is largest, and so are activations: a stage holds no more of them.

Only methods that this reasoning covers may be left to choose: above any other, a third party's say, nodes have no
bound. Tests hold the outcome to brute force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atorch.auto.opt_lib.checkpoint import Checkpoint
from atorch.auto.opt_lib.chunk import Chunk
from atorch.auto.opt_lib.compile import Compile
from atorch.auto.opt_lib.cross_entropy import CrossEntropy
from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.opt_lib.zero1 import Zero1
from atorch.auto.opt_lib.zero2 import Zero2
from atorch.auto.planner.search.space import Choice, Level, Only, SearchNode, Space
from atorch.auto.strategy import Method, Phase
from atorch.cost import Cost, StepTimes, peak_bytes
from atorch.cost.memory import least_on_host, uses_host

SHARING: frozenset[type[Method]] = frozenset((Ddp, Zero1, Zero2, Fsdp, Chunk))
COVERED = SHARING | {Checkpoint, CrossEntropy, Compile, Offload, MicroBatch}
SLACK = 1e-9  # of a bound, for rounding

Fold = Callable[[Cost], Cost]


class LowerBound(NamedTuple):
    """A part below a node that recomputes alike or, once settled, cuts, compiles and uses the host alike, too."""

    short_bytes: float  # at least
    seconds: float  # of a step, at least; where none is short
    only: Only
    cost: Cost  # the node's, with what is settled of recomputation and micro-batches
    shard: Fold  # as far as data-parallel methods do
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
        """Before recomputation, where all that follows is covered; as many as there are levels: nothing has bounds."""
        levels = self.space.levels
        first = next((depth for depth, level in enumerate(levels) if level.kind.phase >= Phase.RECOMPUTE), len(levels))
        others = [depth for depth, level in enumerate(levels) if level.kind not in COVERED]
        return max([first, *(depth + 1 for depth in others)])

    def least_seconds(self, node: SearchNode) -> float:
        """No composition below a node at the depth of bounds has a quicker step."""
        return self._seconds_of_any(self._compiled(node.cost.but(cast_traffic_bytes=0.0)))

    def parts(self, node: SearchNode) -> Iterator[LowerBound]:
        """Parts below a node at the depth of bounds, by what is recomputed."""
        shard = self._sharing(node.cost)
        for only, cost in self._kept(node.cost):
            part = LowerBound(0.0, 0.0, only, cost, shard)
            if MicroBatch not in self._below:
                yield from self._settled(part._replace(is_settled=True))
                continue
            compiled, alone = self._compiled(cost), {"grad_itemsize": 0.0, "cast_itemsize": 0.0}
            finest = _finest(compiled)
            short = min((self._short(fold(finest).but(**alone)) for _, fold in self._ways(part)), default=None)
            if short is None:
                continue  # no way is legal beside what was chosen
            if short > 0:
                yield part._replace(short_bytes=short)
            else:
                yield part._replace(seconds=self._seconds_of_any(shard(compiled)))

    def cut(self, part: LowerBound, enough_s: float = math.inf) -> Iterator[LowerBound]:
        """A part, apart by the number of micro-batches, by what waits on the host, and by whether it is compiled.

        Of what takes longer than `enough_s` no more is told than that.
        """
        depth, _ = self._below[MicroBatch]
        quick = part.shard(self._compiled(_without_reductions(part.cost)))
        for number, choices in self._numbers(part.cost).items():
            cost = part.cost.but(num_micro_batches=number)
            each = part._replace(only={**part.only, depth: choices}, cost=cost, is_settled=True)
            seconds = self._seconds(quick.but(num_micro_batches=number))
            if seconds > enough_s:
                yield each._replace(seconds=seconds)
            else:
                yield from self._settled(each, seconds)

    @cached_property
    def _below(self) -> Mapping[type[Method], tuple[int, Level]]:
        """Kinds that are still to be chosen, each with its depth and its level."""
        return {level.kind: (depth, level) for depth, level in enumerate(self.space.levels) if depth >= self.depth}

    def _legal(self, kind: type[Method], cost: Cost) -> Iterator[Choice]:
        """Choices of a kind that are still to be made, and may be."""
        if kind in self._below:
            for choice in self._below[kind][1].choices:
                if self._is_trusted(choice) or choice.method.unfit(cost) is None:
                    yield choice

    def _is_trusted(self, choice: Choice) -> bool:
        return choice.is_given and not self.space.is_checked

    def _each(self, kind: type[Method], cost: Cost) -> Iterator[tuple[Only, Cost]]:
        """A cost with each choice of a kind, and without."""
        if kind not in self._below:
            yield {}, cost
            return
        depth, level = self._below[kind]
        for choice in self._legal(kind, cost):
            yield {depth: (choice,)}, choice.method.cost(cost)
        if not level.is_needed:
            yield {depth: (None,)}, cost

    def _kept(self, cost: Cost) -> Iterator[tuple[Only, Cost]]:
        """A cost with each way to keep activations, and logits."""
        for of_blocks, recomputed in self._each(Checkpoint, cost):
            for of_logits, kept in self._each(CrossEntropy, recomputed):
                yield {**of_blocks, **of_logits}, kept

    def _numbers(self, cost: Cost) -> Mapping[float, Sequence[Choice | None]]:
        """Numbers of micro-batches, each with the choices that make them."""
        level = self._below[MicroBatch][1]
        numbers: dict[float, list[Choice | None]] = {} if level.is_needed else {cost.num_micro_batches: [None]}
        for choice in level.choices:
            cut = choice.method.cost(cost)
            if self._is_trusted(choice) or (cut.num_micro_batches > 1 and cut.batch_size == cost.batch_size):
                numbers.setdefault(cut.num_micro_batches, []).append(choice)
        return numbers

    def _sharing(self, cost: Cost) -> Fold:
        """Shards as many as any data-parallel method makes, and casts no more than any."""
        ways = [cost, *(choice.method.cost(cost) for kind in SHARING for choice in self._legal(kind, cost))]
        most = {
            name: max(getattr(each, name) for each in ways) for name in ("param_shards", "grad_shards", "optim_shards")
        }
        least = {name: min(getattr(each, name) for each in ways) for name in ("cast_itemsize", "cast_traffic_bytes")}
        return lambda cost: cost.but(**most, **least)

    def _compiled(self, cost: Cost) -> Cost:
        return next((choice.method.cost(cost) for choice in self._legal(Compile, cost)), cost)

    def _settled(self, part: LowerBound, least_s: float | None = None) -> Iterator[LowerBound]:
        """A part of which the cost tells the number of micro-batches, apart by the host and by what is compiled.

        `least_s`: of a step where nothing waits on the host and all is compiled that can be, as far as that is known.
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
        """Ways to use host memory, without first: what they make of a cost."""
        for of_chunk, chunked in self._each_fold(Chunk, part.cost):
            shard = part.shard if chunked is None else chunked.cost
            for of_offload, offload in self._each_fold(Offload, shard(part.cost)):
                yield {**of_chunk, **of_offload}, shard if offload is None else _both(shard, offload.cost)

    def _each_fold(self, kind: type[Method], cost: Cost) -> Iterator[tuple[Only, Method | None]]:
        """Each choice of a kind, to go without first."""
        if kind not in self._below:
            yield {}, None
            return
        depth, level = self._below[kind]
        if not level.is_needed:
            yield {depth: (None,)}, None
        for choice in self._legal(kind, cost):
            yield {depth: (choice,)}, choice.method

    def _short(self, cost: Cost) -> float:
        """Least bytes that are short on the device, or on the host where only that is short."""
        short = peak_bytes(cost) * (1 - SLACK) - self.device_bytes
        if short > 0 or not uses_host(cost):
            return max(0.0, short)
        return max(0.0, least_on_host(cost) * (1 - SLACK) - self.host_bytes)

    def _seconds(self, quick: Cost) -> float:
        """Seconds of a step, but for the optimizer's, which may be sharded further or wait on the host."""
        whole = self.times.of(quick)
        return (whole.total_s - whole.optimizer_s) * (1 - SLACK)

    def _seconds_of_any(self, cost: Cost) -> float:
        """Seconds of a step in any number of micro-batches."""
        quick = _without_reductions(cost)
        if MicroBatch not in self._below:
            return self._seconds(quick)
        one = self.times.of(quick.but(num_micro_batches=1.0))
        finest_s = one.bubble_s / max(1.0, cost.batch_size)
        return (one.total_s - one.optimizer_s - one.bubble_s + finest_s) * (1 - SLACK)


def _without_reductions(cost: Cost) -> Cost:
    """A cost for seconds: nothing waits on the host, and nothing is sent but gathers for every micro-batch.

    When and how gradients are reduced, micro-batches change.
    """
    gathers = tuple(each for each in cost.comm if each.each_micro_batch and each.kind == "all_gather")
    return cost.but(
        comm=gathers, param_offload=0.0, optim_offload=0.0, activation_offload=0.0, budget_bytes=math.inf,
        grad_itemsize=0.0,
    )  # fmt: skip


def _finest(cost: Cost) -> Cost:
    return cost.but(num_micro_batches=max(1.0, cost.batch_size))


def _both(first: Fold, second: Fold) -> Fold:
    return lambda cost: second(first(cost))
