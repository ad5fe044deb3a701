"""The norm of all gradients together, for any sharding, and clipping by it.

For each kind of sharding, the p-th powers of the local norms are summed over the mesh axes that shard the gradients.
Replicated gradients count once. The sums are added to one scalar, and then summed over pipeline stages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from atorch.errors import ArgumentError, shown


@dataclass(frozen=True)
class Spread:
    """The distribution of a model over processes; without arguments, none.

    DTensors are not listed here, since their placements suffice.

    over: groups whose ranks have different parameters, such as the stages of a pipeline.
    parts: for plain tensors that are parts of one parameter, the groups whose ranks have the other parts.
    counted_elsewhere: parameters that another rank of `over` has, too, and counts.
    """

    over: Sequence[dist.ProcessGroup] = ()
    parts: Mapping[Tensor, Key] = field(default_factory=dict)
    counted_elsewhere: Collection[Tensor] = ()

    def groups_of(self, parameter: Tensor) -> Key:
        """The groups whose ranks have the other parts of a parameter."""
        return (*self.parts.get(parameter, ()), *_shards(parameter))

    @torch.no_grad()
    def norm_of_grads(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the model, in fp32; `parameters` are this process's. A collective call."""
        unique = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        device, elsewhere = _norm_device(unique), set(map(id, self.counted_elsewhere))
        # Keys come from the parameters, so all ranks have the same keys in order.
        sharded: dict[Key, list[Tensor]] = {}
        for parameter in unique:
            if id(parameter) not in elsewhere:
                grads = sharded.setdefault(self.groups_of(parameter), [])
                grads += [] if parameter.grad is None else [local_grad(parameter)]
        powers = []
        for groups, grads in sharded.items():
            powers.append(_power(grads, norm_type, device))
            _combine(powers[-1], norm_type, groups)
        total = _merged(torch.stack(powers), norm_type) if powers else torch.zeros((), device=device)
        _combine(total, norm_type, self.over)
        return total if math.isinf(norm_type) else total ** (1.0 / norm_type)

    def norms(self, values: Sequence[Tensor], parameters: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of each full value, of shape `(len(values),)`; `values` are local parts, sharded like `parameters`.

        `values` are plain tensors on one device. All ranks with parts of the same parameters must call it together.
        """
        # The infinity norm of no elements is undefined.
        held = [value if value.numel() else value.new_zeros(1) for value in values]
        wide = torch.float64 if values[0].dtype == torch.float64 else torch.float32  # 16 bits would overflow
        norms = torch.stack(torch._foreach_norm(held, norm_type, dtype=wide))
        places: dict[Key, list[int]] = {}
        for place, parameter in enumerate(parameters):
            places.setdefault(self.groups_of(parameter), []).append(place)
        is_largest = math.isinf(norm_type)
        for groups, mine in places.items():
            if groups:
                powers = norms[mine] if is_largest else norms[mine] ** norm_type
                _combine(powers, norm_type, groups)
                norms[mine] = powers if is_largest else powers ** (1.0 / norm_type)
        return norms


Key = tuple[dist.ProcessGroup, ...]
"""The groups over which a gradient is sharded; empty for a gradient that every rank has in full."""


class ClippingModel:
    """Base of models whose gradients are not on their parameters, and that clip them themselves."""

    def clip_gradients(self, max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients, which include the loss scale, and return their norm before clipping."""
        raise NotImplementedError


def clip_grad_norm(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, optimizer: Optimizer | None = None
) -> Tensor:
    """Scale the gradients down, in place, if their norm exceeds `max_norm`; returns the norm before, on the device.

    The norm equals that of single-process training: over all shards and pipeline stages, with tied parameters once, and
    without the fp16 loss scale. All ranks must call it together.

    Args:
        model: as `auto_accelerate` returned it, or any module.
        max_norm: above 0; infinity to get the norm and leave the gradients unchanged.
        norm_type: p > 0, or infinity (also "inf") for the largest absolute value.
        optimizer: ignored; accepted for scripts that pass theirs.

    Raises:
        ArgumentError: an argument is invalid.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"clip_grad_norm was given a {type(model).__name__}, which is not a torch.nn.Module; give the model itself "
            "(result.model), whose gradients may be spread over processes"
        )
    norm_type = math.inf if norm_type == "inf" else norm_type  # type: ignore[comparison-overlap]
    _check_positive("max_norm", max_norm, "a number above 0; leave the call out to clip nothing")
    _check_positive("norm_type", norm_type, "a number above 0, such as 2.0, or infinity")
    binding = getattr(model, "_atorch", None)
    scale = 1.0 if binding is None else binding.loss_scale()
    if isinstance(model, ClippingModel):
        return model.clip_gradients(max_norm * scale, norm_type) / scale
    stages: Key = ()
    if binding is not None and binding.mesh is not None and binding.mesh.size("pipeline") > 1:
        stages = (binding.mesh.group("pipeline"),)
    spread = Spread(stages, parts_of(model, binding), getattr(model, "counted_elsewhere", ()))
    return clip_grads(model.parameters(), max_norm * scale, norm_type, spread) / scale


def _check_positive(name: str, number: Any, what: str) -> None:
    if isinstance(number, Tensor):  # reading its value would wait for the device
        return
    if not isinstance(number, Real) or isinstance(number, bool) or not float(number) > 0:
        raise ArgumentError(f"clip_grad_norm was given {shown(number)} as {name}; it is {what}")


def add_clipping(model: nn.Module) -> None:
    """Add `clip_grad_norm` to a model as `clip_grad_norm_(max_norm, norm_type)`; a method of its class stays."""
    method = getattr(model, "clip_grad_norm_", None)
    if method is None or getattr(method, "func", None) is clip_grad_norm:
        object.__setattr__(model, "clip_grad_norm_", functools.partial(clip_grad_norm, model))


def parts_of(model: nn.Module, binding: Any) -> dict[Tensor, Key]:
    """Parameters that are plain tensors with parts of full ones, with the groups that have the other parts.

    binding: facts of an accelerated model, its `_atorch` attribute, or None.
    """
    if binding is None or binding.layout is None or binding.mesh is None:
        return {}
    key, rows = (binding.mesh.group("tensor"),), binding.layout.rows
    named = model.named_parameters(remove_duplicate=False)
    return {parameter: key for name, parameter in named if name in rows and not hasattr(parameter, "placements")}


@torch.no_grad()
def clip_grads(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, spread: Spread | None = None
) -> Tensor:
    """Clip the gradients of `parameters`, as `clip_grad_norm` does."""
    unique = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
    norm = (spread or Spread()).norm_of_grads(unique, norm_type)
    # No branch on the value, since reading it would wait for the device.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for same in _by_device(local_grad(parameter) for parameter in unique if parameter.grad is not None):
        torch._foreach_mul_(same, factor.to(same[0].device))  # a copy to the host waits for the device
    return norm


def _shards(parameter: Any) -> Key:
    if hasattr(parameter, "shared_over"):  # a chunked parameter, of whose gradient each process has a part
        return tuple(parameter.shared_over)
    placements = getattr(parameter, "placements", ())
    return tuple(
        parameter.device_mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
    )


def local_grad(parameter: Any) -> Tensor:
    grad = parameter.grad
    if not hasattr(grad, "to_local"):
        return grad.as_subclass(Tensor)  # type: ignore[no-any-return]
    if grad.placements != parameter.placements:  # a pending sum, as under sequence parallelism
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return grad.to_local()  # type: ignore[no-any-return]


def _norm_device(parameters: Sequence[Any]) -> torch.device:
    """The device of the norm: the accelerator if any parameter is there or in a mesh of it, else the CPU."""
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        kind = parameter.device.type if mesh is None else mesh.device_type
        if kind != "cpu":
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def _power(grads: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p, or the largest |g|, in fp32, since half precision would overflow."""
    powers = []
    for same in _by_device(grad for grad in grads if grad.numel()):
        wide = torch.float64 if same[0].dtype == torch.float64 else torch.float32
        norms = torch.stack(torch._foreach_norm(same, norm_type, dtype=None if same[0].is_complex() else wide)).float()
        powers.append(_merged(norms if math.isinf(norm_type) else norms**norm_type, norm_type).to(device))
    return _merged(torch.stack(powers), norm_type) if powers else torch.zeros((), device=device)


def _merged(powers: Tensor, norm_type: float) -> Tensor:
    return powers.max() if math.isinf(norm_type) else powers.sum()


def _combine(power: Tensor, norm_type: float, groups: Iterable[dist.ProcessGroup]) -> None:
    for group in groups:
        dist.all_reduce(power, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=group)


def _by_device(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients in lists of one device and dtype, as the fused operations need them."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        lists.setdefault((grad.device, grad.dtype), []).append(grad)
    return list(lists.values())
