"""Parameters and buffers on the meta device: memory in their place, and who may not be called before they have values.

What has memory and no value is NaN, so that nothing that is computed from it looks right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from atorch.errors import ArgumentError

MAX_NAMED = 3  # in an error


def is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # of a fake tensor it is the device that it stands for


def has_meta(modules: Iterable[nn.Module]) -> bool:
    """True if a parameter or buffer is on the meta device."""
    return any(map(is_meta, own_tensors(inner for module in modules for inner in module.modules())))


def give_memory(
    modules: Iterable[nn.Module],
    make: Callable[[Tensor], Tensor],
    only: Collection[Tensor] | None = None,
) -> dict[Tensor, Tensor]:
    """Put `make(tensor)` in the place of parameters and buffers on the meta device; returns them by the ones before.

    What is tied stays so.
    """
    made: dict[Tensor, Tensor] = {}
    for module in (inner for each in modules for inner in each.modules()):
        own = [each for each in own_tensors([module]) if is_meta(each) and (only is None or each in only)]
        made.update((each, like(each, make(each))) for each in own if each not in made)
        for held in (module._parameters, module._buffers) if own else ():
            held.update({name: made[each] for name, each in held.items() if each in made})  # type: ignore[misc]
        if own and isinstance(module, nn.RNNBase):
            module._init_flat_weights()  # which it calls its kernels with
    return made


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Write what this process holds of `value`: all of it, or the part that it has of a DTensor."""
    mesh: Any = getattr(target, "device_mesh", None)
    if mesh is None:
        target.copy_(value)
        return
    for axis, placement in enumerate(target.placements):  # type: ignore[attr-defined]
        dim = getattr(placement, "dim", None)  # none where it is replicated; strided shards are no Shard
        # Rows over the axis tensor are taken already: they need not be neighbours.
        if dim is not None and (mesh.mesh_dim_names or [""] * mesh.ndim)[axis] != "tensor":
            parts, rank = value.chunk(mesh.size(axis), dim), mesh.get_local_rank(axis)
            value = parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)
    target.to_local().copy_(value)  # type: ignore[attr-defined]


def need_values(module: nn.Module) -> None:
    """Let calls of the module raise while a parameter has no value of those that a checkpoint holds."""
    handles: list[RemovableHandle] = []
    handles.append(module.register_forward_pre_hook(partial(_refuse_unfilled, handles), prepend=True))


def _refuse_unfilled(handles: list[RemovableHandle], module: nn.Module, args: Any) -> None:
    empty = [name for name, each in module.named_parameters() if is_unfilled(each)]
    if empty:
        raise ArgumentError(
            f"{first_names(empty)} of {type(module).__name__} have no values yet: the model was made on the meta "
            "device and accelerated with empty_init=True; load a checkpoint before the first step"
        )
    handles.pop().remove()


def unfilled(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for `tensor` on `device`, in which there is no number that could be taken for its value."""
    real = torch.empty_like(tensor, device=device)
    return real.fill_(torch.nan) if real.is_floating_point() or real.is_complex() else real.zero_()


def first_names(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


def is_unfilled(tensor: Tensor) -> bool:
    """True if this process's part of it is as `unfilled` has made it."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() > 0 and bool(local.detach().isnan().all())


def like(tensor: Tensor, real: Tensor) -> Tensor:
    """`real` as what `tensor` is, a parameter or not, with the marks that libraries have left on it."""
    if not isinstance(tensor, nn.Parameter):
        return real
    made = nn.Parameter(real, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The parameters and buffers of each module itself, not of those below it."""
    for module in modules:
        for held in (module._parameters, module._buffers):
            yield from (each for each in held.values() if each is not None)
