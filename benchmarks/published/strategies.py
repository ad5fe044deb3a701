"""A published layout in atorch's own methods, so that one and the same estimate can compare it with a plan."""

from __future__ import annotations

from typing import Any

import atorch.auto.opt_lib  # noqa: F401  registers the methods
from atorch.auto.opt_lib.shared.defaults import complete
from atorch.auto.strategy import Strategy
from benchmarks.published.layout import Layout, layout_of
from benchmarks.published.rows import is_compiled
from benchmarks.published.table import Row
from benchmarks.published.words import Recomputation, precision_of, recomputation_of

Item = tuple[str, Any]


def strategy_of(row: Row) -> Strategy:
    """The row's layout, in 16-bit parameters with fp32 masters.

    torchtitan's selective recomputation becomes the nearest of atorch: results of all products are kept.
    """
    layout, precision = layout_of(row), precision_of(row)
    half = {"dtype": "fp16" if precision.dtype == "float16" else "bf16"}
    items = [
        ("parallel_mode", (_axes(layout), None)),
        *([("half", half)] if precision.is_mixed else []),
        *([("fp8", None)] if precision.dtype == "float8" else []),
        *_splits(layout),
        *_recomputation(recomputation_of(row), layout),
        *([("compile", None)] if is_compiled(row) else []),
        *_sharding(layout),
        *_micro_batches(layout),
    ]
    return complete(Strategy.of(items), layout.devices)


def _axes(layout: Layout) -> list[tuple[str, int]]:
    shared = layout.shared_by if layout.zero == 3 else layout.data
    sizes = (
        ("tensor", layout.tensor),
        ("context", layout.context),
        ("zero", shared if shared < layout.data else 1),
        ("data", layout.data // shared if shared < layout.data else layout.data),
        ("pipeline", layout.pipeline),
    )
    return [(name, size) for name, size in sizes if size > 1 or name == "data"]


def _splits(layout: Layout) -> list[Item]:
    items: list[Item] = []
    if layout.tensor > 1:
        items.append(("tensor_parallel", None))
    if layout.splits_norms:
        items.append(("sequence_parallel", {"mode": "megatron"}))
    if layout.context > 1:
        items.append(("context_parallel", None))
    if layout.pipeline > 1:
        pieces = {"schedule": "interleaved", "interleave": layout.interleave} if layout.interleave > 1 else {}
        items.append(("pipeline_parallel", pieces or None))
    return items


def _recomputation(recomputation: Recomputation, layout: Layout) -> list[Item]:
    if recomputation.what == "nothing":
        return []
    return [("checkpoint", {"selective": True} if recomputation.what in ("attention", "products") else None)]


def _sharding(layout: Layout) -> list[Item]:
    if layout.data * layout.context == 1:
        return []
    if layout.zero == 3:
        return [("fsdp", {"reshard_after_forward": False} if layout.keeps_gathered else None)]
    return [(f"zero{layout.zero}", None)] if layout.zero else [("ddp", None)]


def _micro_batches(layout: Layout) -> list[Item]:
    if layout.num_micro_batches == 1:
        return []
    return [("micro_batch", {"size": int(layout.micro_batch), **({"reduce": "each"} if layout.zero == 3 else {})})]
