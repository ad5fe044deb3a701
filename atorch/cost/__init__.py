"""Arithmetic on what a device holds and does. Imports no torch."""

from atorch.cost.profile import BlockProfile, ModelProfile
from atorch.cost.state import Comm, Cost

__all__ = ["BlockProfile", "Comm", "Cost", "ModelProfile"]
