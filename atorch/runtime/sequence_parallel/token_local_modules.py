"""Modules outside of the blocks that work token by token, computed by each rank of its own tokens.

Embeddings, final norms, heads: each of those that are outermost outside of the blocks, and are given one tensor, is run
once on all tokens of a small batch and once on a rank's. Where it gives the rank's part of what it gave before, on
every rank, it is given the rank's tokens from then on; its result is split by tokens until somebody asks for all of it
(`split_tokens`). All others are left as they are. On fake tensors, which have no values, shapes tell (`positions`).
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
from atorch.model.method_override import override
from atorch.model.position_dependence import made_alone
from atorch.model.structure import outside_of
from atorch.runtime.sequence_parallel.block_calls import RunModel, by_place, changed, copied, evaluating
from atorch.runtime.sequence_parallel.sharded_tokens import SplitTokens, own_tokens, split_tokens
from atorch.runtime.sequence_parallel.split_validation import MISFITS, cut_along, uses_random_numbers, usual
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall
from atorch.runtime.tensor_parallel.random_numbers import RankStream


@dataclass(frozen=True)
class ByToken:
    """The way a module works token by token."""

    place: str
    """Of the argument that goes along the tokens."""
    given: int
    """Its dim of tokens, from the first one."""
    made: int
    """That of the result."""
    draws: bool
    """True if it draws random numbers in training."""


@torch.no_grad()
def find_by_token(
    model: nn.Module, blocks: Mapping[str, nn.Module], run: RunModel, dims: Set[int], share: TokenPartition
) -> dict[str, ByToken]:
    """Modules outside of `blocks`, by path, that compute the same of a rank's tokens, on all ranks.

    Args:
        dims: along which tokens lie in what blocks give; results have theirs along one of these.
    """
    found = {}
    with evaluating(model):
        with _called(dict(outside_of(model, blocks.keys()))) as calls:
            run(model)
        for path, (call, result) in calls.items():
            way = None if call is None else _way(model.get_submodule(path), call, result, dims, share)
            ways = gather_objects(way, share.group)
            if way is not None and all(each == way for each in ways):
                found[path] = way
    return found


def compute_by_token(module: nn.Module, way: ByToken, share: TokenPartition) -> None:
    """Let `module` be given its rank's tokens, whatever it is given; in place."""
    if way.draws:
        override(module, "forward", drawing, share.rank)
    override(module, "__call__", _by_token, way, share)


def _by_token(theirs: Callable[..., Any], way: ByToken, share: TokenPartition) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = by_place((args, kwargs))
        tensor = given.get(way.place)
        if tensor is None or len(given) > 1 or not _can_be_cut(tensor, way, share):
            return theirs(self, *args, **kwargs)

        def own(tensor: Tensor, dim: int) -> Tensor:
            return own_tokens(tensor, share, dim)

        args, kwargs = changed((args, kwargs), own, {way.place: way.given})
        return split_tokens(theirs(self, *args, **kwargs), share, way.made)

    return call


def _can_be_cut(tensor: Tensor, way: ByToken, share: TokenPartition) -> bool:
    if torch.compiler.is_compiling() or tensor.dim() <= way.given or tensor.shape[way.given] % share.pieces:
        return False
    if isinstance(tensor, SplitTokens):
        return not tensor._is_whole and tensor._axis == way.given
    return not tensor.requires_grad  # a stream that was gathered is not cut again


def drawing(theirs: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """Dropout falls on other elements on every rank, whose tokens are others."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stream = RankStream(rank)
        if self.training:
            stream.enter(next(iter(by_place((args, kwargs)).values())).device)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            stream.leave()

    return forward


@contextmanager
def _called(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[ForwardCall | None, Any]]]:
    """First calls of modules, and their results; no call where the first one was not a plain one."""
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
    """A way to compute the same of this rank's tokens; None where there is none."""
    if any(isinstance(each, _BatchNorm) for each in module.modules()):
        return None  # in training it looks at all tokens
    ((place, tensor),) = by_place((call.args, call.kwargs)).items()
    is_fake, of_all = dist.get_backend(share.group) == "fake", None
    if is_fake:
        _, of_all = made_alone(partial(module, *call.args, **call.kwargs), [tensor])
    for dim in usual(tensor.dim()):
        if tensor.shape[dim] % share.pieces or tensor.shape[dim] < share.pieces:
            continue

        def own(whole: Tensor, dim: int) -> Tensor:
            return share.part(whole, dim)

        args, kwargs = changed(copied((call.args, call.kwargs)), own, {place: dim})
        try:
            run = partial(module, *args, **kwargs)
            got, alone = made_alone(run, by_place((args, kwargs)).values()) if is_fake else (run(), None)
        except MISFITS:
            continue
        if alone != of_all:
            continue
        made = cut_along(got, result, share, share.rank) if isinstance(got, Tensor) else None
        if isinstance(made, int) and made in dims:
            return ByToken(place, dim, made, uses_random_numbers(module, call))
    return None
