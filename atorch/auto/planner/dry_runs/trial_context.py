"""The context of a dry run: a copy of the user's context with memory of its own, and real batches.

A candidate may change modules and tensors in place; the user's model, random states and samplers keep their state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from atorch.auto.context import Context
from atorch.distributed.rng import preserved_rng
from atorch.errors import ArgumentError
from atorch.model.copy import copy_with, typical_values
from atorch.model.pytree import local_part
from atorch.model.storages import OwnMemory, emptied, separate

NUM_BATCHES = 8


def candidate(ctx: Context) -> Context:
    """`ctx` on a copy of its model. Batches come from a Feed, so that building it involves no other process.

    Tensors on the training device are copied at once: multi-tensor kernels of optimizers write through raw pointers,
    which a lazy clone does not notice. Tensors elsewhere are moved there, which copies them. Those on the meta device
    stay there and get their initial values part by part during `build`; without initial values they get typical ones.
    """
    copied = OwnMemory(lambda device: device.type != ctx.device.type)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        tensor = local_part(tensor)
        if tensor.is_meta:
            return torch.empty_like(tensor) if ctx.initial is not None else typical_values(tensor, ctx.device)
        return copied(tensor)

    ctx = _on_copy(ctx, convert)
    separate([*ctx.root.parameters(), *ctx.root.buffers()])
    return replace(ctx, mesh=None, make_loader=None, rank_weights=[])


@contextmanager
def aside(ctx: Context) -> Iterator[Context]:
    """`ctx` on a copy of its model in host memory; inside, the model itself frees its accelerator memory."""
    tensors = [*ctx.root.parameters(), *ctx.root.buffers()]
    tensors = [tensor for tensor in tensors if local_part(tensor).device.type != "cpu" and not tensor.is_meta]
    if not tensors:
        yield ctx
        return
    with emptied([local_part(tensor) for tensor in tensors]) as values:
        yield _on_copy(ctx, OwnMemory(lambda device: True, values))


def _on_copy(ctx: Context, convert: Callable[[torch.Tensor], torch.Tensor]) -> Context:
    functions = ctx.call_model, ctx.loss_func, ctx.prepare_input  # their references to the model must become the copy
    duplicate: nn.Module
    duplicate, (call_model, loss_func, prepare_input) = copy_with(ctx.root, functions, convert)
    ctx = replace(ctx, call_model=call_model, loss_func=loss_func, prepare_input=prepare_input)
    return replace(ctx, root=duplicate, parts=(duplicate,))


@dataclass
class Feed:
    """The first batches of the user's own loader, read once for each rank and number of ranks."""

    ctx: Context
    num_batches: int = NUM_BATCHES
    epoch: int | None = None  # batches of an epoch, once some were read, if the loader has a length
    _batches: dict[tuple[int, int], list[Any]] = field(default_factory=dict)

    def batches(self, rank: int, size: int) -> list[Any]:
        """The first batches of rank `rank` of `size` ranks that see different samples.

        Raises:
            ArgumentError: the loader has no batch.
        """
        if (rank, size) not in self._batches:
            self._batches[rank, size] = self._read(rank, size)
        return self._batches[rank, size]

    def _read(self, rank: int, size: int) -> list[Any]:
        if self.ctx.make_loader is None:
            raise ArgumentError("a dry run needs data; give a dataset")
        loader = self.ctx.make_loader(rank, size)
        self.epoch = len(loader) if hasattr(loader, "__len__") else None
        with preserved_rng(), _preserved_position(loader):  # loaders draw a seed
            batches = list(itertools.islice(loader, self.num_batches))
        if not batches:
            raise ArgumentError("the dataset has no full batch, so nothing can be dry-run; use a smaller batch_size")
        return batches


@contextmanager
def _preserved_position(loader: Any) -> Iterator[None]:
    """Restore the positions of samplers, datasets and generators afterwards."""
    parts = list(_parts(loader))
    generators = {id(g): (g, g.get_state()) for g in map(_generator, parts) if g is not None}
    stateful = [part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")]
    states = [part.state_dict() for part in stateful]
    try:
        yield
    finally:
        for generator, state in generators.values():
            generator.set_state(state)
        for part, state in zip(stateful, states, strict=True):
            part.load_state_dict(state)


def _parts(loader: Any) -> Iterator[Any]:
    """The loader and its datasets, samplers and streams, through wrappers."""
    waiting, seen = [loader], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [getattr(part, name, None) for name in ("dataset", "sampler", "batch_sampler", "batches", "stream")]


def _generator(part: Any) -> torch.Generator | None:
    generator = getattr(part, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None
