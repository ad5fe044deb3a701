"""A sample of a model's gradients, to which those of the same pass done otherwise are held, however they are spread.

    sample = sample_of(plain_model)                         # after backward
    how_far, name = farthest(other_model, sample)           # after backward, on all ranks together

The norm of all gradients says nothing of which parameter got which. So of some parameters, the largest elements are
kept, which rounding changes least.
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
from atorch.runtime.gradients.clip import ClipsItself
from atorch.runtime.gradients.norm_guard import unguard
from atorch.runtime.tensor_parallel.layout.model_layout import ModelLayout
from atorch.runtime.tensor_parallel.state import whole_tensor

PARAMETERS, ELEMENTS = 32, 16
LARGEST = 1 << 24  # elements of a parameter whose gradient is put together
SMALLEST = 0.1  # of what a parameter's share of the norm is on average: smaller gradients may be rounding alone


@dataclass(frozen=True)
class Elements:
    """The largest elements of a gradient, by their places in it."""

    shape: tuple[int, ...]
    places: Tensor
    values: Tensor

    def __mul__(self, factor: float) -> Elements:
        """Elements of a gradient that is `factor` times as large."""
        return replace(self, values=self.values * factor)


GradientSample = Mapping[str, Elements]
"""By the name of the parameter."""


def sample_of(model: nn.Module, like: GradientSample | None = None) -> GradientSample:
    """The sample of the gradients that a plain model has.

    like: an earlier sample, whose places are taken; a gradient that is not there is zero.
    """
    grads = {
        name: _flat(parameter.grad.detach()).float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.layout == torch.strided
    }
    if like is not None:
        return {
            name: replace(
                each, values=grads[name][each.places.to(grads[name].device)].cpu() if name in grads else 0 * each.values
            )
            for name, each in like.items()
        }
    if not grads:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(grad).cpu() for grad in grads.values()])
    least = SMALLEST * float(norms.square().mean().sqrt())
    sizes = zip(grads.items(), norms.tolist(), strict=True)
    telling = [name for (name, grad), norm in sizes if norm >= least and 0 < grad.numel() <= LARGEST and norm > 0]
    step = max(1, -(-len(telling) // PARAMETERS))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: _largest(grads[name], shapes[name]) for name in telling[::step]}


def _flat(grad: Tensor) -> Tensor:
    """All elements; of complex ones both parts."""
    return (torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad).reshape(-1)


def _largest(grad: Tensor, shape: tuple[int, ...]) -> Elements:
    places = grad.abs().topk(min(ELEMENTS, len(grad))).indices
    return Elements(shape, places.cpu(), grad[places].cpu())


@torch.no_grad()
def farthest(
    model: nn.Module,
    sample: GradientSample,
    scale: float = 1.0,
    layout: ModelLayout | None = None,
    group: dist.ProcessGroup | None = None,
    noise: float = 1.0,
) -> tuple[float, str]:
    """The distance of the gradient farthest from the sample, as a fraction of it, and its name; (0.0, "") for none.

    All ranks call it together and get the same. What only some have, as the stages of a pipeline, they look at alone;
    what is kept elsewhere than on the parameters is left out.

    Args:
        scale: what gradients are multiplied by.
        layout, group: how parameters are split into plain tensors, if they are, and over which ranks.
        noise: what a gradient has beside the sample's direction counts so many times less than what it lacks or has
            too much along it. Many layers of rounding add the one; gradients lost or taken twice are the other.
    """
    own = {} if isinstance(model, ClipsItself) else dict(model.named_parameters())
    read = {name: _reader(name, own[name], layout, group) for name in sample if name in own}
    unread = {name for names in gather_objects([name for name, each in read.items() if each is None]) for name in names}
    found = (0.0, "")
    for name, whole in read.items():
        if whole is not None and name not in unread:
            found = max(found, (_distance(whole(), sample[name], scale, noise), name))
    every: list[tuple[float, str]] = gather_objects(found)
    return max(every)


@torch.no_grad()
def not_as_written(
    values: Mapping[str, Tensor],
    changes: Mapping[str, ParameterWrite],
    layout: ModelLayout | None = None,
    group: dist.ProcessGroup | None = None,
) -> str | None:
    """A parameter that is not what a plain model's forward pass made of it; None where all are.

    All ranks call it together and get the same.

    Args:
        values: of parameters, by name, as they are spread.
    """
    if not changes:
        return None
    lost = []
    for name, value in values.items():
        rows = None if layout is None else layout.rows.get(name)
        if name in changes and not changes[name].is_in(whole_tensor(value, rows, group)):
            lost.append(name)
    found: list[str] = sum(gather_objects(lost), start=[])
    return found[0] if found else None


def _reader(
    name: str, parameter: Any, layout: ModelLayout | None, group: dist.ProcessGroup | None
) -> Callable[[], Tensor] | None:
    """A reader of a parameter's whole gradient, for all ranks that have it together; None where there is none."""
    grad = parameter.grad
    if grad is None and not isinstance(parameter, ChunkedParameter):  # whose gradient is elsewhere
        grad = torch.zeros_like(parameter.detach())
    if grad is None or getattr(parameter, "shared_over", None) or grad.layout != torch.strided:
        return None
    unguard([grad])
    rows = None if layout is None else layout.rows.get(name)
    return lambda: whole_tensor(grad, rows, group)


def _distance(grad: Tensor, plain: Elements, scale: float, noise: float) -> float:
    if tuple(grad.shape) != plain.shape:
        return 0.0  # of another module under the same name
    found = _flat(grad)[plain.places.to(grad.device)].float().cpu() / scale
    square = plain.values.square().sum()
    along = (found @ plain.values) / square
    across = (found - along * plain.values).square().sum() / square
    how_far = float(((along - 1) ** 2 + across / noise**2).sqrt())
    return how_far if how_far == how_far else float("inf")
