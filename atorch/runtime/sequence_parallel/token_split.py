"""A model whose repeated blocks work on a part of the tokens: scattered before the first, gathered after the last.

    split_stream(model, lambda model: model(**batch), share, Ulysses(group))

Attention mixes tokens, and `exchange` lets it do so over ranks. Everything else in a block must work token by token; a
trial checks that before anything is changed. The stream stays split between blocks. Each block cuts tables of
positions, which it gets whole. Outside of the blocks, token-local modules get a rank's own tokens
(`token_local_modules`). The last block's output is gathered when a caller needs all of it (`split_tokens`).
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
from atorch.model.state import evaluating
from atorch.model.structure import repeated_blocks
from atorch.model.wrapper import override
from atorch.runtime.sequence_parallel.attention import AttentionCall, Exchange, exchange_attention
from atorch.runtime.sequence_parallel.split_validation import (
    BlockStream,
    Evaluation,
    RunModel,
    Whole,
    changed,
    evaluate,
    find_stream,
    run_whole,
    same,
    try_part,
)
from atorch.runtime.sequence_parallel.token_local_modules import compute_by_token, drawing, find_by_token
from atorch.runtime.sequence_parallel.token_partition import TokenPartition, own_tokens, split_tokens
from atorch.runtime.tensor_parallel.derive.block_sandbox import by_place
from atorch.runtime.tensor_parallel.sharded_activation import SplitTensor, whole_of

ENDS = "_ends_of_stream"  # attribute of a block that holds its scatter and gather
Streams = Mapping[str, BlockStream]
"""By the path of the block: the arguments that it cuts, and the outputs that it gathers."""


def split_stream(
    model: nn.Module, run: RunModel, share: TokenPartition, exchange: Exchange, *, outside: bool = True
) -> Streams:
    """Split the tokens of `model` in place over the ranks of `share`; returns each block's token split.

    Args:
        run: calls the model on a small batch, the same on all ranks: a few samples of whole sequences.
        exchange: the step around attention, for ranks with their own tokens.
        outside: also split token-local modules outside of the blocks, and keep results split until a caller needs
            all tokens. Otherwise the blocks' outputs are gathered.

    Raises:
        StrategyError: a block cannot be split; names the module that prevents it. The model is then unchanged.
    """
    if share.size == 1:
        return {}
    blocks = repeated_blocks(model)
    if not blocks:
        raise StrategyError(f"{type(model).__name__} has no repeated blocks, whose tokens could be split")
    evaluation = evaluate(model, blocks, run)
    with evaluating(model):
        by_kind = _by_kind(blocks, evaluation, share, exchange)
    streams = linked(evaluation, {path: by_kind[calls.kind] for path, calls in evaluation.blocks.items()})
    by_token = find_by_token(model, blocks, run, _dims(streams), share) if outside else {}
    for path, stream in streams.items():
        exchange_attention(blocks[path], exchange)
        install(blocks[path], stream, share, stays_split=outside)
    for path, way in by_token.items():
        compute_by_token(model.get_submodule(path), way, share)
    with evaluating(model):
        check_output(model, by_place(evaluation.output), by_place(run(model)), share.group)
    return streams


def _by_kind(
    blocks: Mapping[str, nn.Module], evaluation: Evaluation, share: TokenPartition, exchange: Exchange
) -> dict[Any, BlockStream]:
    """The token split of each kind of block, the same on all ranks."""
    paths = {calls.kind: calls.path for calls in reversed(evaluation.blocks.values())}
    wholes = {kind: run_whole(blocks[paths[kind]], call) for kind, call in evaluation.calls.items()}
    lengths = {length for whole in wholes.values() for length in whole.attention.lengths}
    streams: dict[Any, BlockStream] = {}
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
        streams[kind] = stream
    return streams


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
    """The stream, or the reason why some rank computes something else on its tokens."""
    result = try_part(block, whole, stream.arguments, share, share.rank)
    reasons = gather_objects(result if isinstance(result, str) else None, share.group)
    return next((reason for reason in reasons if reason is not None), stream)


def linked(seen: Evaluation, streams: Streams) -> Streams:
    """The streams without gathers that the next block would only cut again."""
    takers: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path, block in seen.blocks.items():
        for place, origin in block.origins.items():
            takers.setdefault(origin, []).append((path, place))
    arguments = {path: dict(stream.arguments) for path, stream in streams.items()}
    outputs = {path: dict(stream.outputs) for path, stream in streams.items()}
    for (giver, place), places in takers.items():
        dim = streams[giver].outputs.get(place)
        is_once = all(seen.blocks[path].num_calls == 1 for path in (giver, *(path for path, _ in places)))
        if dim is not None and is_once and all(streams[path].arguments.get(arg) == dim for path, arg in places):
            del outputs[giver][place]
            for path, arg in places:
                del arguments[path][arg]
    return {path: replace(streams[path], arguments=arguments[path], outputs=outputs[path]) for path in streams}


def _dims(streams: Streams) -> set[int]:
    """The dims of tokens in the blocks' outputs."""
    return {dim for stream in streams.values() for dim in stream.outputs.values()}


def install(block: nn.Module, stream: BlockStream, share: TokenPartition, *, stays_split: bool = False) -> None:
    """Cut the arguments of `block` to its rank's tokens, and gather its outputs, as in `stream`.

    stays_split: gather only when a caller needs all tokens.
    """
    if stream.draws:
        override(block, "forward", drawing, share.rank)
    if stays_split:
        vars(block)[ENDS] = _Scatter(stream.arguments, share), _Gather(stream.outputs, share, True)
        override(block, "__call__", _streamed)  # blocks of one class still share one
        return
    if stream.arguments:
        block.register_forward_pre_hook(_Scatter(stream.arguments, share), with_kwargs=True)
    if stream.outputs:
        block.register_forward_hook(_Gather(stream.outputs, share, False))


def _streamed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the call with its hooks: the code of a compiled block gets plain tensors."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scatter, gather = vars(self)[ENDS]
        args, kwargs = scatter(self, args, kwargs)
        return gather(self, args, original(self, *args, **kwargs))

    return call


class _Scatter:
    """Before a block: cuts whole arguments to this rank's tokens."""

    def __init__(self, dims: Mapping[str, int], share: TokenPartition) -> None:
        self._dims, self._share = dims, share

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return changed((args, kwargs), self._own, self._dims)

    def _own(self, tensor: Tensor, dim: int) -> Tensor:
        return own_tokens(tensor, self._share, dim)


class _Gather:
    """After a block: gathers outputs that others than the next block take."""

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
    """Raise on all ranks if the split model's output differs from the whole model's on any of them."""
    differing = [
        place
        for place, tensor in expected.items()
        if tensor.is_floating_point() and (place not in got or not same(_plain(got[place]), tensor))
    ]
    all_differing = sorted({place for places in gather_objects(differing, group) for place in places})
    if all_differing or expected.keys() != got.keys():
        names = ", ".join(all_differing) or "another number of them"
        raise AtorchError(
            f"{type(model).__name__} has other outputs ({names}) after its tokens were split, though each of its "
            "blocks had the same: something between or beside the blocks sees parts of a sequence. Leave the method "
            "out for this model, or let the model return its logits alone"
        )


def _plain(tensor: Tensor) -> Tensor:
    return whole_of(tensor) if isinstance(tensor, SplitTensor) else tensor
