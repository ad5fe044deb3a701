"""Modules outside of the blocks that work token by token, computed by each rank on its own tokens.

Candidates are the outermost modules outside of the blocks with one tensor argument: embeddings, final norms, heads.
Each runs once on all tokens of a small batch and once on a rank's. If every rank gets its part of the whole result, the
module takes the rank's tokens from then on. Its result stays split until a caller needs all tokens (`split_tokens`).
All other modules stay unchanged. Fake tensors have no values, so shapes decide (`position_dependence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from atorch.distributed.collectives import gather_objects
from atorch.distributed.rng import RankStream
from atorch.model.state import evaluating
from atorch.model.structure import made_alone, outside_of
from atorch.model.wrapper import override
from atorch.runtime.sequence_parallel.split_validation import (
    RunModel,
    changed,
    copied,
    cut_along,
    uses_random_numbers,
    usual,
)
from atorch.runtime.sequence_parallel.token_partition import (
    TokenPartition,
    Tokens,
    is_by_tokens,
    own_tokens,
    split_tokens,
)
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, by_place
from atorch.runtime.tensor_parallel.derive.split_validation import MISFITS
from atorch.runtime.tensor_parallel.sharded_activation import SplitTensor


@dataclass(frozen=True)
class ByToken:
    """The token split of a module that works token by token."""

    place: str
    """The place of the argument that is cut by tokens."""
    given: int
    """Its dim of tokens, counted from the first."""
    made: int
    """The result's dim of tokens."""
    draws: bool
    """True if it draws random numbers in training."""


@torch.no_grad()
def find_by_token(
    model: nn.Module, blocks: Mapping[str, nn.Module], run: RunModel, dims: Set[int], share: TokenPartition
) -> dict[str, ByToken]:
    """Modules outside of `blocks`, by path, that compute the same on a rank's tokens, on all ranks.

    Args:
        dims: the dims of tokens in the blocks' outputs; results must have one of these.
    """
    by_path = {}
    with evaluating(model):
        with _called(dict(outside_of(model, blocks.keys()))) as calls:
            run(model)
        for path, (call, result) in calls.items():
            way = None if call is None else _way(model.get_submodule(path), call, result, dims, share)
            ways = gather_objects(way, share.group)
            if way is not None and all(other == way for other in ways):
                by_path[path] = way
    return by_path


def compute_by_token(module: nn.Module, way: ByToken, share: TokenPartition) -> None:
    """Let `module` compute on its rank's tokens of any argument; in place."""
    if way.draws:
        override(module, "forward", drawing, share.rank)
    override(module, "__call__", _by_token, way, share)


def _by_token(original: Callable[..., Any], way: ByToken, share: TokenPartition) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = by_place((args, kwargs))
        tensor = tensors.get(way.place)
        if tensor is None or len(tensors) > 1 or not _can_be_cut(tensor, way, share):
            return original(self, *args, **kwargs)

        def cut(tensor: Tensor, dim: int) -> Tensor:
            return own_tokens(tensor, share, dim)

        args, kwargs = changed((args, kwargs), cut, {way.place: way.given})
        return split_tokens(original(self, *args, **kwargs), share, way.made)

    return call


def _can_be_cut(tensor: Tensor, way: ByToken, share: TokenPartition) -> bool:
    if torch.compiler.is_compiling() or tensor.dim() <= way.given or tensor.shape[way.given] % share.pieces:
        return False
    if isinstance(tensor, SplitTensor) and isinstance(tensor._layout, Tokens):
        return is_by_tokens(tensor, way.given)
    return not tensor.requires_grad  # a gathered stream is not cut again


def drawing(original: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """A forward with its own random numbers on every rank, so that dropout differs between tokens."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stream = RankStream(rank)
        if self.training:
            stream.enter(next(iter(by_place((args, kwargs)).values())).device)
        try:
            return original(self, *args, **kwargs)
        finally:
            stream.leave()

    return forward


@contextmanager
def _called(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[ForwardCall | None, Any]]]:
    """Record first calls of modules and their results; (None, None) without exactly one tensor in and out."""
    calls: dict[str, tuple[ForwardCall | None, Any]] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            is_plain = isinstance(output, Tensor) and len(by_place((args, kwargs))) == 1
            if path not in calls:
                calls[path] = (ForwardCall(*copied((args, kwargs))), output.clone()) if is_plain else (None, None)

        return hook

    handles = [module.register_forward_hook(note(path), with_kwargs=True) for path, module in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _way(module: nn.Module, call: ForwardCall, result: Tensor, dims: Set[int], share: TokenPartition) -> ByToken | None:
    """The token split with which a module computes the same on this rank's tokens, or None."""
    if any(isinstance(submodule, _BatchNorm) for submodule in module.modules()):
        return None  # in training its statistics are those of all tokens
    ((place, tensor),) = by_place((call.args, call.kwargs)).items()
    is_fake, shapes_of_all = dist.get_backend(share.group) == "fake", None
    if is_fake:
        _, shapes_of_all = made_alone(partial(module, *call.args, **call.kwargs), [tensor])
    for dim in usual(tensor.dim()):
        if tensor.shape[dim] % share.pieces or tensor.shape[dim] < share.pieces:
            continue

        def part(whole: Tensor, dim: int) -> Tensor:
            return share.part(whole, dim)

        args, kwargs = changed(copied((call.args, call.kwargs)), part, {place: dim})
        try:
            run = partial(module, *args, **kwargs)
            got, shapes = made_alone(run, by_place((args, kwargs)).values()) if is_fake else (run(), None)
        except MISFITS:
            continue
        if shapes != shapes_of_all:
            continue
        result_dim = cut_along(got, result, share, share.rank) if isinstance(got, Tensor) else None
        if isinstance(result_dim, int) and result_dim in dims:
            return ByToken(place, dim, result_dim, uses_random_numbers(module, call))
    return None
