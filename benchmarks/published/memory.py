"""Estimated memory of a run: the bytes that its table measured, and whether the run fits."""

from __future__ import annotations

from dataclasses import replace

from atorch.cost import Cost, Memory, peak_memory
from atorch.cost.memory import RESERVE, stage_memory
from atorch.cost.pipeline_stages import stages_of
from atorch.units import GiB
from benchmarks.published.layout import framework_for
from benchmarks.published.metrics import Metric
from benchmarks.published.rows import cost_of
from benchmarks.published.table import Row

CONTEXT = 1.5 * GiB
"""Bytes in the driver's figure but not in the allocator's: CUDA's context, kernels, and buffers of NCCL."""


def metric_of(row: Row) -> Metric:
    """Metric of the row's figure. If a table names none, or two, it is what the allocator reserved."""
    words = row.measured["mem_metric"].lower()
    if "smi" in words:
        return "driver"
    return "allocated" if "allocated" in words and "reserved" not in words else "reserved"


def predicted_memory(row: Row) -> Memory:
    """Memory of the stage that the row's figure is of: the largest, or the first if the framework logs that one.

    Raises:
        ArgumentError: the row is refused.
    """
    return memory_of(row, cost_of(row))


def memory_of(row: Row, cost: Cost) -> Memory:
    """`predicted_memory` for a given cost."""
    framework = framework_for(row)
    if cost.held_gathers:  # versions differ in this; as most runs did
        cost = replace(cost, held_gathers=framework.held_without_pipelines if cost.stages == 1 else 0.0)
    if framework.reports_first:
        return stage_memory(cost, stages_of(cost)[0])
    return peak_memory(cost)


def comparable_bytes(row: Row, cost: Cost) -> float:
    """Estimate of the row's figure, in its metric."""
    memory, metric = memory_of(row, cost), metric_of(row)
    if metric == "allocated":
        return memory.total
    return memory.reserved + (CONTEXT if metric == "driver" else 0.0)


def fits(cost: Cost, device_bytes: float) -> bool:
    """True if the largest stage fits on a device, by the planner's own rule."""
    return peak_memory(cost).needed <= (1.0 - RESERVE) * device_bytes
