"""Seconds of a step: computing and communication of each pipeline stage, the bubble, and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from atorch.cluster.spec import ClusterSpec
from atorch.cost.comm import (
    LinkGroup,
    boundary_bytes,
    group_for,
    of_copy,
    overlapped_share,
    rounds_of,
)
from atorch.cost.comm.offload import host_time
from atorch.cost.gemm import ProductTimes, peak_flops
from atorch.cost.kernels import added_elements, micro_batch_bytes, optimizer_bytes, seconds_of_copy
from atorch.cost.memory_timeline import micro_batch_share
from atorch.cost.parallelism import EXPERT_AXIS
from atorch.cost.pipeline_stages import PipelineCut, StageParts, cut_of
from atorch.cost.profile import Segment, distinct_share, kept_elements
from atorch.cost.state import Cost

SHARPNESS = 2.5  # of the transition between launch-bound and work-bound; near it neither hides the other fully
COLLECTIVE_LAUNCHES = 7.5  # launching a collective takes as long as launching so many operations
MEETING_S = 5e-5  # seconds that an exposed round of a collective waits for late ranks
SLOWED = 0.189  # slowdown of computing by overlapped communication: arXiv 2507.03114, the mean of its runs
SEND_LAUNCHES = 60.0  # launches lost when a stage waits for a neighbour's send
REMEMBERED = 10_000  # entries that `StepTimes` caches: a search returns to recent ones


class StepTime(NamedTuple):
    """Seconds of a step by category, on a device of the slowest pipeline stage."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    bubble_s: float
    optimizer_s: float
    exposed_comm_s: float
    offload_s: float
    extra_s: float
    total_s: float


class _Copy(NamedTuple):
    """One copy of a segment for a micro-batch, or all on a stage: seconds of computing and communication, elements."""

    matmul_s: float
    traffic_s: float
    launch_s: float
    exposed_s: float
    hidden_s: float
    inside_s: float  # in which links within nodes carry bytes
    between_s: float  # in which links between nodes do
    params: float
    dense: float  # trainable parameters outside of experts
    experts: float  # trainable parameters in experts
    added: float  # gradients that operations of their own accumulate


class _Copies(NamedTuple):
    """One copy of each of a model's segments, by the segment's id, and the elements of all copies."""

    of: Mapping[int, _Copy]
    num_params: float


class _MicroBatch(NamedTuple):
    """A stage's seconds for one micro-batch, forward and backward."""

    work: _Copy
    computing_s: float
    exposed_s: float
    total_s: float


class _Run(NamedTuple):
    """Consecutive stages with equal parts and equal seconds."""

    parts: StageParts
    number: int
    micro: _MicroBatch


class _Sent(NamedTuple):
    """Seconds of communication other than model splits, for the whole model."""

    exposed_s: float
    hidden_s: float
    inside_s: float
    between_s: float


class _Totals(NamedTuple):
    """Totals of the model, shared by stages."""

    num_params: float
    num_blocks: int
    once: _Sent
    by_parameters: _Sent  # per micro-batch
    by_blocks: _Sent  # per micro-batch


_read_by_copies = attrgetter(
    "dtype", "fp8", "fp8_outside", "compiled", "tensor", "splits_norms", "held_gathers", "whole_outside", "own_tokens",
    "gathers_logits", "tensor_beside", "fp8_once", "fp8_gathers", "adds_in_products",
    "sequence", "context", "expert", "expert_capacity", "expert_skew", "sends_once",
    "attention_kernel", "attention_load", "activation_scale", "traffic_scale", "ops_scale",
)  # fmt: skip
"""Fields that decide copies' seconds, apart from the cluster and those that `StepTimes._copies_of` adds."""
_read_by_blocks = attrgetter("recompute", "recompute_keeps")  # in addition

_Mesh = tuple[tuple[str, int], ...]


