"""Estimates of a device's memory and step time, by arithmetic. Imports no torch."""

from atorch.cost.memory import Memory, peak_bytes, peak_memory
from atorch.cost.profile import AttentionKind, Matmul, ModelProfile, Region, Segment
from atorch.cost.state import Comm, Cost, plain_cost
from atorch.cost.time import StepTime, StepTimes, step_seconds, step_time

__all__ = [
    "AttentionKind",
    "Comm",
    "Cost",
    "Matmul",
    "Memory",
    "ModelProfile",
    "Region",
    "Segment",
    "StepTime",
    "StepTimes",
    "peak_bytes",
    "peak_memory",
    "plain_cost",
    "step_seconds",
    "step_time",
]
