"""Trials, on one rank, of a model's blocks with split tokens.

The whole block runs once, and its attention calls are recorded. Then it runs on a rank's tokens, and attention returns
the rank's part of the recorded results. If its queries, keys, masks and results match the whole block's, everything
else in it works token by token. Trials also find the dim of tokens of each argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from atorch.distributed.rng import preserved_rng, random_state
from atorch.model.state import preserved_modes
from atorch.runtime.sequence_parallel.attention import Attend, AttentionCall, Chain
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, by_place, changed, copied
from atorch.runtime.tensor_parallel.derive.split_validation import MISFITS, dim_of_part, has_values, same

T = TypeVar("T")
MOST = 64  # maximum ways to cut the arguments that are tried


@dataclass(frozen=True)
class BlockStream:
    """The token split of a block: dims of its cut arguments, and of its partial outputs."""

    arguments: Mapping[str, int]
    """The dim of tokens, by place."""
    outputs: Mapping[str, int]
    draws: bool = False
    """True if it draws random numbers in training."""


class TokenReplay:
    """One pass of a block in eval mode on all tokens, against which the tokens of single ranks are tried."""

    @torch.no_grad()
    def __init__(self, block: nn.Module, call: ForwardCall) -> None:
        self.call, self._block = call, block
        self.attention: list[tuple[AttentionCall, Tensor]] = []
        """Calls of attention and their results."""
        args, kwargs = copied(tuple(call))  # the block may fill caches among them
        with Chain(self._record), _noting(block) as inner:
            self.outputs = by_place(block(*args, **kwargs))
        self._inner = inner  # outputs of its modules, in order
        storages = {_storage(call.attn_mask) for call, _ in self.attention if call.attn_mask is not None}
        arguments = by_place((args, kwargs))
        self.masks = {place for place, tensor in arguments.items() if _storage(tensor) in storages}
        """Places of the arguments that attention takes as masks."""

    def _record(self, call: AttentionCall, attend: Attend) -> Tensor:
        result = attend(call)
        self.attention.append((call, result.clone()))
        return result

    @property
    def lengths(self) -> set[int]:
        """Numbers of tokens of queries and keys."""
        return {tensor.shape[-2] for call, _ in self.attention for tensor in (call.query, call.key)}

    @torch.no_grad()
    def stream(self, cut: Mapping[str, int], share: TokenPartition, rank: int) -> BlockStream | str:
        """The block's token split on the tokens of `rank`, or the reason why it computes something else.

        cut: the dims of tokens of the arguments that are cut, by place.
        """
        if not cut:
            return "it has no argument that goes along the tokens"
        recorded, reasons = iter(self.attention), list[str]()

        def attend(call: AttentionCall, _: Attend) -> Tensor:
            expected, result = next(recorded, (None, None))
            if expected is None or result is None:
                raise ValueError("attention is called more often than with all tokens")
            reasons.extend(_differences(call, expected, share, rank))
            return share.part(result, -2, rank)

        args, kwargs = changed(copied(tuple(self.call)), partial(share.part, rank=rank), cut)
        inner: list[tuple[str, list[Tensor]]] = []
        try:
            with Chain(attend), _noting(self._block) as inner:
                outputs = by_place(self._block(*args, **kwargs))
        except MISFITS as error:
            return f"{self._where(inner, share, rank)} raises {type(error).__name__}: {error}"
        if reasons:
            return f"{reasons[0]} ({self._where(inner, share, rank)} differs first)"
        dims: dict[str, int] = {}
        for place, expected in self.outputs.items():
            if place not in outputs or not _is_own(outputs[place], expected, share, rank):
                return f"{self._where(inner, share, rank)} computes something else on a part of the tokens"
            dim = dim_of_part(outputs[place].shape, expected.shape, share.size)
            if dim is not None:
                dims[place] = dim
        return BlockStream(dict(cut), dims, uses_random_numbers(self._block, self.call))

    def _where(self, inner: list[tuple[str, list[Tensor]]], share: TokenPartition, rank: int) -> str:
        """The path of the first inner module whose outputs are no part of those for all tokens."""

        def is_part(got: Tensor, expected: Tensor) -> bool:  # the first dim may be batch and tokens in one
            return dim_of_part(got.shape, expected.shape, share.size) == 0 or _is_own(got, expected, share, rank)

        for index, (path, expected) in enumerate(self._inner):
            got = inner[index][1] if index < len(inner) and inner[index][0] == path else None
            if got is None or len(got) != len(expected) or not all(map(is_part, got, expected)):
                return path
        return "its own forward"


@torch.no_grad()
def uses_random_numbers(block: nn.Module, call: ForwardCall) -> bool:
    """True if the block draws random numbers in training."""
    args, kwargs = copied(tuple(call))
    device = next(iter(by_place((args, kwargs)).values())).device
    with preserved_rng(), preserved_modes(block):
        before = random_state(device)
        block.train()(*args, **kwargs)
        return not torch.equal(before, random_state(device))


def find_stream(replay: TokenReplay, lengths: set[int], share: TokenPartition) -> BlockStream | str:
    """The block's token split, or the reason why it computes something else on a part of the tokens.

    lengths: the numbers of tokens of all blocks' attention.
    """
    options: dict[str, list[int | None]] = {}
    for place, tensor in by_place(tuple(replay.call)).items():
        dims: list[int | None] = [dim for dim in usual(tensor.dim()) if tensor.shape[dim] in lengths]
        if dims:
            options[place] = [None, *dims] if place in replay.masks else [*dims, None]

    def attempt(*dims: int | None) -> BlockStream | str:
        cut = {place: dim for place, dim in zip(options, dims, strict=True) if dim is not None}
        # The last rank's tokens: a block that counts positions itself would compute the first rank's correctly.
        return replay.stream(cut, share, share.size - 1)

    return first_accepted(list(options.values()), attempt) or "it has no argument that goes along the tokens"


def first_accepted(options: Sequence[Sequence[Any]], attempt: Callable[..., T | str]) -> T | str | None:
    """The first result that is no reason, of attempts with one of each of `options`, the earlier ones first.

    Else the first reason; None without attempts.
    """
    indices = islice(product(*(range(len(option)) for option in options)), 64 * MOST)
    first_reason: T | str | None = None
    for choice in sorted(indices, key=sum)[:MOST]:
        result = attempt(*(option[index] for option, index in zip(options, choice, strict=True)))
        if not isinstance(result, str):
            return result
        first_reason = first_reason or result
    return first_reason


def usual(num_dims: int) -> list[int]:
    """Dims in order of trial as the dim of tokens: the last but one, then the others from the first to the last."""
    return sorted(range(num_dims), key=lambda dim: (dim != num_dims - 2, dim == num_dims - 1, dim))


def _differences(call: AttentionCall, whole: AttentionCall, share: TokenPartition, rank: int) -> Iterator[str]:
    """The reasons why a call of attention is not that of the rank's tokens."""
    for name in ("query", "key", "value"):
        if not same(getattr(call, name), share.part(getattr(whole, name), -2, rank)):
            yield f"the {name} of its attention is not that of the part's tokens"
    if call.is_causal != whole.is_causal:
        yield "its attention is causal only with all tokens"
    got, expected = call.attn_mask, whole.attn_mask
    is_same = got is expected if got is None or expected is None else got.shape == expected.shape
    if is_same and got is not None and expected is not None and has_values(expected):
        is_same = torch.equal(got, expected)
    if not is_same:
        yield (
            "it makes the mask, or the bias of relative positions, of its attention itself, from the tokens that it is "
            "given"
        )


def _is_own(got: Tensor, whole: Tensor, share: TokenPartition, rank: int) -> bool:
    """True if `got` is the rank's part of the whole along some dim, or all of it."""
    dim = dim_of_part(got.shape, whole.shape, share.size)
    if dim is None:
        return same(got, whole)
    return whole.shape[dim] % share.pieces == 0 and same(got, share.part(whole, dim, rank))


@contextmanager
def _noting(block: nn.Module) -> Iterator[list[tuple[str, list[Tensor]]]]:
    """Record the outputs of the block's inner modules, in order."""
    noted: list[tuple[str, list[Tensor]]] = []

    def note(path: str, _: nn.Module, args: Any, output: Any) -> None:
        noted.append((path, [tensor.clone() for tensor in by_place(output).values()]))

    with ExitStack() as hooks:
        for path, module in block.named_modules():
            if path:
                hooks.enter_context(module.register_forward_hook(partial(note, path)))
        yield noted


def _storage(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())
