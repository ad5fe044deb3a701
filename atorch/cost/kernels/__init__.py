"""Costs of kernels: matrix products, attention, 8-bit products and other operations."""
