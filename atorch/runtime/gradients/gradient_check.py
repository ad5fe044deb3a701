"""A sample of a model's gradients, to compare with those of the same pass under another strategy, in any sharding.

    sample = sample_of(plain_model)                         # after backward
    how_far, name = farthest(other_model, sample)           # after backward, on all ranks together

The norm of all gradients does not show which parameter got which gradient. So the sample keeps the largest elements of
some parameters, which rounding changes least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import gather_objects
from atorch.model.state import ParameterWrite
from atorch.runtime.chunk.parameter import ChunkedParameter
from atorch.runtime.gradients.clip import ClippingModel
from atorch.runtime.gradients.norm_guard import unguard
from atorch.runtime.tensor_parallel.model_layout import ModelLayout
from atorch.runtime.tensor_parallel.state import whole_tensor

PARAMETERS, ELEMENTS = 32, 16
LARGEST = 1 << 24  # most elements of a parameter whose full gradient is gathered
SMALLEST = 0.1  # least norm, as a fraction of the parameters' RMS norm: smaller gradients may be mere rounding


@dataclass(frozen=True)
class LargestElements:
    """The largest elements of a gradient, by their places in it."""

    shape: tuple[int, ...]
    places: Tensor
    values: Tensor

    def __mul__(self, factor: float) -> LargestElements:
        return replace(self, values=self.values * factor)


GradientSample = Mapping[str, LargestElements]
"""Elements by parameter name."""


def sample_of(model: nn.Module, like: GradientSample | None = None) -> GradientSample:
    """The sample of a plain model's gradients.

    like: an earlier sample, whose places are used again; a missing gradient counts as zero.
    """
    grads = {
        name: _flat(parameter.grad.detach()).float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.layout == torch.strided
    }
    if like is not None:
        return {
            name: replace(elements, values=grads[name][elements.places.to(grads[name].device)].cpu())
            if name in grads
            else replace(elements, values=0 * elements.values)
            for name, elements in like.items()
        }
    if not grads:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(grad).cpu() for grad in grads.values()])
    least = SMALLEST * float(norms.square().mean().sqrt())
    sizes = zip(grads.items(), norms.tolist(), strict=True)
    chosen = [name for (name, grad), norm in sizes if norm >= least and 0 < grad.numel() <= LARGEST and norm > 0]
    step = max(1, -(-len(chosen) // PARAMETERS))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: _largest(grads[name], shapes[name]) for name in chosen[::step]}


def _flat(grad: Tensor) -> Tensor:
    return (torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad).reshape(-1)


def _largest(grad: Tensor, shape: tuple[int, ...]) -> LargestElements:
    places = grad.abs().topk(min(ELEMENTS, len(grad))).indices
    return LargestElements(shape, places.cpu(), grad[places].cpu())


@torch.no_grad()
def farthest(
    model: nn.Module,
    sample: GradientSample,
    scale: float = 1.0,
    layout: ModelLayout | None = None,
    group: dist.ProcessGroup | None = None,
    noise: float = 1.0,
) -> tuple[float, str]:
    """The largest relative distance of a gradient from the sample, and its parameter's name; (0.0, "") for none.

    All ranks must call it together, and get the same result. Each rank checks its own parameters, for example of its
    pipeline stage. Gradients that are not on the parameters are left out.

    Args:
        scale: the loss scale of the gradients.
        layout, group: the split of parameters into plain tensors, if any, and the ranks with the other parts.
        noise: divisor of the error orthogonal to the sample, relative to the error along it. Rounding in many layers
            adds orthogonal errors; lost or doubly counted gradients add errors along it.
    """
    parameters = {} if isinstance(model, ClippingModel) else dict(model.named_parameters())
    readers = {name: _reader(name, parameters[name], layout, group) for name in sample if name in parameters}
    without = [name for name, reader in readers.items() if reader is None]
    unread = {name for names in gather_objects(without) for name in names}
    worst = (0.0, "")
    for name, whole in readers.items():
        if whole is not None and name not in unread:
            worst = max(worst, (_distance(whole(), sample[name], scale, noise), name))
    worst_by_rank: list[tuple[float, str]] = gather_objects(worst)
    return max(worst_by_rank)


@torch.no_grad()
def not_as_written(
    values: Mapping[str, Tensor],
    changes: Mapping[str, ParameterWrite],
    layout: ModelLayout | None = None,
    group: dist.ProcessGroup | None = None,
) -> str | None:
    """The name of a parameter that differs from what a plain model's forward pass wrote; None if there is none.

    All ranks must call it together, and get the same result.

    Args:
        values: local values of parameters, by name.
    """
    if not changes:
        return None
    lost = []
    for name, value in values.items():
        rows = None if layout is None else layout.rows.get(name)
        if name in changes and not changes[name].is_in(whole_tensor(value, rows, group)):
            lost.append(name)
    names: list[str] = sum(gather_objects(lost), start=[])
    return names[0] if names else None


def _reader(
    name: str, parameter: Any, layout: ModelLayout | None, group: dist.ProcessGroup | None
) -> Callable[[], Tensor] | None:
    """A function that gathers a parameter's full gradient, on all its ranks together; None if it cannot be read."""
    grad = parameter.grad
    if grad is None and not isinstance(parameter, ChunkedParameter):  # chunks keep their gradients
        grad = torch.zeros_like(parameter.detach())
    if grad is None or getattr(parameter, "shared_over", None) or grad.layout != torch.strided:
        return None
    unguard([grad])
    rows = None if layout is None else layout.rows.get(name)
    return lambda: whole_tensor(grad, rows, group)


def _distance(grad: Tensor, plain: LargestElements, scale: float, noise: float) -> float:
    if tuple(grad.shape) != plain.shape:
        return 0.0  # another module has the same name
    elements = _flat(grad)[plain.places.to(grad.device)].float().cpu() / scale
    square = plain.values.square().sum()
    along = (elements @ plain.values) / square
    across = (elements - along * plain.values).square().sum() / square
    how_far = float(((along - 1) ** 2 + across / noise**2).sqrt())
    return how_far if how_far == how_far else float("inf")
