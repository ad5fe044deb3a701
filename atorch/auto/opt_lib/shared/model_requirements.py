"""Checks of a model's structure for methods, and whether earlier methods change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from atorch.auto.context import Context
from atorch.auto.strategy import Phase, Strategy
from atorch.errors import StrategyError


def changes_modules(ctx: Context, apart_from: str = "") -> bool:
    """True if a method of the strategy puts other modules in the place of the user's, which names may mean."""
    return any(each.phase == Phase.MODULE and each.name != apart_from for each in ctx.strategy or ())


def has_compiled_loss(ctx: Context) -> bool:
    """True if the loss function is a compiled one. Compilers take no split logits."""
    return hasattr(ctx.loss_func, "_torchdynamo_orig_callable")


def need_parts_of_tokens(strategy: Strategy, name: str) -> None:
    """Raise where a method of the strategy looks at all tokens at once, of which `name` gives it some."""
    if "fp8" in strategy.names():
        raise StrategyError(fp8_beside(name))


def fp8_beside(name: str) -> str:
    """Why fp8 cannot stand beside the method `name`, which gives it some of the tokens."""
    return (
        f"fp8 and {name} exclude each other: fp8's scale of a tensor is of all its tokens, and a part of them has "
        "another; leave one of them out, or take amp_native"
    )


def need_dense_gradients(ctx: Context, name: str, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Raise where a gradient of the model is sparse, of which the method `name` can make no shards."""
    whole = set(map(id, ignored))
    for part in ctx.parts:
        for path, module in part.named_modules():
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or id(module.weight) in whole:
                continue
            if module.sparse and module.weight.requires_grad:
                raise StrategyError(
                    f"{name} cannot share out the gradient of {path or type(module).__name__}, an "
                    f"{type(module).__name__} with sparse=True; make it with sparse=False, or use ddp"
                )


def need_floating_parameters(ctx: Context, name: str) -> None:
    """Raise where a parameter is made of whole numbers or complex ones, which the method `name` cannot keep."""
    for path, parameter in _parameters(ctx):
        if not parameter.is_floating_point():
            raise StrategyError(
                f"{name} keeps parameters of floating-point types alone, and {path} is of {parameter.dtype}; "
                "make it a buffer, which nothing trains (register_buffer)"
            )


def need_own_storage(ctx: Context, name: str, func: Any, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Raise where `func`, which the method `name` does to parameters, is beyond one that is made of other tensors."""
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
    """Raise where a module is a ScriptModule, whose parameters the method `name` cannot put others in the place of."""
    for part in ctx.parts:
        for path, module in part.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise StrategyError(
                    f"{name} cannot put parameters of its own into {path or 'the model'}, a ScriptModule; give the "
                    "module that was scripted, or use ddp"
                )


def need_real_parameters(ctx: Context, name: str, why: str, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Raise where a parameter is complex, which the method `name` cannot take; `why` says so of its type."""
    for path, parameter in _parameters(ctx, ignored):
        if parameter.is_complex():
            raise StrategyError(
                f"{name} cannot compute with {path}, a parameter of {parameter.dtype}, {why}; leave {name} out"
            )


def _parameters(ctx: Context, ignored: Iterable[nn.Parameter] = ()) -> Iterator[tuple[str, nn.Parameter]]:
    left_out = set(map(id, ignored))
    for part in ctx.parts:
        yield from ((path, each) for path, each in part.named_parameters() if id(each) not in left_out)
