"""A copy of a block with random weights, to analyse how its results depend on its parameters.

The copy computes in fp32 and without dropout. Weights are drawn, not copied: a new model has zeros that hide
dependences, and a trained one has units that are dead on a short sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr as _keystr
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

from atorch.model.copy import duplicate

PERIOD = 1_000_003
"""Random weights repeat after so many numbers, in a sixth of the time. A prime: no two rows are equal."""


class ForwardCall(NamedTuple):
    """The arguments that a block was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def record_calls(
    model: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[nn.Module], Any]
) -> dict[str, ForwardCall]:
    """The first call of each of `blocks` during `run(model)`; blocks that are not called are left out."""
    calls: dict[str, ForwardCall] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in calls:
                # Blocks fill caches among them later. Tensors with a graph, which some models make, cannot be copied.
                calls[name] = copy.deepcopy(tree_map_only(Tensor, _without_graph, ForwardCall(args, kwargs)))

        return hook

    # A run may call the model again, with more of the batch; the last call counts.
    handles = [model.register_forward_pre_hook(lambda *_: calls.clear())]
    handles += [m.register_forward_pre_hook(keep(name), with_kwargs=True) for name, m in blocks.items()]
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach()


def apart(block: nn.Module) -> nn.Module:
    """A copy of the block for trials: in fp32, without dropout, every parameter trainable and drawn."""
    parameters: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device=p.device)) for p in block.parameters()
    }
    twin = duplicate(block, parameters).float().eval()
    draw_weights(twin, 0)
    return twin


@torch.no_grad()
def draw_weights(block: nn.Module, seed: int) -> None:
    """Draw weights that keep activations near 1, the same on every rank. Parameters are contiguous."""
    for number, parameter in enumerate(block.parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed * 10_007 + number)
        if parameter.dim() < 2:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            bound = (3 / min(parameter.shape[-2:])) ** 0.5
            drawn = torch.empty(min(parameter.numel(), PERIOD), device=parameter.device)
            drawn.uniform_(-bound, bound, generator=generator)
            for part in parameter.view(-1).split(PERIOD):
                part.copy_(drawn[: len(part)])


def fresh(call: ForwardCall) -> tuple[ForwardCall, dict[str, Tensor]]:
    """The arguments as new tensors in fp32, and by place the leaves that collect gradients for them."""
    args, kwargs = copy.deepcopy(call)
    leaves, spec = tree_flatten_with_path((args, kwargs))
    leaf_of: dict[int, Tensor] = {}
    clone_of: dict[int, Tensor] = {}
    by_place: dict[str, Tensor] = {}
    values = []
    for path, leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if id(leaf) not in leaf_of:
                leaf_of[id(leaf)] = leaf.detach().float().clone().requires_grad_()
                clone_of[id(leaf)] = leaf_of[id(leaf)].clone()  # blocks may change it in place, and a leaf must not be
            by_place[_keystr(path)], leaf = leaf_of[id(leaf)], clone_of[id(leaf)]
        values.append(leaf)
    return ForwardCall(*tree_unflatten(values, spec)), by_place


def map_places(change: Callable[[str, Tensor], Tensor], data: Any) -> Any:
    """`data` with `change(place, tensor)` in place of each tensor."""
    leaves, spec = tree_flatten_with_path(data)
    values = [change(_keystr(path), leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves]
    return tree_unflatten(values, spec)


def tensors_of(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in order."""
    return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
