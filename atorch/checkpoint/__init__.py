"""Checkpoints of whole jobs: named tensors cut into boxes, in safetensors files with a manifest, published at once."""
