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

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
    Evaluation,
    Whole,
    changed,
    copied,
    cut_along,
    evaluate,
    find_stream,
    run_whole,
    same,
    try_part,
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
from atorch.runtime.tensor_parallel.derive.split_validation import MISFITS, EvaluateModel
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
    evaluation = evaluate(model, blocks, run)
    with evaluating(model):
        by_kind = _by_kind(blocks, evaluation, share, exchange)
    streams = linked(evaluation, {path: by_kind[calls.kind] for path, calls in evaluation.blocks.items()})
    dims = {dim for stream in streams.values() for dim in stream.outputs.values()}
    by_token = find_by_token(model, blocks, run, dims, share) if outside else {}
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
                f"{path} calls no scaled_dot_product_attention, the only operation in which its tokens may meet; make "
                "the model with attn_implementation='sdpa', or put module_replace into the strategy"
            )
        uneven = [length for length in sorted(lengths) if length % share.pieces]
        if uneven:
            raise StrategyError(
                f"the attention of {path} has {uneven[0]} tokens, which cannot be cut into {share.pieces} equal "
                f"pieces; give sequences whose length is a multiple of {share.pieces}, or the axis another size"
            )
        for call, _ in whole.attention.calls:
            if (reason := exchange.unfit(call)) is not None:
                raise StrategyError(f"the attention of {path} cannot be split: {reason}")
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


def install(block: nn.Module, stream: BlockStream, share: TokenPartition, *, stays_split: bool = False) -> None:
    """Cut the arguments of `block` to its rank's tokens, and gather its outputs, as in `stream`.

    stays_split: gather only when a caller needs all tokens.
    """
    if stream.draws:
        override(block, "forward", drawing, share.rank)
    if stays_split:
        vars(block)[ENDS] = partial(_scatter, stream.arguments, share), partial(_gather, stream.outputs, share, True)
        override(block, "__call__", _streamed)  # blocks of one class still share one
        return
    if stream.arguments:
        block.register_forward_pre_hook(partial(_scatter, stream.arguments, share), with_kwargs=True)
    if stream.outputs:
        block.register_forward_hook(partial(_gather, stream.outputs, share, False))


def _streamed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the call with its hooks: the code of a compiled block gets plain tensors."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scatter, gather = vars(self)[ENDS]
        args, kwargs = scatter(self, args, kwargs)
        return gather(self, args, original(self, *args, **kwargs))

    return call


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


@dataclass(frozen=True)
class ByToken:
    """The token split of a module that works token by token."""

    place: str
    """The place of the argument that is cut by tokens."""
    input_dim: int
    """Its dim of tokens, counted from the first."""
    output_dim: int
    """The result's dim of tokens."""
    draws: bool
    """True if it draws random numbers in training."""


@torch.no_grad()
def find_by_token(
    model: nn.Module, blocks: Mapping[str, nn.Module], run: EvaluateModel, dims: Set[int], share: TokenPartition
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
        args, kwargs = changed((args, kwargs), partial(own_tokens, share=share), {way.place: way.input_dim})
        return split_tokens(original(self, *args, **kwargs), share, way.output_dim)

    return call


def _can_be_cut(tensor: Tensor, way: ByToken, share: TokenPartition) -> bool:
    if torch.compiler.is_compiling() or tensor.dim() <= way.input_dim or tensor.shape[way.input_dim] % share.pieces:
        return False
    if isinstance(tensor, SplitTensor) and isinstance(tensor._layout, Tokens):
        return is_by_tokens(tensor, way.input_dim)
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

    def note(path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        is_plain = isinstance(output, Tensor) and len(by_place((args, kwargs))) == 1
        if path not in calls:
            calls[path] = (ForwardCall(*copied((args, kwargs))), output.clone()) if is_plain else (None, None)

    with ExitStack() as hooks:
        for path, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(note, path), with_kwargs=True))
        yield calls


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
        args, kwargs = changed(copied((call.args, call.kwargs)), share.part, {place: dim})
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
