"""Tracing of models and measurement of devices."""

from atorch.profiler.trace import trace

__all__ = ["trace"]
