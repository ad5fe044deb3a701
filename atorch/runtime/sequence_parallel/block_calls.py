"""One evaluation of a model: the arguments of its blocks, and the blocks that computed them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr as _keystr
from torch.utils._pytree import tree_flatten_with_path

from atorch.distributed.rng import preserved_rng
from atorch.model.state import evaluation_mode
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, map_places

RunModel = Callable[[nn.Module], Any]
"""Calls the model on a batch and returns its output."""


@dataclass
class BlockCalls:
    path: str
    kind: Any
    """Equal for blocks that can be analysed as one."""
    origins: dict[str, tuple[str, str]]
    """By place of an argument that an earlier block returned: its path, and the place in its output."""
    num_calls: int = 1
    outputs: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Evaluation:
    """The blocks in order of their first calls, one call of each kind, and the model's output."""

    blocks: dict[str, BlockCalls]
    calls: dict[Any, ForwardCall]
    output: Any


def evaluate(model: nn.Module, blocks: Mapping[str, nn.Module], run: RunModel) -> Evaluation:
    """Run the model once, in eval mode and without gradients."""
    seen: dict[str, BlockCalls] = {}
    calls: dict[Any, ForwardCall] = {}
    outputs: dict[int, tuple[Tensor, tuple[str, str]]] = {}  # by id; kept alive so that ids stay unique

    def before(path: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            if path in seen:
                seen[path].num_calls += 1
                return
            tensors = by_place((args, kwargs))
            origins = {place: outputs[id(tensor)][1] for place, tensor in tensors.items() if id(tensor) in outputs}
            kind = _kind(block, tensors, origins)
            if kind not in calls:
                calls[kind] = ForwardCall(*copied((args, kwargs)))  # blocks may fill caches among them
            seen[path] = BlockCalls(path, kind, origins)

        return hook

    def after(path: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, output: Any) -> None:
            seen[path].outputs = by_place(output)
            outputs.update({id(tensor): (tensor, (path, place)) for place, tensor in seen[path].outputs.items()})

        return hook

    handles = [block.register_forward_pre_hook(before(path), with_kwargs=True) for path, block in blocks.items()]
    handles += [block.register_forward_hook(after(path)) for path, block in blocks.items()]
    try:
        with evaluating(model):
            return Evaluation(seen, calls, run(model))
    finally:
        for handle in handles:
            handle.remove()


def by_place(data: Any) -> dict[str, Tensor]:
    """The tensors in nested containers, by place."""
    return {_keystr(path): leaf for path, leaf in tree_flatten_with_path(data)[0] if isinstance(leaf, Tensor)}


def copied(data: Any) -> Any:
    """A deep copy of `data`; tensors in its containers become detached clones."""
    return copy.deepcopy(data, {id(tensor): tensor.detach().clone() for tensor in by_place(data).values()})


def changed(data: Any, change: Callable[[Tensor, int], Tensor], dims: Mapping[str, int]) -> Any:
    """`data` with `change(tensor, dim)` at the places of `dims`."""
    return map_places(lambda place, tensor: change(tensor, dims[place]) if place in dims else tensor, data)


def _kind(block: nn.Module, tensors: Mapping[str, Tensor], origins: Mapping[str, Any]) -> Any:
    parameters = tuple((name, tuple(p.shape)) for name, p in block.named_parameters(remove_duplicate=False))
    arguments = tuple((place, tuple(tensor.shape), place in origins) for place, tensor in tensors.items())
    return type(block), parameters, arguments


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside; each module's own mode is restored afterwards."""
    with evaluation_mode(model), torch.no_grad(), preserved_rng():
        yield
