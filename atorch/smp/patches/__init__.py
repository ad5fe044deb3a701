"""Replacements of torch's functions in the original: `smp.patches.checkpoint`."""

from __future__ import annotations

from atorch.smp.patches import checkpoint

__all__ = ["checkpoint"]
