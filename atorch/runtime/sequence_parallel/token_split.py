"""A model whose repeated blocks work on a part of the tokens: scattered before the first, gathered after the last.

    split_stream(model, lambda model: model(**batch), share, Ulysses(group))

Attention mixes tokens, and `exchange` lets it do so over ranks. Everything else in a block must work token by token; a
trial checks that before anything is changed. The stream stays split between blocks. Each block cuts tables of
positions, which it gets whole. The last block's output is gathered when a caller needs all of it (`split_tokens`).

Outside of the blocks, modules with one tensor argument (embeddings, final norms, heads) run twice: on all tokens of a
small batch, and on a rank's. If every rank gets its part of the whole result, the module takes the rank's tokens from
then on. All other modules stay unchanged. Fake tensors have no values, so shapes decide (`token_dependence`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from atorch.distributed.collectives import gather_objects
from atorch.distributed.rng import RankStream
from atorch.errors import AtorchError, StrategyError
from atorch.model.state import evaluating
from atorch.model.structure import made_alone, outside_of, repeated_blocks
from atorch.model.wrapper import override
from atorch.runtime.sequence_parallel.attention import Exchange, exchange_attention
from atorch.runtime.sequence_parallel.split_validation import (
    BlockStream,
    TokenReplay,
    find_stream,
    usual,
)
from atorch.runtime.sequence_parallel.token_partition import (
    TokenPartition,
    Tokens,
    is_by_tokens,
    own_tokens,
    split_tokens,
)
from atorch.runtime.tensor_parallel.derive.block_sandbox import (
    EvaluateModel,
    Evaluation,
    ForwardCall,
    by_place,
    changed,
)
from atorch.runtime.tensor_parallel.derive.split_validation import first_reason, same
from atorch.runtime.tensor_parallel.sharded_activation import SplitTensor, whole_of

ENDS = "_ends_of_stream"  # attribute of a block that holds its scatter and gather
Streams = Mapping[str, BlockStream]
"""By the path of the block: the arguments that it cuts, and the outputs that it gathers."""


def split_stream(
    model: nn.Module, run: EvaluateModel, share: TokenPartition, exchange: Exchange, *, outside: bool = True
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
    evaluation = Evaluation(model, blocks, run)
    with evaluating(model):
        by_kind = _by_kind(blocks, evaluation, share, exchange)
    streams = linked(evaluation, {path: by_kind[calls.kind] for path, calls in evaluation.blocks.items()})
    dims = {dim for stream in streams.values() for dim in stream.outputs.values()}
    by_token = find_by_token(model, blocks, run, dims, share) if outside else {}
    for path, stream in streams.items():
        exchange_attention(blocks[path], exchange)
        install(blocks[path], stream, share, stays_split=outside)
    for path, stream in by_token.items():
        install(model.get_submodule(path), stream, share, stays_split=True, is_optional=True)
    with evaluating(model):
        check_output(model, by_place(evaluation.output), by_place(run(model)), share.group)
    return streams


def _by_kind(
    blocks: Mapping[str, nn.Module], evaluation: Evaluation, share: TokenPartition, exchange: Exchange
) -> dict[Any, BlockStream]:
    """The token split of each kind of block, the same on all ranks."""
    paths = evaluation.examples
    replays = {kind: TokenReplay(blocks[paths[kind]], call) for kind, call in evaluation.calls.items()}
    lengths = {length for replay in replays.values() for length in replay.lengths}
    streams: dict[Any, BlockStream] = {}
    for kind, replay in replays.items():
        path, block = paths[kind], blocks[paths[kind]]
        if not lengths:
            raise StrategyError(
                f"{path} calls no scaled_dot_product_attention, the only operation in which its tokens may meet; make "
                "the model with attn_implementation='sdpa', or put module_replace into the strategy"
            )
        uneven = [length for length in sorted(lengths) if length % share.pieces]
        if uneven:
            raise StrategyError(
                f"the attention of {path} has {uneven[0]} tokens, which cannot be cut into {share.pieces} equal "
                f"pieces; give sequences whose length is a multiple of {share.pieces}, or the axis another size"
            )
        for call, _ in replay.attention:
            if (reason := exchange.unfit(call)) is not None:
                raise StrategyError(f"the attention of {path} cannot be split: {reason}")
        stream = find_stream(replay, lengths, share)
        if not isinstance(stream, str):
            own = replay.stream(stream.arguments, share, share.rank)
            stream = first_reason(own if isinstance(own, str) else None, share.group) or stream
        if isinstance(stream, str):
            raise StrategyError(
                f"the tokens of {path} ({type(block).__name__}) cannot be split: {stream}. Everything but "
                "scaled_dot_product_attention must work token by token; leave the method out for this model, or "
                "replace the module"
            )
        streams[kind] = stream
    return streams


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


def install(
    block: nn.Module,
    stream: BlockStream,
    share: TokenPartition,
    *,
    stays_split: bool = False,
    is_optional: bool = False,
) -> None:
    """Cut the arguments of `block` to its rank's tokens, and gather its outputs, as in `stream`.

    stays_split: gather only when a caller needs all tokens. is_optional: then leave calls alone that cannot be cut.
    """
    if stream.draws:
        override(block, "forward", drawing, share.rank)
    if stays_split:
        vars(block)[ENDS] = stream, share
        override(block, "__call__", _streamed, is_optional)  # blocks of one class still share one
        return
    if stream.arguments:
        block.register_forward_pre_hook(partial(_scatter, stream.arguments, share), with_kwargs=True)
    if stream.outputs:
        block.register_forward_hook(partial(_gather, stream.outputs, share, False))


def _streamed(original: Callable[..., Any], is_optional: bool) -> Callable[..., Any]:
    """Wraps the call with its hooks: the code of a compiled block gets plain tensors."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        stream, share = vars(self)[ENDS]
        if is_optional and not _can_be_cut((args, kwargs), stream, share):
            return original(self, *args, **kwargs)
        args, kwargs = _scatter(stream.arguments, share, self, args, kwargs)
        return _gather(stream.outputs, share, True, self, args, original(self, *args, **kwargs))

    return call


