"""Activation checkpointing of a single call, as torch's functions of these names are called."""

from __future__ import annotations

from typing import Any

from torch import nn

from atorch.errors import ArgumentError, check_bools
from atorch.smp.activation_checkpointing import (
    OPTIONS,
    CheckpointOptions,
    check_module,
    checkpoint_forward,
    is_sequential,
    run_module,
    size_of,
)


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """`module(*args, **kwargs)`, of which the inputs alone are kept, and the rest is computed again in backward.

    A module that automatic partitioning has split over processes is called as it is.

    Args:
        preserve_rng_state: dropout and the like draw the same in the recompute.

    Raises:
        ArgumentError: a function in the place of a module, or a module that `smp.partition` has split.
    """
    check_module("checkpoint", module)
    check_bools("checkpoint", preserve_rng_state=preserve_rng_state)
    return run_module(module, module, CheckpointOptions(preserve_rng_state), args, kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """`sequential_module(input)`, checkpointed in runs of its layers, each of which lies on one partition.

    Args:
        input: what the first layer takes: a tensor, or a tuple.
        strategy, preserve_rng_state, pack_args_as_tuple: as for `smp.set_activation_checkpointing`.

    Raises:
        ArgumentError: a module that is no `nn.Sequential` or has a forward of its own, or a strategy that there is not.
    """
    check_module("checkpoint_sequential", sequential_module)
    if not is_sequential(sequential_module):
        raise ArgumentError(
            f"checkpoint_sequential was given a {type(sequential_module).__name__}; give an nn.Sequential, or call "
            "checkpoint(module, …) for one module"
        )
    check_bools("checkpoint_sequential", preserve_rng_state=preserve_rng_state, pack_args_as_tuple=pack_args_as_tuple)
    options = CheckpointOptions(preserve_rng_state, size_of(strategy))
    # By its call, which its hooks and the stages of a pipeline look at.
    checkpoint_forward(sequential_module)
    held = vars(sequential_module)
    before = held.pop(OPTIONS, None)
    held[OPTIONS] = options
    try:
        return sequential_module(input)
    finally:
        del held[OPTIONS]
        if before is not None:
            held[OPTIONS] = before
