"""The meshes that the search may try: sizes of axes that the model can be divided by and the links can bear.

tensor and sequence talk in every block and stay inside a node; context hides behind attention, data and zero behind
backward, and pipeline sends little. So axes are in that order, the fastest-varying first, as in Narayanan et al. 2021,
arXiv 2104.04473, section 3.2, and Jacobs et al. 2023, arXiv 2309.14509. A sequence is split over one axis at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from atorch.auto.opt_lib.divisible import indivisible, uncuttable
from atorch.cluster import ClusterSpec
from atorch.cost import ModelProfile

SHORTEST = 1024
"""Tokens of a sequence that a process of the axis context has at least: fewer hide no hop of the ring."""

Slices = tuple[tuple[str, int], ...]


def meshes(profile: ModelProfile, cluster: ClusterSpec) -> Iterator[Slices]:
    """`(name, size)` of every axis larger than 1, the fastest-varying first, for all meshes worth a look."""
    world = cluster.world_size
    for tensor in _tensors(profile, cluster):
        for sequence, context in _cuts(profile, cluster, tensor):
            inner = tensor * sequence * context
            for pipeline in _divisors(world // inner):
                if pipeline > max(1, profile.num_distinct_blocks):
                    break
                for zero in _shards(cluster, inner, world // inner // pipeline):
                    sizes = {"tensor": tensor, "sequence": sequence, "context": context, "zero": zero}
                    sizes |= {"data": world // inner // pipeline // zero, "pipeline": pipeline}
                    yield tuple((name, size) for name, size in sizes.items() if size > 1)


def _tensors(profile: ModelProfile, cluster: ClusterSpec) -> Iterator[int]:
    """Sizes of tensor: inside a node, and beyond where a node's devices together cannot hold one block."""
    yield 1
    if not any(block.num_heads > 1 for block in profile.blocks):
        return
    largest = cluster.devices_per_node
    while largest < cluster.world_size and _block_bytes(profile) / largest > cluster.device.memory_bytes:
        largest *= 2
    for size in _divisors(cluster.world_size)[1:]:
        is_whole = size % cluster.devices_per_node == 0 or cluster.devices_per_node % size == 0
        if size <= largest and is_whole and not indivisible(profile.segments, size, "tensor", experts=True):
            yield size


def _block_bytes(profile: ModelProfile) -> float:
    """Bytes of one block that runs backward alone: 16-bit weights twice, fp32 gradients, one sample's results."""
    return max((8.0 * each.num_params + each.saved_bytes / profile.batch_size for each in profile.blocks), default=0.0)


def _cuts(profile: ModelProfile, cluster: ClusterSpec, tensor: int) -> Iterator[tuple[int, int]]:
    """Sizes of (sequence, context) beside a size of tensor."""
    yield 1, 1
    lengths = [block.sequence_length for block in profile.blocks if block.attention_flops and block.sequence_length]
    if not lengths:
        return
    has_heads = any(block.num_heads > 1 for block in profile.blocks)
    for size in _divisors(cluster.world_size // tensor)[1:]:
        is_inside = has_heads and cluster.devices_per_node % (tensor * size) == 0
        heads = indivisible(profile.segments, tensor * size, "tensor × sequence")
        if is_inside and not heads and not uncuttable(profile.segments, size, "sequence"):
            yield size, 1
        if min(lengths) // size >= SHORTEST and not uncuttable(profile.segments, 2 * size, "context"):
            yield 1, size


def _shards(cluster: ClusterSpec, inner: int, replicas: int) -> Iterator[int]:
    """Sizes of zero: none, where all replicas are shards or copies alike; those of a node or a leaf, copied between."""
    yield 1
    within = (devices // inner for devices in (cluster.devices_per_node, cluster.devices_per_leaf))
    yield from sorted({size for size in within if 1 < size < replicas and replicas % size == 0})


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
