"""Replaces parameters and buffers on the meta device by memory, and guards modules until they have values.

Memory without values is NaN, so results computed from it are visibly wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from atorch.errors import ArgumentError
from atorch.model.pytree import local_part

MAX_NAMED = 3  # in an error


def is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # a fake tensor reports the device that it simulates


def has_meta(modules: Iterable[nn.Module]) -> bool:
    """True if a parameter or buffer is on the meta device."""
    return any(map(is_meta, own_tensors(inner for module in modules for inner in module.modules())))


def give_memory(
    modules: Iterable[nn.Module], make: Callable[[Tensor], Tensor], only: Collection[Tensor] | None = None
) -> dict[Tensor, Tensor]:
    """Replace parameters and buffers on the meta device by `make(tensor)`; returns original → replacement.

    Tied tensors stay tied.
    """
    made: dict[Tensor, Tensor] = {}
    for module in (inner for root in modules for inner in root.modules()):
        on_meta = [tensor for tensor in own_tensors([module]) if is_meta(tensor) and (only is None or tensor in only)]
        made.update((tensor, like(tensor, make(tensor))) for tensor in on_meta if tensor not in made)
        for held in (module._parameters, module._buffers) if on_meta else ():
            held.update({name: made[tensor] for name, tensor in held.items() if tensor in made})  # type: ignore[misc]
        if on_meta and isinstance(module, nn.RNNBase):
            module._init_flat_weights()  # the list that it passes to its kernels
    return made


def need_values(module: nn.Module) -> None:
    """Let calls of the module raise until a checkpoint has filled its parameters."""
    handles: list[RemovableHandle] = []
    handles.append(module.register_forward_pre_hook(partial(_refuse_unfilled, handles), prepend=True))


def _refuse_unfilled(handles: list[RemovableHandle], module: nn.Module, args: Any) -> None:
    empty = [name for name, parameter in module.named_parameters() if is_unfilled(parameter)]
    if empty:
        raise ArgumentError(
            f"{first_names(empty)} of {type(module).__name__} have no values yet: the model was made on the meta "
            "device and accelerated with empty_init=True; load a checkpoint before the first step"
        )
    handles.pop().remove()


def unfilled(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for `tensor` on `device`, filled with NaN, or zero for integers."""
    real = torch.empty_like(tensor, device=device)
    return real.fill_(torch.nan) if real.is_floating_point() or real.is_complex() else real.zero_()


def first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def is_unfilled(tensor: Tensor) -> bool:
    """True if this process's part is still as `unfilled` made it."""
    local = local_part(tensor).detach()
    return local.numel() > 0 and bool(local.isnan().all())


def like(tensor: Tensor, real: Tensor) -> Tensor:
    """`real` as a parameter if `tensor` is one, with the attributes that libraries set on it."""
    if not isinstance(tensor, nn.Parameter):
        return real
    made = nn.Parameter(real, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The parameters and buffers of each module itself, without its children."""
    for module in modules:
        for held in (module._parameters, module._buffers):
            yield from (tensor for tensor in held.values() if tensor is not None)
