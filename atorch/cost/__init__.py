"""Arithmetic on what a device holds and does. Imports no torch."""

from atorch.cost.memory import Memory, peak_bytes, peak_memory
from atorch.cost.profile import BlockProfile, ModelProfile
from atorch.cost.start import plain_cost
from atorch.cost.state import Comm, Cost
from atorch.cost.time import StepTime, step_seconds, step_time

__all__ = [
    "BlockProfile",
    "Comm",
    "Cost",
    "Memory",
    "ModelProfile",
    "StepTime",
    "peak_bytes",
    "peak_memory",
    "plain_cost",
    "step_seconds",
    "step_time",
]
