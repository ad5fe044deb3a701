"""Faster replacements of modules, with reports of the modules that were replaced or kept, and the reasons."""

from __future__ import annotations

from atorch.runtime.fused.attention import SdpaMultiheadAttention, fuse_multihead_attention, use_sdpa
from atorch.runtime.fused.kernels import fuse_cross_entropy, fuse_layer_norms
from atorch.runtime.fused.rms_norm import FusedRMSNorm, fuse_rms_norms

__all__ = [
    "FusedRMSNorm",
    "SdpaMultiheadAttention",
    "fuse_cross_entropy",
    "fuse_layer_norms",
    "fuse_multihead_attention",
    "fuse_rms_norms",
    "use_sdpa",
]
