"""Copies of a model's structure whose tensors are whatever `convert` makes of the originals.

Modules are copied by `deepcopy` with a memo that answers for every tensor beforehand. With lazy clones the copy
shares the model's memory until it is written; with fake tensors it has no memory at all. The model is not touched.
Of blocks that are equal one is copied, and the others become modules of their own around the same parts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from atorch.errors import ArgumentError
from atorch.profiler.tensors import local_part

Convert = Callable[[torch.Tensor], torch.Tensor]


def copy_structure(model: nn.Module, convert: Convert, equal: Sequence[Sequence[nn.Module]] = ()) -> nn.Module:
    """A copy of `model` with `convert(tensor)` in place of every parameter, buffer and tensor attribute.

    What is shared in the model (tied parameters, a module used twice) is shared in the copy. Gradients are not copied.
    Of each group of `equal` modules the copies share their parts, those of the first.

    Raises:
        ArgumentError: the model holds something that cannot be copied, such as a lock or an open file.
    """
    memo: dict[int, object] = {}
    others = {id(each) for group in equal for each in group[1:]}
    for tensor in _tensors(model, others):
        converted = convert(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            converted = nn.Parameter(converted, requires_grad=tensor.requires_grad)
            vars(converted).update(vars(tensor))  # marks that libraries leave on parameters
        memo[id(tensor)] = converted
    try:
        for first, *rest in equal:
            duplicate = copy.deepcopy(first, memo)
            memo.update({id(each): _sharing_parts(duplicate) for each in rest})
        whole: nn.Module = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ArgumentError(
            f"{type(model).__name__} cannot be copied ({error}), and the search tries strategies on copies; keep what "
            "cannot be copied out of the model, or give a load_strategy"
        ) from error
    return whole


def lazy_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy that shares the model's memory until either is written; meta tensors become real ones on `device`.

    Of DTensors it has the parts that are this process's.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        tensor = local_part(tensor)
        if not tensor.is_meta:
            return torch._lazy_clone(tensor)
        # Values do not matter to time and memory, but zeros and denormals would not be typical ones.
        real = torch.zeros_like(tensor, device=device)
        return real.uniform_(-0.02, 0.02) if real.is_floating_point() else real

    return copy_structure(model, convert)


def _sharing_parts(module: nn.Module) -> nn.Module:
    """Another module of the same parts, with hooks of its own."""
    other: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(other)[name] = copy.copy(value) if "_hooks" in name else value
    return other


def _tensors(model: nn.Module, left_out: AbstractSet[int]) -> Iterator[torch.Tensor]:
    for module in _modules(model, set(left_out)):
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)
        yield from (tensor for tensor in module._buffers.values() if tensor is not None)
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _modules(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Every module once, but for those seen and what is only below them."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module
    for child in module.children():
        yield from _modules(child, seen)
