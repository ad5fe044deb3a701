"""Changes that make a job fit if nothing does, each verified by a search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from atorch.auto.strategy import EXACTNESS, Exactness
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Matmul, ModelProfile, Region, Segment

MOST = 3  # limit of listed remedies
LARGEST = 64  # largest factor of more nodes, or of a smaller batch or sequence

Fits = Callable[["UnfitJob"], bool]


@dataclass(frozen=True)
class UnfitJob:
    profile: ModelProfile
    cluster: ClusterSpec
    global_batch: int
    excluded: tuple[str, ...] = ()
    precision: Exactness = EXACTNESS[-1]  # the least exact numbers that may be trained in
    host_memory: bool = True  # whether methods may use it


def remedies(job: UnfitJob, fits: Fits) -> tuple[str, ...]:
    """Changes of which each alone makes the job fit, the cheapest first, at most three."""
    ways = (_allowed(job), _smaller_batches(job), _shorter_sequences(job), _larger_clusters(job))
    advice = (next((text for text, changed in way if fits(changed)), None) for way in ways)
    return tuple(itertools.islice((text for text in advice if text is not None), MOST))


Way = Iterator[tuple[str, UnfitJob]]


def _allowed(job: UnfitJob) -> Way:
    """Allow an excluded method, host memory, or 16-bit parameters."""
    for name in job.excluded:
        rest = tuple(other for other in job.excluded if other != name)
        yield f"allow {name}, which is excluded", replace(job, excluded=rest)
    if not job.host_memory:
        yield "allow host memory (host_memory=True, --host-memory)", replace(job, host_memory=True)
    if EXACTNESS.index(job.precision) < EXACTNESS.index("half"):
        yield 'allow 16-bit parameters (precision="half", --precision half)', replace(job, precision="half")


def _smaller_batches(job: UnfitJob) -> Way:
    """Use fewer samples a step, so that fewer devices have samples of their own and more share the model."""
    for share in _halves():
        if job.global_batch % share == 0:
            batch = job.global_batch // share
            yield f"use a global batch of {batch} instead of {job.global_batch}", replace(job, global_batch=batch)


def _shorter_sequences(job: UnfitJob) -> Way:
    length = max((segment.sequence_length for segment in job.profile.segments), default=0)
    for share in _halves():
        if length and length % share == 0 and length // share >= 1:
            text = f"use sequences of {length // share} instead of {length} tokens"
            yield text, replace(job, profile=_shortened(job.profile, share))


def _larger_clusters(job: UnfitJob) -> Way:
    for factor in _halves():
        nodes = job.cluster.num_nodes * factor
        text = f"use {nodes * job.cluster.devices_per_node} of these devices instead of {job.cluster.world_size}"
        yield text, replace(job, cluster=replace(job.cluster, num_nodes=nodes))


def _halves() -> Sequence[int]:
    return [2**power for power in range(1, LARGEST.bit_length())]


def _shortened(profile: ModelProfile, share: int) -> ModelProfile:
    """The profile of sequences that are `share` times shorter. Quadratic terms shrink only linearly, so that no
    estimate is too small."""
    return replace(
        profile,
        segments=tuple(_shorter(segment, share) for segment in profile.segments),
        in_half=tuple(_shorter(segment, share) for segment in profile.in_half),
        in_autocast=tuple(_shorter(segment, share) for segment in profile.in_autocast),
        output_bytes=profile.output_bytes // share,
    )


def _shorter(segment: Segment, share: int) -> Segment:
    return replace(
        segment,
        matmuls=tuple(_fewer_rows(matmul, share) for matmul in segment.matmuls),
        attention_flops=segment.attention_flops / share,
        outside=_smaller(segment.outside, share),
        inside=_smaller(segment.inside, share),
        input_bytes=segment.input_bytes / share,
        working_bytes=segment.working_bytes / share,
        dispatched_bytes=segment.dispatched_bytes / share,
        sequence_length=segment.sequence_length // share,
    )


def _fewer_rows(product: Matmul, share: int) -> Matmul:
    return replace(product, rows=product.rows / share)


def _smaller(region: Region, share: int) -> Region:
    return Region(
        saved_bytes=region.saved_bytes / share,
        selective_bytes=region.selective_bytes / share,
        traffic_bytes=region.traffic_bytes / share,
    )
