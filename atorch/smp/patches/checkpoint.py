"""Activation checkpointing of a single call, by functions with the names of torch's."""

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
    """Call `module(*args, **kwargs)`, keeping only its inputs, and recompute the rest in backward.

    A module that automatic partitioning has split over processes runs without checkpointing.

    Args:
        preserve_rng_state: reproduce random numbers, such as dropout's, in the recompute.

    Raises:
        ArgumentError: `module` is not a module, or `smp.partition` has split it.
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
    """Call `sequential_module(input)`, checkpointed in runs of layers on one partition.

    Args:
        input: the first layer's input: a tensor or a tuple.
        strategy, preserve_rng_state, pack_args_as_tuple: as for `smp.set_activation_checkpointing`.

    Raises:
        ArgumentError: the module is no `nn.Sequential` or has its own forward, or the strategy is unknown.
    """
    check_module("checkpoint_sequential", sequential_module)
    if not is_sequential(sequential_module):
        raise ArgumentError(
            f"checkpoint_sequential was given a {type(sequential_module).__name__}; give an nn.Sequential, or call "
            "checkpoint(module, …) for one module"
        )
    check_bools("checkpoint_sequential", preserve_rng_state=preserve_rng_state, pack_args_as_tuple=pack_args_as_tuple)
    options = CheckpointOptions(preserve_rng_state, size_of(strategy))
    # Through `__call__`, so that hooks and pipeline stages see the call.
    checkpoint_forward(sequential_module)
    attributes = vars(sequential_module)
    before = attributes.pop(OPTIONS, None)
    attributes[OPTIONS] = options
    try:
        return sequential_module(input)
    finally:
        del attributes[OPTIONS]
        if before is not None:
            attributes[OPTIONS] = before
