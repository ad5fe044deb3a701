"""Copies of a model's structure whose tensors are whatever `convert` makes of the originals.

Modules are copied with every reference that leads to them (`atorch.model.copy`). With lazy clones the copy shares the
model's memory until it is written; with fake tensors it has no memory at all. The model is not touched.
Of blocks that are equal one is copied, and the others become modules of their own around the same parts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.model.copy import UNCOPYABLE, Convert, Copier, lazy_clone
from atorch.model.tensors import local_part


def copy_structure(model: nn.Module, convert: Convert, equal: Sequence[Sequence[nn.Module]] = ()) -> nn.Module:
    """A copy of `model` with `convert(tensor)` in place of every parameter, buffer and other tensor that it reaches.

    What is shared in the model (tied parameters, a module used twice) is shared in the copy. Gradients are not copied.
    Of each group of `equal` modules the copies share their parts, those of the first.

    Raises:
        ArgumentError: the model holds something that cannot be copied, such as a lock or an open file.
    """
    return copy_with(model, (), convert, equal)[0]


def copy_with(
    model: nn.Module,
    functions: Iterable[Any],
    convert: Convert,
    equal: Sequence[Sequence[nn.Module]] = (),
    without: Collection[nn.Module] = (),
) -> tuple[nn.Module, list[Any]]:
    """`copy_structure`, and of `functions` beside the model, such as its loss function, those that reach the copy.

    without: modules that are not copied; None is in their places.
    """
    beside = tuple(functions)
    copier = Copier(model, beside, {}, convert, without)
    try:
        for first, *rest in equal:
            duplicate = copier.copy(first)
            for each in rest:
                copier.memo[id(each)] = sharing_parts(duplicate)
                # Whoever reaches a part by another road comes to the same one.
                for part, other in zip(_parts(first), _parts(each), strict=True):
                    copier.memo[id(other)] = copier.copy(part)
        return copier.whole(model), [copier.whole_if_possible(each) for each in beside]
    except UNCOPYABLE as error:
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied ({error}), and the search tries strategies on copies; keep what "
            "cannot be copied out of the model, or give a load_strategy"
        ) from error


def lazy_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy that shares the model's memory until either is written; meta tensors become real ones on `device`.

    Of DTensors it has the parts that are this process's.
    """
    return lazy_copy_with(model, (), device)[0]


def lazy_copy_with(model: nn.Module, functions: Iterable[Any], device: torch.device) -> tuple[nn.Module, list[Any]]:
    """`lazy_copy`, and of `functions` beside the model those that reach the copy."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        tensor = local_part(tensor)
        return typical_values(tensor, device) if tensor.is_meta else lazy_clone(tensor)

    return copy_with(model, functions, convert)


def typical_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A real tensor like a meta one, of values whose size is typical: zeros and denormals would take another time."""
    real = torch.zeros_like(tensor, device=device)
    return real.uniform_(-0.02, 0.02) if real.is_floating_point() else real


def sharing_parts(module: nn.Module) -> nn.Module:
    """Another module of the same parts, with hooks of its own."""
    other: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(other)[name] = copy.copy(value) if "_hooks" in name else value
    return other


def _parts(block: nn.Module) -> list[Any]:
    """Parts of a block, in an order that is the same in blocks that are equal."""
    modules = [module for module in block.modules() if module is not block]
    return [*modules, *block.parameters(), *block.buffers()]
