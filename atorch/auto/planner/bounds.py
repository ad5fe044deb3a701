"""What the best of all compositions below a node of the tree can at most reach: least seconds, and least bytes.

A node's cost is relaxed to one that is no worse than that of any composition below it, and then estimated by the same
functions. What is still to be chosen can at best do this:

- checkpoint recomputes nothing; compile only takes from traffic, launches and activations, so it is on;
- the data-parallel methods send something and hold something: at best they send nothing, shard parameters, gradients
  and optimizer states over all processes that hold the same ones, and cast no weights;
- offload and chunk let states make way for nothing; activations that make way cross the link to the host, and the step
  waits for them;
- micro_batch cuts the batch into n. A micro-batch takes a start-up and a part in proportion to its samples, or the
  largest of several such sums, so that all of them take least where n is 1. What a pipeline waits to fill and drain is
  of single micro-batches and least where n is largest, and so are activations: a stage holds no more of them. Gradients
  need the least where n is 1, when they appear one by one; without a pipeline that is when all activations are there.
  So do weights that autocast has cast, once for each micro-batch in flight.

Only methods that this reasoning covers may be left to choose: above any other, a third party's say, nodes have no
bound. Tests hold the outcome to brute force.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atorch.auto.opt_lib.checkpoint import Checkpoint
from atorch.auto.opt_lib.chunk import Chunk
from atorch.auto.opt_lib.compile import Compile
from atorch.auto.opt_lib.ddp import Ddp
from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.micro_batch import MicroBatch
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.opt_lib.zero1 import Zero1
from atorch.auto.opt_lib.zero2 import Zero2
from atorch.auto.planner.space import Level, Space
from atorch.auto.strategy import Method, Phase
from atorch.cost import Cost, StepTimes, peak_bytes
from atorch.cost.memory import least_on_host, saved_in_blocks, states_bytes, uses_host
from atorch.cost.offload import rates_of
from atorch.cost.splits import REPLICA_AXES

SHARING = frozenset((Ddp, Zero1, Zero2, Fsdp, Chunk))
COVERED = SHARING | {Checkpoint, Compile, Offload, MicroBatch}
SLACK = 1e-9  # of a bound, for rounding

Kinds = frozenset[type[Method]]


@dataclass(frozen=True)
class Bounds:
    """The bounds of one space on one cluster, at some of its depths."""

    times: StepTimes
    device_bytes: float  # usable of a device
    host_bytes: float  # of host memory for a device
    depths: tuple[int, ...]
    left: tuple[Kinds, ...]  # depth → kinds that are still to be chosen
    offloads: tuple[Offload | None, ...]  # what may become of a node: none, or one of these

    @classmethod
    def of(cls, space: Space, times: StepTimes, device_bytes: float, host_bytes: float) -> Bounds:
        """Bounds before recomputation, before shards and before micro-batches, where all that follows is covered."""
        levels = space.levels
        left = tuple(frozenset(level.kind for level in levels[depth:]) for depth in range(len(levels) + 1))
        covered = next(depth for depth in range(len(left)) if left[depth] <= COVERED)
        phases = (Phase.RECOMPUTE, Phase.SHARD, Phase.STEP)
        depths = sorted({max(_first(levels, phase), covered) for phase in phases} - {len(levels)})
        return cls(times, device_bytes, host_bytes, tuple(depths), left, tuple(_offloads(levels)))

    def least_seconds(self, cost: Cost, depth: int) -> float:
        """No composition below a node at `depth`, whose cost so far is given, has a quicker step."""
        left, quick = self.left[depth], self._relaxed(cost, depth)
        # Gathers for every micro-batch stay; when and how gradients are reduced, micro-batches change.
        gathers = tuple(each for each in cost.comm if each.each_micro_batch and each.kind == "all_gather")
        quick = quick.but(
            comm=gathers, param_offload=0.0, optim_offload=0.0, activation_offload=0.0, budget_bytes=math.inf,
            grad_itemsize=0.0,
        )  # fmt: skip
        if MicroBatch not in left:
            whole = self.times.of(quick)
            seconds = whole.total_s - whole.optimizer_s
        else:
            whole = self.times.of(quick.but(num_micro_batches=1.0))
            seconds = whole.total_s - whole.optimizer_s - whole.bubble_s
            if cost.stages > 1:
                seconds += self.times.of(_finest(quick)).bubble_s
        return seconds * (1 - SLACK)

    def fitting(self, cost: Cost, depth: int) -> tuple[float, float]:
        """Least bytes that are short, and least seconds of a step that has none short, of what is below a node."""
        relaxed, left = self._relaxed(cost, depth), self.left[depth]
        if Checkpoint in left:
            return 0.0, 0.0
        least, seconds = math.inf, math.inf
        for settled in self._settled(relaxed, left):
            short = self._short(settled, left)
            least = min(least, short)
            if short <= 0:
                seconds = min(seconds, self._crossing_seconds(settled))
                if not seconds:
                    break
        seconds *= 1 - SLACK
        return max(0.0, least), seconds

    def _relaxed(self, cost: Cost, depth: int) -> Cost:
        """What is still to be chosen for blocks and shards at its best."""
        left = self.left[depth]
        if Compile in left:
            cost = Compile().cost(cost)
        if Checkpoint in left:
            cost = cost.but(recompute=0.0)
        if left.isdisjoint(SHARING):
            return cost
        replicas = cost.size(*REPLICA_AXES)
        return cost.but(
            param_shards=cost.param_shards * replicas,
            grad_shards=cost.grad_shards * replicas,
            optim_shards=cost.optim_shards * replicas,
            cast_itemsize=0.0,
            cast_traffic_bytes=0.0,
        )

    def _settled(self, cost: Cost, left: Kinds) -> Iterable[Cost]:
        """A relaxed cost under each way to use host memory; under chunk all states may make way."""
        if Offload not in left:
            options: Iterable[Cost] = (cost,)
        else:
            options = (cost if each is None else each.cost(cost) for each in self.offloads)
        if Chunk not in left:
            return options
        away = {each.activation_offload for each in options}
        return [cost.but(param_offload=1.0, optim_offload=1.0, activation_offload=each) for each in away]

    def _short(self, cost: Cost, left: Kinds) -> float:
        """Least bytes that are short on the device, on the host, or on both together, as far as one look tells."""
        short = self._least_bytes(cost, left) * (1 - SLACK) - self.device_bytes
        if short > 0 or not uses_host(cost) and left.isdisjoint((Offload, Chunk)):
            return short
        if left.isdisjoint((Offload, Chunk)):
            return least_on_host(cost) * (1 - SLACK) - self.host_bytes
        return states_bytes(cost) * (1 - SLACK) - self.device_bytes - self.host_bytes  # which are somewhere

    def _least_bytes(self, cost: Cost, left: Kinds) -> float:
        """Bytes at the peak of what is below: with one micro-batch, or of several the smallest."""
        if MicroBatch not in left:
            return peak_bytes(cost)
        one, finest = cost.but(num_micro_batches=1.0), _finest(cost)
        if cost.stages == 1:  # of several, the gradients of the first are there while the others compute
            return min(peak_bytes(one), peak_bytes(finest))
        alone = finest.but(grad_itemsize=0.0, cast_itemsize=0.0)
        return max(peak_bytes(one.but(activation_scale=0.0)), peak_bytes(alone))

    def _crossing_seconds(self, cost: Cost) -> float:
        """What activations that wait on the host take to get there, or back."""
        if not cost.activation_offload:
            return 0.0
        alone = cost.but(
            num_micro_batches=1.0, param_itemsize=0.0, grad_itemsize=0.0, optim_itemsize=0.0, master_itemsize=0.0,
            cast_itemsize=0.0, gathered_itemsize=0.0,
        )  # fmt: skip
        return cost.activation_offload * saved_in_blocks(alone) / rates_of(self.times.cluster).one_way


def _finest(cost: Cost) -> Cost:
    return cost.but(num_micro_batches=max(1.0, cost.batch_size))


def _first(levels: Sequence[Level], phase: Phase) -> int:
    """The depth of the first level in a phase or a later one."""
    return next((depth for depth, level in enumerate(levels) if level.kind.phase >= phase), len(levels))


def _offloads(levels: Sequence[Level]) -> Iterable[Offload | None]:
    for level in levels:
        if level.kind is Offload:
            if not level.is_needed:
                yield None
            for choice in level.choices:
                assert isinstance(choice.method, Offload)
                yield choice.method