def _can_be_cut(arguments: Any, stream: BlockStream, share: TokenPartition) -> bool:
    ((place, dim),) = stream.arguments.items()
    if torch.compiler.is_compiling() or (tensors := by_place(arguments)).keys() != {place}:
        return False
    tensor = tensors[place]
    if tensor.dim() <= dim or tensor.shape[dim] % share.pieces:
        return False
    if isinstance(tensor, SplitTensor) and isinstance(tensor._layout, Tokens):
        return is_by_tokens(tensor, dim)
    return not tensor.requires_grad  # a gathered stream is not cut again


def _scatter(dims: Mapping[str, int], share: TokenPartition, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """Before a block: cut whole arguments to this rank's tokens."""
    return changed((args, kwargs), partial(own_tokens, share=share), dims)


def _gather(
    dims: Mapping[str, int], share: TokenPartition, stays_split: bool, _: nn.Module, args: Any, output: Any
) -> Any:
    """After a block: gather outputs that others than the next block take."""

    def whole(tensor: Tensor, dim: int) -> Tensor:
        if stays_split and tensor.is_floating_point() and not torch.compiler.is_compiling():
            return split_tokens(tensor, share, dim)  # compilers take no such tensors
        return share.gather(tensor, dim)

    return changed(output, whole, dims)


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
            "blocks had the same. Something between or around the blocks sees parts of a sequence. Leave the method "
            "out for this model, or let the model return its logits alone"
        )


def _plain(tensor: Tensor) -> Tensor:
    return whole_of(tensor) if isinstance(tensor, SplitTensor) else tensor


@torch.no_grad()
def find_by_token(
    model: nn.Module, blocks: Mapping[str, nn.Module], run: EvaluateModel, dims: Set[int], share: TokenPartition
) -> Streams:
    """Modules outside of `blocks`, by path, that compute the same on a rank's tokens, on all ranks.

    Args:
        dims: the dims of tokens in the blocks' outputs; results must have one of these.
    """
    by_path = {}
    evaluation = Evaluation(model, dict(outside_of(model, blocks.keys())), run)
    with evaluating(model):
        for path, calls in evaluation.blocks.items():
            way = _way(model.get_submodule(path), evaluation.calls[calls.kind], dims, share)
            ways = gather_objects(way, share.group)
            if way is not None and all(other == way for other in ways):
                by_path[path] = way
    return by_path


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


def _way(module: nn.Module, call: ForwardCall, dims: Set[int], share: TokenPartition) -> BlockStream | None:
    """The token split with which a module of one tensor computes the same on this rank's tokens, or None."""
    tensors = by_place(tuple(call))
    if len(tensors) != 1 or any(isinstance(submodule, _BatchNorm) for submodule in module.modules()):
        return None  # in training, statistics of a batch norm are those of all tokens
    ((place, tensor),), replay = tensors.items(), TokenReplay(module, call)

    def made(arguments: Any) -> Any:  # fake tensors have no values
        is_fake = dist.get_backend(share.group) == "fake"
        run = partial(module, *arguments[0], **arguments[1])
        return made_alone(run, by_place(arguments).values())[1] if is_fake else None

    if replay.attention or replay.outputs.keys() != {""}:  # one tensor, computed without attention
        return None
    for dim in usual(tensor.dim()):
        if tensor.shape[dim] % share.pieces or tensor.shape[dim] < share.pieces:
            continue
        cut = {place: dim}
        stream = replay.stream(cut, share, share.rank)
        if isinstance(stream, str) or stream.outputs.get("") not in dims:
            continue
        if made(tuple(call)) == made(changed(tuple(call), share.part, cut)):
            return stream
    return None
