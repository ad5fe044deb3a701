"""A model whose repeated blocks work on a part of the tokens: dealt out before the first, together after the last.

    split_stream(model, lambda model: model(**batch), share, Ulysses(group))

Tokens meet in attention, and `exchange` lets them meet over ranks; everything else in a block must work token by token,
which is tried before anything is changed. What one block hands to the next stays split; tables of positions, which each
block is given whole, are cut by each. Outside of them modules that work token by token are given a rank's own
(`outside`), and what the last block gives is gathered for whoever asks for all of it (`split_tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from atorch.distributed.collectives import gather_objects
from atorch.errors import AtorchError, StrategyError
from atorch.model.method_override import override
from atorch.model.structure import repeated_blocks
from atorch.runtime.sequence_parallel.attention import AttentionCall, Exchange, exchange_attention
from atorch.runtime.sequence_parallel.block_calls import Evaluation, RunModel, by_place, changed, evaluate, evaluating
from atorch.runtime.sequence_parallel.sharded_tokens import own_tokens, split_tokens
from atorch.runtime.sequence_parallel.split_validation import BlockStream, Whole, find_stream, run_whole, same, try_part
from atorch.runtime.sequence_parallel.token_local_modules import compute_by_token, drawing, find_by_token
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.tensor_parallel.sharded_activation import SplitTensor, whole_of

ENDS = "_ends_of_stream"  # the attribute of a block that says what it cuts and gathers
Streams = Mapping[str, BlockStream]
"""By the path of the block: what it cuts of its arguments, and what it gathers of its outputs."""


def split_stream(
    model: nn.Module, run: RunModel, share: TokenPartition, exchange: Exchange, *, outside: bool = True
) -> Streams:
    """Split the tokens of `model` in place over the ranks of `share`; returns how its blocks are.

    Args:
        run: calls the model on a small batch, the same on all ranks: a few samples of whole sequences.
        exchange: what attention does where each rank has its share of the tokens.
        outside: also of modules outside of the blocks that work token by token; of results, until somebody asks for
            all of them. Otherwise what blocks give is gathered.

    Raises:
        StrategyError: a block cannot be split, with the module that stands against it. Nothing has been changed then.
    """
    if share.size == 1:
        return {}
    blocks = repeated_blocks(model)
    if not blocks:
        raise StrategyError(f"{type(model).__name__} has no repeated blocks, whose tokens could be split")
    seen = evaluate(model, blocks, run)
    with evaluating(model):
        by_kind = _by_kind(blocks, seen, share, exchange)
    streams = linked(seen, {path: by_kind[each.kind] for path, each in seen.blocks.items()})
    by_token = find_by_token(model, blocks, run, _dims(streams), share) if outside else {}
    for path, stream in streams.items():
        exchange_attention(blocks[path], exchange)
        install(blocks[path], stream, share, stays_split=outside)
    for path, way in by_token.items():
        compute_by_token(model.get_submodule(path), way, share)
    with evaluating(model):
        check_output(model, by_place(seen.output), by_place(run(model)), share.group)
    return streams


def _by_kind(
    blocks: Mapping[str, nn.Module], seen: Evaluation, share: TokenPartition, exchange: Exchange
) -> dict[Any, BlockStream]:
    """The way of each kind of block with split tokens, the same on all ranks."""
    paths = {each.kind: each.path for each in reversed(seen.blocks.values())}
    wholes = {kind: run_whole(blocks[paths[kind]], call) for kind, call in seen.calls.items()}
    lengths = {length for whole in wholes.values() for length in whole.attention.lengths}
    found: dict[Any, BlockStream] = {}
    for kind, whole in wholes.items():
        path, block = paths[kind], blocks[paths[kind]]
        if not lengths:
            raise StrategyError(
                f"{path} calls no scaled_dot_product_attention, by which alone its tokens may meet; make the model "
                "with attn_implementation='sdpa', or put module_replace into the strategy"
            )
        _need_equal_pieces(path, lengths, share)
        for call, _ in whole.attention.calls:
            _need_fit(path, call, exchange)
        stream = find_stream(block, whole, lengths, share)
        if not isinstance(stream, str):
            stream = _agreed(block, whole, stream, share)
        if isinstance(stream, str):
            raise StrategyError(
                f"the tokens of {path} ({type(block).__name__}) cannot be split: {stream}. Everything but "
                "scaled_dot_product_attention must work token by token; leave the method out for this model, or "
                "replace the module"
            )
        found[kind] = stream
    return found


def _need_equal_pieces(path: str, lengths: set[int], share: TokenPartition) -> None:
    for length in sorted(lengths):
        if length % share.pieces:
            raise StrategyError(
                f"the attention of {path} has {length} tokens, which cannot be cut into {share.pieces} equal pieces; "
                f"give sequences whose length is a multiple of {share.pieces}, or the axis another size"
            )


def _need_fit(path: str, call: AttentionCall, exchange: Exchange) -> None:
    reason = exchange.unfit(call)
    if reason is not None:
        raise StrategyError(f"the attention of {path} cannot be split: {reason}")


def _agreed(block: nn.Module, whole: Whole, stream: BlockStream, share: TokenPartition) -> BlockStream | str:
    """The stream, or why some rank does not compute the same on its tokens."""
    own = try_part(block, whole, stream.arguments, share, share.rank)
    reasons = gather_objects(own if isinstance(own, str) else None, share.group)
    return next((reason for reason in reasons if reason is not None), stream)


def linked(seen: Evaluation, streams: Streams) -> Streams:
    """The streams without what one block gathers only for the next one to cut again."""
    takers: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path, block in seen.blocks.items():
        for place, origin in block.origins.items():
            takers.setdefault(origin, []).append((path, place))
    arguments = {path: dict(stream.arguments) for path, stream in streams.items()}
    outputs = {path: dict(stream.outputs) for path, stream in streams.items()}
    for (giver, place), places in takers.items():
        dim = streams[giver].outputs.get(place)
        is_once = all(seen.blocks[path].num_calls == 1 for path in (giver, *(path for path, _ in places)))
        if dim is not None and is_once and all(streams[path].arguments.get(taken) == dim for path, taken in places):
            del outputs[giver][place]
            for path, taken in places:
                del arguments[path][taken]
    return {path: replace(streams[path], arguments=arguments[path], outputs=outputs[path]) for path in streams}


def _dims(streams: Streams) -> set[int]:
    """The dims of tokens in what blocks give."""
    return {dim for stream in streams.values() for dim in stream.outputs.values()}


def install(block: nn.Module, stream: BlockStream, share: TokenPartition, *, stays_split: bool = False) -> None:
    """Let `block` be given its rank's tokens, and what it gives be gathered, as `stream` says.

    stays_split: only once somebody asks for all of it.
    """
    if stream.draws:
        override(block, "forward", drawing, share.rank)
    if stays_split:
        vars(block)[ENDS] = _Scatter(stream.arguments, share), _Gather(stream.outputs, share, True)
        override(block, "__call__", _streamed)  # blocks stay of one class
        return
    if stream.arguments:
        block.register_forward_pre_hook(_Scatter(stream.arguments, share), with_kwargs=True)
    if stream.outputs:
        block.register_forward_hook(_Gather(stream.outputs, share, False))


def _streamed(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Around the whole call, hooks among it: where a block is compiled, its code is given plain tensors."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scatter, gather = vars(self)[ENDS]
        args, kwargs = scatter(self, args, kwargs)
        return gather(self, args, theirs(self, *args, **kwargs))

    return call


class _Scatter:
    """Before a block: this rank's tokens of what it is given whole."""

    def __init__(self, dims: Mapping[str, int], share: TokenPartition) -> None:
        self._dims, self._share = dims, share

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return changed((args, kwargs), self._own, self._dims)

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        return own_tokens(tensor, self._share, dim)


