"""Requirements of methods on a model: its parameters, its code, and sizes that divide evenly over processes.

Methods that watch a model before they change anything run it on a few samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atorch.auto.strategy import Phase
from atorch.cost import Cost, Segment
from atorch.errors import ArgumentError, StrategyError
from atorch.logs import logger

if TYPE_CHECKING:
    from torch import Tensor, nn

    from atorch.auto.context import Context
    from atorch.runtime.sequence_parallel import Exchange, TokenPartition


def changes_modules(ctx: Context, apart_from: str = "") -> bool:
    """True if a method of the strategy replaces the user's modules, so that names may refer to the new ones."""
    return any(method.phase == Phase.MODULE and method.name != apart_from for method in ctx.strategy)


def has_compiled_loss(ctx: Context) -> bool:
    """True if the loss function is compiled. A compiled loss cannot take split logits."""
    return hasattr(ctx.loss_func, "_torchdynamo_orig_callable")


def need_dense_gradients(ctx: Context, name: str, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Raise if the model has a sparse gradient, which method `name` cannot shard."""
    from torch import nn

    ignored_ids = set(map(id, ignored))
    for part in ctx.parts:
        for path, module in part.named_modules():
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or id(module.weight) in ignored_ids:
                continue
            if module.sparse and module.weight.requires_grad:
                raise StrategyError(
                    f"{name} cannot divide the gradient of {path or type(module).__name__}, an "
                    f"{type(module).__name__} with sparse=True; make it with sparse=False, or use ddp"
                )


def need_floating_parameters(ctx: Context, name: str) -> None:
    """Raise if a parameter is not of a floating-point type, which method `name` requires."""
    for path, parameter in _parameters(ctx):
        if not parameter.is_floating_point():
            raise StrategyError(
                f"{name} keeps parameters of floating-point types alone, and {path} is of {parameter.dtype}; "
                "make it a buffer, which nothing trains (register_buffer)"
            )


def need_own_storage(ctx: Context, name: str, func: Any, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Raise if `func`, which method `name` applies to parameters, fails on a tensor subclass that wraps tensors."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for path, parameter in _parameters(ctx, ignored):
        if is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor):
            try:
                func(parameter.detach())
            except NotImplementedError as error:
                kind = type(parameter).__name__
                raise StrategyError(
                    f"{name} cannot take {path} apart, whose values are in other tensors, as those of quantized "
                    f"weights are (it is of {kind}); quantize after training, or leave {name} out on one process"
                ) from error


def need_own_code(ctx: Context, name: str) -> None:
    """Raise if a module is a ScriptModule, whose parameters method `name` cannot replace."""
    import torch

    for part in ctx.parts:
        for path, module in part.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise StrategyError(
                    f"{name} cannot put parameters of its own into {path or 'the model'}, a ScriptModule; give the "
                    "module that was scripted, or use ddp"
                )


def need_real_parameters(ctx: Context, name: str, why: str, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Raise if a parameter is complex, which method `name` cannot take; `why` is the reason in the message."""
    for path, parameter in _parameters(ctx, ignored):
        if parameter.is_complex():
            raise StrategyError(
                f"{name} cannot compute with {path}, a parameter of {parameter.dtype}, {why}; leave {name} out"
            )


def _parameters(ctx: Context, ignored: Iterable[nn.Parameter] = ()) -> Iterator[tuple[str, nn.Parameter]]:
    skipped = set(map(id, ignored))
    for part in ctx.parts:
        yield from ((path, parameter) for path, parameter in part.named_parameters() if id(parameter) not in skipped)


def indivisible(segments: Sequence[Segment], size: int, what: str, *, experts: bool = False) -> str | None:
    """The reason why attention heads (or experts) do not divide over the `size` processes of `what`, or None.

    Key/value heads may be fewer than processes: several processes then hold the same head.
    """
    for segment in segments:
        counts = {"attention heads": segment.num_heads, "experts": segment.num_experts if experts else 0}
        for shared, count in counts.items():
            if count % size:
                return f"{what} {size} does not divide the {count} {shared} of {segment.name}"
        groups = segment.num_kv_heads
        if groups % size and size % groups:
            return f"{what} {size} neither divides nor is a multiple of the {groups} key heads of {segment.name}"
    return None


def uncuttable(segments: Sequence[Segment], size: int, what: str) -> str | None:
    """The reason why `what` cannot cut sequences into `size` equal pieces, or None."""
    for length in {segment.sequence_length for segment in segments}:
        if length % size:
            return f"{what} cuts sequences into {size} pieces, which does not divide their {length} tokens"
    return None


def unmet_tokens(cost: Cost) -> str | None:
    """The reason why tokens cannot be split inside blocks, or None. Split tokens can meet in fused attention only."""
    if cost.attention == "fused":
        return None
    remedy = "add module_replace" if cost.attention == "replaceable" else "let their attention call it"
    return f"blocks call no scaled_dot_product_attention, by which alone split tokens may meet; {remedy}"


# Unlike usual numbers of processes, heads or features, so that a size identifies its dim.
SAMPLES = 3
TOKENS = 11

# Errors of models that do not accept so few tokens.
_TOO_SHORT = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError, ZeroDivisionError)


