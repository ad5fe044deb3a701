"""Precision: autocast and loss scales, fp32 master weights, and 8-bit matmuls."""
