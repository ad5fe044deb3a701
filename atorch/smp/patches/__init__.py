"""Checkpointing functions with the signatures of torch's: `smp.patches.checkpoint`."""

from __future__ import annotations

from atorch.smp.patches import checkpoint

__all__ = ["checkpoint"]