def on_samples(ctx: Context, name: str) -> Callable[[nn.Module], Any]:
    """A function that calls a model on the first samples of `ctx.sample_batch`, on the model's device.

    If the model fails on these, it gets the whole batch: edges of a graph, for example, refer to all nodes.

    Raises:
        ArgumentError: there is no batch for the method `name`.
    """
    return _on_smallest(ctx, name, [_few_samples])


def on_few_tokens(ctx: Context, name: str) -> Callable[[nn.Module], Any]:
    """A function like that of `on_samples`, with a few tokens of each sequence if the model accepts so few.

    Raises:
        ArgumentError: there is no batch for the method `name`.
    """
    return _on_smallest(ctx, name, [lambda batch: with_few_tokens(_few_samples(batch)), _few_samples])


def _on_smallest(ctx: Context, name: str, parts: list[Callable[[Any], Any]]) -> Callable[[nn.Module], Any]:
    from atorch.model.pytree import map_tensors

    if ctx.sample_batch is None:
        raise ArgumentError(f"{name} runs the model on a sample before it splits it; give a dataset, or a sample_batch")
    parts = [*parts, lambda batch: batch]

    def narrowed(tensor: Tensor) -> Tensor:  # what 16 bits computed agrees to 16 bits, also if it was cast to fp32
        return tensor.to(ctx.compute_dtype or tensor.dtype) if tensor.is_floating_point() else tensor

    def run(model: nn.Module) -> Any:
        batch = ctx.prepare_input(ctx.sample_batch, next(model.parameters()).device)
        while True:
            try:
                output = ctx.call_model(model, parts[0](batch))
            except _TOO_SHORT as error:
                if len(parts) == 1:
                    raise
                logger.info("%s observes more of the batch, since on a part of it: %s", name, error)
                del parts[0]
            else:
                del parts[1:]  # later calls take the same part
                return map_tensors(narrowed, output)

    return run


def with_few_tokens(batch: Any) -> Any:
    """The batch with `TOKENS` adjacent tokens of each sequence: the first or the last, whichever are more diverse.

    Sequences are integers of shape (samples, tokens). Every other dim of the same length is cut alike, as in masks and
    labels. One end of a sequence may be padding, which the choice avoids.
    """
    from atorch.model.pytree import map_tensors, tensors_in

    sequences: dict[int, list[Tensor]] = {}
    for tensor in tensors_in(batch):
        if tensor.dim() == 2 and tensor.shape[1] > TOKENS and not (tensor.is_floating_point() or tensor.is_complex()):
            sequences.setdefault(tensor.shape[1], []).append(tensor)
    starts = {
        length: max((0, length - TOKENS), key=lambda start: sum(_num_different(tokens, start) for tokens in tensors))
        for length, tensors in sequences.items()
    }

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.shape[dim] in starts:
                tensor = tensor.narrow(dim, starts[tensor.shape[dim]], TOKENS)
        return tensor

    return map_tensors(cut, batch)


def _num_different(tokens: Tensor, start: int) -> int:
    return int(tokens.narrow(1, start, TOKENS).unique().numel())


def _few_samples(batch: Any) -> Any:
    from atorch.model.pytree import batch_size
    from atorch.runtime.data.batches import take

    return take(batch, 0, SAMPLES, batch_size(batch))


def with_split_tokens(ctx: Context, name: str, share: TokenPartition, exchange: Exchange) -> Context:
    """The context with its model split by tokens, in place, for the method `name`."""
    from atorch.distributed.rng import share_random_state
    from atorch.runtime.precision.fp8 import without_fp8
    from atorch.runtime.sequence_parallel import split_stream

    (model,) = ctx.parts  # stages are cut later
    is_outside = ctx.need_mesh().size("pipeline") == 1 and not has_compiled_loss(ctx)  # stages send plain tensors
    with without_fp8(model):
        split_stream(model, on_samples(ctx, name), share, exchange, outside=is_outside)
    share_random_state(share.group, ctx.device)
    return replace(ctx, parts=ctx.parts)
