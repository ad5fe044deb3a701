"""Chooses a strategy: scores compositions, dry-runs the most promising, keeps the fastest."""

from atorch.auto.planner.plan import Estimate, Measurement, Plan, Rejected
from atorch.auto.planner.planner import dry_run, search

__all__ = ["Estimate", "Measurement", "Plan", "Rejected", "dry_run", "search"]
