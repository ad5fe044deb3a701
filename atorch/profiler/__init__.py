"""Tracing and measuring."""

from atorch.profiler.trace import trace

__all__ = ["trace"]
