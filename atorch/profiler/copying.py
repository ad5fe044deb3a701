"""Copies of a model's structure whose tensors are whatever `convert` makes of the originals.

Modules are copied by `deepcopy` with a memo that answers for every tensor beforehand. With lazy clones the copy
shares the model's memory until it is written; with fake tensors it has no memory at all. The model is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import nn

from atorch.errors import ArgumentError

Convert = Callable[[torch.Tensor], torch.Tensor]


def copy_structure(model: nn.Module, convert: Convert) -> nn.Module:
    """A copy of `model` with `convert(tensor)` in place of every parameter, buffer and tensor attribute.

    What is shared in the model (tied parameters, a module used twice) is shared in the copy. Gradients are not copied.

    Raises:
        ArgumentError: the model holds something that cannot be copied, such as a lock or an open file.
    """
    memo: dict[int, object] = {}
    for tensor in _tensors(model):
        converted = convert(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            converted = nn.Parameter(converted, requires_grad=tensor.requires_grad)
            vars(converted).update(vars(tensor))  # marks that libraries leave on parameters
        memo[id(tensor)] = converted
    try:
        duplicate: nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied ({error}), and the search tries strategies on copies; keep what "
            "cannot be copied out of the model, or give a load_strategy"
        ) from error
    return duplicate


def lazy_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy that shares the model's memory until either is written; meta tensors become real ones on `device`."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return torch._lazy_clone(tensor)
        # Values do not matter to time and memory, but zeros and denormals would not be typical ones.
        real = torch.zeros_like(tensor, device=device)
        return real.uniform_(-0.02, 0.02) if real.is_floating_point() else real

    return copy_structure(model, convert)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)
        yield from (tensor for tensor in module._buffers.values() if tensor is not None)
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))