class StepTimes:
    """Seconds of steps on one cluster; caches results that steps share.

    Strategies that differ in sharding or offloading compute the same for a micro-batch.
    """

    def __init__(
        self, cluster: ClusterSpec, links: Mapping[str, ClusterSpec] | None = None, copies: StepTimes | None = None
    ) -> None:
        """`links`: by mesh axis, a cluster whose links replace those of `cluster`.

        `copies`: an instance whose cached copies of segments are valid here as well.
        """
        self.cluster = cluster
        self._links = links or {}
        self._products = ProductTimes(cluster.device)
        self._groups: dict[tuple[tuple[str, ...], int, _Mesh], LinkGroup] = {}
        self._copies: dict[tuple[object, ...], _Copies] = {} if copies is None else copies._copies
        self._copy_of: dict[tuple[object, ...], _Copy] = {} if copies is None else copies._copy_of

    def of(self, cost: Cost) -> StepTime:
        """The seconds of one optimizer step.

        A pipeline of p stages is filled and drained while all but one stage wait (Narayanan et al. 2021, arXiv
        2104.04473, section 2.2). In between, the slowest stage sets the pace, and waits for its neighbours' sends.
        """
        cut = cut_of(cost)
        copies = self._copies_of(cost, cut)
        totals = self._totals(cost, copies)
        runs = [
            _Run(parts, number, _micro_batch(cost, parts, copies, totals, self.cluster)) for parts, number in cut.runs
        ]
        slowest = max((run.micro for run in runs), key=lambda micro: micro.total_s)
        times, sending = cost.num_micro_batches, 0.0
        if cost.stages > 1:
            sending = self._group(cost, ("pipeline",)).seconds("send", 1.0, boundary_bytes(cost))
        others_s = sum(run.number * run.micro.total_s for run in runs) - slowest.total_s
        bubble = _unfilled_share(cost) * others_s + 2.0 * (cost.stages - 1) * sending
        passes_s, between_s = times * slowest.total_s, times * max(run.micro.work.between_s for run in runs)
        host = host_time(cost, passes_s, self.cluster, between_s)
        once, optimizer = _end_seconds(cost, runs, totals, host.backward_s / times, self.cluster)
        between_sends = 0.0 if cost.sends_beside else 2.0 * (times - 1.0) * cost.interleave * sending
        exposed = times * slowest.exposed_s + between_sends + once
        total = times * slowest.computing_s + bubble + optimizer + exposed + host.total_s + cost.extra_s
        short = max(0.0, self._carrying_seconds(cost, runs, totals, sending) - total)
        return StepTime(
            matmul_s=times * slowest.work.matmul_s,
            traffic_s=times * slowest.work.traffic_s,
            launch_s=times * slowest.work.launch_s,
            bubble_s=bubble,
            optimizer_s=optimizer,
            exposed_comm_s=exposed + short,
            offload_s=host.total_s,
            extra_s=cost.extra_s,
            total_s=total + short,
        )

    def _group(self, cost: Cost, axis: tuple[str, ...]) -> LinkGroup:
        key = axis, cost.expert, tuple(cost.axes.items())
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = group_for(axis, cost, self._links.get(axis[0], self.cluster))
        return group

    def _copies_of(self, cost: Cost, cut: PipelineCut) -> _Copies:
        """Copies of segments. Recomputation changes blocks alone, so other segments are cached without it."""
        added = cost.grad_itemsize if cost.adds_in_products else 0.0
        times, waiting_s = cost.num_micro_batches if cost.fp8_once else 1.0, self._waiting_seconds(cost)
        alike = (_inner_axes(cost), micro_batch_share(cost), added, times, waiting_s, *_read_by_copies(cost))
        of_blocks = _read_by_blocks(cost)
        copies = self._copies.get((cut, alike, of_blocks))
        if copies is None:
            if len(self._copies) >= REMEMBERED:
                self._copies.clear()
                self._copy_of.clear()
            of = {}
            for segment in cut.segments:
                key = (segment, alike, of_blocks if segment.is_block else ())
                copy = self._copy_of.get(key)
                if copy is None:
                    copy = self._copy_of[key] = self._copy(cost, segment, waiting_s)
                of[id(segment)] = copy
            num_params = sum(segment.count * of[id(segment)].params for segment in cut.segments)
            copies = self._copies[cut, alike, of_blocks] = _Copies(of, num_params)
        return copies

    def _copy(self, cost: Cost, segment: Segment, waiting_s: float) -> _Copy:
        device = self.cluster.device
        computed, exposed, hidden = seconds_of_copy(cost, segment, self._products), 0.0, 0.0
        carried, overlapped = [0.0, 0.0], 0.0
        launch, launching = computed.launch_s, COLLECTIVE_LAUNCHES * cost.ops_scale * device.launch_s
        late_s = MEETING_S if device.type == "cuda" else 0.0
        for comm in of_copy(cost, segment):
            group = self._group(cost, comm.axis)
            num_bytes = comm.num_bytes
            if cost.sends_once and comm.axis == (EXPERT_AXIS,):
                num_bytes *= distinct_share(segment, group.num_nodes if group.num_nodes > 1 else group.size)
            seconds = group.seconds(comm.kind, comm.count, num_bytes)
            hiding = comm.overlap * seconds
            if comm.axis == ("tensor",):
                hiding = min(hiding, computed.matmul_s * overlapped_share(cost, segment, comm.overlap))
                overlapped += hiding
            exposed += seconds - hiding + (1.0 - comm.overlap) * comm.count * rounds_of(comm.kind) * late_s
            hidden += hiding
            carried[group.num_nodes > 1] += group.carrying_s(comm.kind, num_bytes)
            launch += comm.count * (launching + waiting_s * rounds_of(comm.kind) * (group.size - 1))
        uncovered = max(0.0, overlapped - computed.matmul_s)  # hideable, but longer than the matmuls that hide it
        return _Copy(
            matmul_s=computed.matmul_s,
            traffic_s=computed.traffic_s,
            launch_s=launch,
            exposed_s=exposed + uncovered,
            hidden_s=hidden - uncovered,
            inside_s=carried[0],
            between_s=carried[1],
            params=cost.local_params(segment),
            dense=cost.local_trainable(segment) - cost.local_experts(segment),
            experts=cost.local_experts(segment),
            added=added_elements(cost, segment),
        )

    def _waiting_seconds(self, cost: Cost) -> float:
        """Extra seconds to start a hop of a collective, in a pipeline whose stages send between nodes."""
        if not cost.hop_wait_s or cost.stages == 1 or self._group(cost, ("pipeline",)).num_nodes == 1:
            return 0.0
        return cost.hop_wait_s

    def _totals(self, cost: Cost, copies: _Copies) -> _Totals:
        sent = {"once": [0.0] * 4, "parameters": [0.0] * 4, "blocks": [0.0] * 4}
        for comm in cost.comm:
            group, share, when = self._group(cost, comm.axis), 1.0, comm.scales_with
            if not comm.per_micro_batch:
                share = 1.0 / cost.num_micro_batches if when == "blocks" else 1.0
            sums = sent[when if comm.per_micro_batch or when == "blocks" else "once"]
            seconds = share * group.seconds(comm.kind, comm.count, comm.num_bytes)
            sums[0] += (1.0 - comm.overlap) * seconds + share * comm.copied / reached_bandwidth(self.cluster)
            sums[1] += comm.overlap * seconds
            sums[2 + (group.num_nodes > 1)] += share * group.carrying_s(comm.kind, comm.num_bytes)
        return _Totals(copies.num_params, max(1, cost.num_blocks), *map(_Sent._make, sent.values()))

    def _carrying_seconds(self, cost: Cost, runs: Sequence[_Run], totals: _Totals, sending_s: float) -> float:
        """Seconds in which links carry a step's bytes, hidden or not: the maximum over all stages' links.

        A stage sends each micro-batch forward and its gradient back, except the first stage and the last.
        """
        longest = 0.0
        ways = (1.0 if cost.stages == 2 else 2.0) * cost.interleave * sending_s
        between = cost.stages > 1 and self._group(cost, ("pipeline",)).num_nodes > 1
        for _, _, micro in runs:
            share = micro.work.params / totals.num_params if cost.stages > 1 else 1.0
            inside_s, between_s = micro.work.inside_s, micro.work.between_s
            inside_s, between_s = (inside_s, between_s + ways) if between else (inside_s + ways, between_s)
            for each_s, once_s in ((inside_s, totals.once.inside_s), (between_s, totals.once.between_s)):
                longest = max(longest, cost.num_micro_batches * each_s + share * once_s)
        return longest


