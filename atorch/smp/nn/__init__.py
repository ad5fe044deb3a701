"""Modules of SageMaker model parallel."""

from __future__ import annotations

from atorch.smp.nn.layer_norm import FusedLayerNorm

__all__ = ["FusedLayerNorm"]
