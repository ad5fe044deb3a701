"""Which leaves a backward pass was asked for: all, those in `loss.backward(inputs=…)`, or `torch.autograd.grad`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node


def can_be_reached(leaf: torch.Tensor) -> bool:
    """Whether a function may have a leaf as its input only to see whether it is asked for.

    Where the function then has no gradient for it, autograd calls the leaf's hooks all the same, with None. Most hooks
    do not expect that.
    """
    hooks = [*(leaf._backward_hooks or {}).values(), *(leaf._post_accumulate_grad_hooks or {}).values()]
    return leaf.is_leaf and leaf.requires_grad and all(hasattr(hook, "expects_none") for hook in hooks)


def expects_none(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which may be called without a gradient."""
    hook.expects_none = True  # type: ignore[attr-defined]
    return hook


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
