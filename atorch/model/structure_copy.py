"""Copies a model's structure, with tensors made by `convert` from the originals.

Modules are copied with every reference that leads to them (`atorch.model.copy`). With lazy clones the copy shares the
model's memory until either is written; with fake tensors it has no memory. The model is not changed. Of equal blocks
one is copied, and the others become separate modules that share its parts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.model.copy import UNCOPYABLE, Convert, Copier, lazy_clone
from atorch.model.pytree import local_part


def copy_structure(model: nn.Module, convert: Convert, equal: Sequence[Sequence[nn.Module]] = ()) -> nn.Module:
    """A copy of `model` with `convert(tensor)` in place of every parameter, buffer and other tensor that it reaches.

    Objects shared in the model (tied parameters, a module used twice) are shared in the copy. Gradients are not copied.
    In each group of `equal` modules the copies share the parts of the first one.

    Raises:
        ArgumentError: the model holds an object that cannot be copied, such as a lock or an open file.
    """
    return copy_with(model, (), convert, equal)[0]


def copy_with(
    model: nn.Module,
    functions: Iterable[Any],
    convert: Convert,
    equal: Sequence[Sequence[nn.Module]] = (),
    without: Collection[nn.Module] = (),
) -> tuple[nn.Module, list[Any]]:
    """`copy_structure`, and copies of `functions`, such as a loss function, that refer to the copy.

    without: modules that are not copied; None replaces them.
    """
    beside = tuple(functions)
    copier = Copier(model, beside, {}, convert, without)
    try:
        for first, *rest in equal:
            duplicate = copier.copy(first)
            for block in rest:
                copier.memo[id(block)] = sharing_parts(duplicate)
                # Other references to a part must lead to the same copy.
                for part, other in zip(_parts(first), _parts(block), strict=True):
                    copier.memo[id(other)] = copier.copy(part)
        return copier.whole(model), [copier.whole_if_possible(function) for function in beside]
    except UNCOPYABLE as error:
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied ({error}), and the search tries strategies on copies; keep what "
            "cannot be copied out of the model, or give a load_strategy"
        ) from error


def lazy_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy that shares the model's memory until either is written; meta tensors become real ones on `device`.

    DTensors become this process's local parts.
    """
    return lazy_copy_with(model, (), device)[0]


def lazy_copy_with(model: nn.Module, functions: Iterable[Any], device: torch.device) -> tuple[nn.Module, list[Any]]:
    """`lazy_copy`, and copies of `functions` that refer to the copy."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        tensor = local_part(tensor)
        return typical_values(tensor, device) if tensor.is_meta else lazy_clone(tensor)

    return copy_with(model, functions, convert)


def typical_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real tensor like a meta one, with values of typical size: zeros and denormals would distort timings."""
    real = torch.zeros_like(tensor, device=device)
    return real.uniform_(-0.02, 0.02) if real.is_floating_point() else real


def sharing_parts(module: nn.Module) -> nn.Module:
    """Another module with the same parts, but its own hooks."""
    other: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(other)[name] = copy.copy(value) if "_hooks" in name else value
    return other


def _parts(block: nn.Module) -> list[Any]:
    """Parts of a block, in the same order in equal blocks."""
    modules = [module for module in block.modules() if module is not block]
    return [*modules, *block.parameters(), *block.buffers()]