def _inner_axes(cost: Cost) -> _Mesh:
    """The mesh up to its last model axis: later axes do not change which ranks a copy communicates with."""
    sizes = [(name, size) for name, size in cost.axes.items() if size > 1]
    while sizes and sizes[-1][0] not in ("tensor", "sequence", "context"):
        sizes.pop()
    return tuple(sizes)


def step_time(cost: Cost, cluster: ClusterSpec) -> StepTime:
    """The seconds of one optimizer step, and where they go."""
    return StepTimes(cluster).of(cost)


def step_seconds(cost: Cost, cluster: ClusterSpec) -> float:
    return step_time(cost, cluster).total_s


def _micro_batch(cost: Cost, parts: StageParts, copies: _Copies, totals: _Totals, cluster: ClusterSpec) -> _MicroBatch:
    """A GPU launches the next operations while one runs, so the longer of launching and running counts; a CPU adds."""
    sums, blocks = [0.0] * len(_Copy._fields), 0.0
    for segment, count in parts:
        sums = [held + count * more for held, more in zip(sums, copies.of[id(segment)], strict=True)]
        blocks += count if segment.is_block else 0.0
    matmul, traffic, launch, exposed, hidden, inside, between, params, dense, experts, added = sums
    traffic += micro_batch_bytes(cost, params, added / cost.grad_shards) / reached_bandwidth(cluster)
    of_parameters = of_blocks = 1.0
    if cost.stages > 1:  # sends and receives activations and gradients
        launch += 4.0 * cost.interleave * SEND_LAUNCHES * cost.ops_scale * cluster.device.launch_s
        of_parameters, of_blocks = params / totals.num_params, blocks / totals.num_blocks
    shared = [
        of_parameters * one + of_blocks * other
        for one, other in zip(totals.by_parameters, totals.by_blocks, strict=True)
    ]
    exposed, hidden, inside, between = exposed + shared[0], hidden + shared[1], inside + shared[2], between + shared[3]
    if cluster.device.type != "cuda":
        exposed += max(0.0, hidden - matmul - traffic - launch)
        total = matmul + traffic + launch + exposed
    else:
        exposed += slowdown_of_hidden(hidden, matmul + traffic)
        total = ((matmul + traffic + exposed) ** SHARPNESS + launch**SHARPNESS) ** (1 / SHARPNESS)
    computing = max(matmul + traffic, total - exposed)  # rounding may make the difference too small
    work = _Copy(matmul, traffic, launch, exposed, hidden, inside, between, params, dense, experts, added)
    return _MicroBatch(work, computing, exposed, computing + exposed)


