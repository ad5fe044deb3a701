"""Checks that a model's heads, key/value groups, experts and tokens divide evenly over processes."""

from __future__ import annotations

from collections.abc import Sequence

from atorch.cost import Cost, Segment


def indivisible(segments: Sequence[Segment], size: int, what: str, *, experts: bool = False) -> str | None:
    """The reason why attention heads (or experts) do not divide over the `size` processes of `what`, or None.

    Key/value heads may be fewer than processes: several processes then hold the same head.
    """
    for segment in segments:
        counts = {"attention heads": segment.num_heads, "experts": segment.num_experts if experts else 0}
        for shared, count in counts.items():
            if count % size:
                return f"{what} {size} does not divide the {count} {shared} of {segment.name}"
        groups = segment.num_kv_heads
        if groups % size and size % groups:
            return f"{what} {size} neither divides nor is a multiple of the {groups} key heads of {segment.name}"
    return None


def uncuttable(segments: Sequence[Segment], size: int, what: str) -> str | None:
    """The reason why `what` cannot cut sequences into `size` equal pieces, or None."""
    for length in {segment.sequence_length for segment in segments}:
        if length % size:
            return f"{what} cuts sequences into {size} pieces, which does not divide their {length} tokens"
    return None


def unmet_tokens(cost: Cost) -> str | None:
    """The reason why tokens cannot be split inside blocks, or None. Split tokens can meet in fused attention only."""
    if cost.attention == "fused":
        return None
    remedy = "add module_replace" if cost.attention == "replaceable" else "let their attention call it"
    return f"blocks call no scaled_dot_product_attention, by which alone split tokens may meet; {remedy}"
