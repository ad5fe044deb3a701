"""Divisibility of a model: heads, groups of keys and values, experts and tokens are shared out whole."""

from __future__ import annotations

from collections.abc import Sequence

from atorch.cost import Cost, Segment


def indivisible(segments: Sequence[Segment], size: int, what: str, *, experts: bool = False) -> str | None:
    """Why attention heads, or experts, cannot be shared out over `size` processes, which are `what`; None if they can.

    Fewer heads of keys and values than processes are held by several of them.
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
    """Why sequences cannot be cut into `size` equal pieces, as `what` does; None if they can."""
    for length in {segment.sequence_length for segment in segments}:
        if length % size:
            return f"{what} cuts sequences into {size} pieces, which does not divide their {length} tokens"
    return None


def unmet_tokens(cost: Cost) -> str | None:
    """Why tokens cannot be split inside of blocks: where they do not meet in fused attention; None if they do."""
    if cost.attention == "fused":
        return None
    remedy = "add module_replace" if cost.attention == "replaceable" else "let their attention call it"
    return f"blocks call no scaled_dot_product_attention, by which alone split tokens may meet; {remedy}"