def slowdown_of_hidden(sending_s: float, computing_s: float) -> float:
    """Seconds that communication adds to the computing that hides it on a GPU.

    Communication kernels take multiprocessors and memory bandwidth from computing kernels.
    """
    return max(SLOWED * sending_s, sending_s - computing_s)


def reached_bandwidth(cluster: ClusterSpec) -> float:
    return cluster.device.memory_bandwidth * cluster.device.efficiency.traffic


def _unfilled_share(cost: Cost) -> float:
    """The unfilled share of the bubble: the slowest stage waits this share of the other stages' micro-batch time.

    Zero-bubble fills gaps with weights' gradients, which take a forward pass's time: Qi et al. 2023, arXiv 2401.10241.
    """
    return (1 + cost.recompute) / (3 + cost.recompute) if cost.schedule == "zero_bubble" else 1 / cost.interleave


def _end_seconds(
    cost: Cost, runs: Sequence[_Run], totals: _Totals, host_s: float, cluster: ClusterSpec
) -> tuple[float, float]:
    """Seconds of communication and of the optimizer that end the step on the stage that finishes last.

    The backward of the last micro-batch hides overlappable communication. It takes as long as the slowest stage's, as
    far as other work fills the gaps, and `host_s` longer for transfers from the host. Later stages finish theirs
    earlier, while the first ones still wait for gradients; so of equal stages only the first can finish last. The
    slowest stage's time is excluded from that, since transfers from the host may hide it.
    """
    optimizer_s = optimizer_bytes(cost) / reached_bandwidth(cluster)
    optimizer_s += cost.optim_flops / (peak_flops(cluster.device, "bfloat16") * cluster.device.efficiency.matmul)
    unfilled, slowest_s = _unfilled_share(cost), max(run.micro.total_s for run in runs)
    in_backward = (2.0 + cost.recompute) / (3.0 + cost.recompute)  # of computing
    waiting = host_s + (1.0 - unfilled) * in_backward * slowest_s
    last, longest, earlier = (0.0, 0.0), 0.0, -slowest_s
    for _, number, micro in runs:
        share = micro.work.params / totals.num_params if cost.stages > 1 else 1.0
        backward = unfilled * in_backward * micro.total_s
        waited = max(0.0, unfilled * in_backward * earlier)
        hiding = max(0.0, share * totals.once.hidden_s - backward - waiting)
        if cluster.device.type == "cuda":
            hiding = slowdown_of_hidden(share * totals.once.hidden_s, backward + waiting)
        exposed = share * totals.once.exposed_s + hiding
        work = micro.work
        optimizer = optimizer_s * kept_elements(work.dense, work.experts, cost.optim_shards, cost.expert_ranks)
        if exposed + optimizer - waited > longest:
            longest = exposed + optimizer - waited
            left = max(0.0, exposed - waited)
            last = left, longest - left
        earlier += number * micro.total_s
    return last