class _Gather:
    """After a block: all tokens of what others than the next block take."""

    def __init__(self, dims: Mapping[str, int], share: TokenPartition, stays_split: bool) -> None:
        self._dims, self._share, self._stays_split = dims, share, stays_split

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return changed(output, self._all, self._dims)

    def _all(self, tensor: Tensor, dim: int) -> Tensor:
        if self._stays_split and tensor.is_floating_point() and not torch.compiler.is_compiling():
            return split_tokens(tensor, self._share, dim)  # compilers take no such tensors
        return self._share.gather(tensor, dim)


def check_output(
    model: nn.Module, expected: Mapping[str, Tensor], got: Mapping[str, Tensor], group: dist.ProcessGroup
) -> None:
    """Raise on all ranks where the model, now split, has another output than it had on any of them."""
    own = [
        place
        for place, tensor in expected.items()
        if tensor.is_floating_point() and (place not in got or not same(_plain(got[place]), tensor))
    ]
    other = sorted({place for places in gather_objects(own, group) for place in places})
    if other or expected.keys() != got.keys():
        names = ", ".join(other) or "another number of them"
        raise AtorchError(
            f"{type(model).__name__} has other outputs ({names}) after its tokens were split, though each of its "
            "blocks had the same: something between or beside the blocks sees parts of a sequence. Leave the method "
            "out for this model, or let the model return its logits alone"
        )


def _plain(tensor: Tensor) -> Tensor:
    return whole_of(tensor) if isinstance(tensor, SplitTensor) else tensor
