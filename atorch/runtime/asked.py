"""Which leaves a backward pass was asked for: all, those in `loss.backward(inputs=…)`, or `torch.autograd.grad`'s."""

from __future__ import annotations

import torch
from torch.autograd.graph import Node


def is_captured(accumulator: Node) -> bool:
    """Whether the gradient of a leaf goes to the caller of `torch.autograd.grad`. Called in backward alone."""
    return not _goes_to_the_leaf(accumulator)


def is_asked(accumulator: Node) -> bool:
    """Whether the backward pass that runs computes the gradient of a leaf, whoever gets it."""
    return not _goes_to_the_leaf(accumulator) or torch._C._will_engine_execute_node(accumulator)


def _goes_to_the_leaf(accumulator: Node) -> bool:
    try:
        torch._C._will_engine_execute_node(accumulator)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):  # which torch's does not say for such a leaf
            raise
        return False
    return True
