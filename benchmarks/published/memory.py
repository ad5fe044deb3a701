"""What the planner says of a run's memory: the bytes that its table measured, and whether it fits."""

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
"""What the driver's figure has beside the allocator's: CUDA's context, kernels, and buffers of NCCL."""


def metric_of(row: Row) -> Metric:
    """What the row's figure is. Where a table names none, or two, it is taken to be what the allocator reserved."""
    words = row.measured["mem_metric"].lower()
    if "smi" in words:
        return "driver"
    return "allocated" if "allocated" in words and "reserved" not in words else "reserved"


def predicted_memory(row: Row) -> Memory:
    """The stage that the row's figure is of: the one that needs the most, or the first where a framework logs that.

    Raises:
        ArgumentError: the row cannot be understood.
    """
    return memory_of(row, cost_of(row))


def memory_of(row: Row, cost: Cost) -> Memory:
    """`predicted_memory` where the row's cost is known."""
    framework = framework_for(row)
    if cost.held_gathers:  # of what some versions keep, what most runs did
        cost = replace(cost, held_gathers=framework.held_without_pipelines if cost.stages == 1 else 0.0)
    if framework.reports_first:
        return stage_memory(cost, stages_of(cost)[0])
    return peak_memory(cost)


def comparable_bytes(row: Row, cost: Cost) -> float:
    """What the row's figure should be."""
    memory, metric = memory_of(row, cost), metric_of(row)
    if metric == "allocated":
        return memory.total
    return memory.reserved + (CONTEXT if metric == "driver" else 0.0)


def fits(cost: Cost, device_bytes: float) -> bool:
    """Whether the stage that needs the most has room on a device, by the planner's own rule."""
    return peak_memory(cost).needed <= (1.0 - RESERVE) * device_bytes
