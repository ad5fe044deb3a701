"""Trials on copies that a split block computes the same as the whole one, before the model is changed.

In `first_failure`, one rank runs alone, and every row split returns the recorded sum. In `why_refused`, all ranks run
forward and backward with real collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from atorch.distributed.collectives import gather_objects
from atorch.model.copy import duplicate
from atorch.runtime.tensor_parallel.apply import ShardingContext, divide, split_block
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, fresh, map_by_place, tensors_of
from atorch.runtime.tensor_parallel.derive.matmul_tracker import MatmulUse, SeeProducts
from atorch.runtime.tensor_parallel.layout.layout import BlockLayout, Rows

CLOSE = 1e-4  # of a tensor's norm; wrong results are off by much more, and fp32 rounding by less
ROUNDING = 1e-5  # of the largest gradient's norm
# Errors that torch and models raise if sizes do not fit.
MISFITS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ZeroDivisionError)


class Tape(NamedTuple):
    """Input and result of every product of a whole block, by weight, in order."""

    products: Mapping[str, list[tuple[Tensor, Tensor]]]


@torch.no_grad()
def record_tape(block: nn.Module, call: ForwardCall) -> Tape:
    """The tape of one pass of the whole block."""
    taped: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        result = compute()
        taped.setdefault(product.weight, []).append((product.input.clone(), result.clone()))
        return result

    (args, kwargs), _ = fresh(call)
    with SeeProducts(dict(block.named_parameters()), keep):
        block(*args, **kwargs)
    return Tape(taped)


@torch.no_grad()
def first_failure(
    block: nn.Module, layout: BlockLayout, call: ForwardCall, tape: Tape, rank: int
) -> tuple[int, str] | None:
    """The index of the first group that a rank alone does not reproduce, and the reason; None if it reproduces all."""
    parts = {name: rows for group in layout.groups for name, rows in group.rows.items()}
    memo: dict[int, Any] = {}
    for name, parameter in block.named_parameters():
        local = parts[name].take(parameter, rank).contiguous() if name in parts else parameter.detach()
        memo[id(parameter)] = nn.Parameter(local)
    local_block = duplicate(block, memo)
    divide(local_block, layout)
    rows = {group.row: group.row_part for group in layout.groups}
    num_replayed = dict.fromkeys(rows, 0)

    def replay(product: MatmulUse, compute: Callable[[], Tensor]) -> Tensor:
        if product.weight not in rows:
            return compute()
        z, result = tape.products[product.weight][num_replayed[product.weight]]
        expected = z.narrow(-1, *_span(rows[product.weight], rank))
        if product.input.shape != expected.shape or not _close(product.input, expected):
            raise ValueError(f"the input of {product.weight} is not the part that belongs to rank {rank}")
        num_replayed[product.weight] += 1
        return result.clone()

    (args, kwargs), _ = fresh(call)
    args, kwargs = _own_arguments(layout, rank, args, kwargs)
    try:
        with _AttentionOfSomething(), SeeProducts(dict(local_block.named_parameters()), replay):
            local_block(*args, **kwargs)
    except MISFITS as error:
        done = [num_replayed[group.row] == len(tape.products[group.row]) for group in layout.groups]
        return done.index(False) if False in done else len(done), f"{type(error).__name__}: {error}"
    return None


class _AttentionOfSomething(TorchFunctionMode):
    """Refuses attention without heads, from a wrong layout: torch 2.11 divides by them, which ends the process."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, Tensor) and not argument.numel():
                    raise ValueError(f"attention is given a tensor of {tuple(argument.shape)}")
        return func(*args, **kwargs)


def why_refused(block: nn.Module, layout: BlockLayout, call: ForwardCall, cut: ShardingContext) -> str | None:
    """The difference between the whole and the split block on any rank: None if none. All ranks call it."""
    expected = _Run(block, call, cut)
    split = duplicate(block, {id(parameter): parameter for parameter in block.parameters()})
    split_block(split, layout, cut)
    got = _Run(split, call, cut, expected)
    reason = got.reason or _gradients_differ(layout, expected, got, cut.rank)
    return next((why for why in gather_objects(reason, cut.group) if why is not None), None)


class _Run:
    """One forward and backward pass: the outputs, and the gradients at inputs and parameters."""

    def __init__(self, block: nn.Module, call: ForwardCall, cut: ShardingContext, like: _Run | None = None) -> None:
        block.zero_grad()
        (args, kwargs), self.inputs = fresh(call)
        self.outputs = [tensor for tensor in tensors_of(block(*args, **kwargs)) if tensor.requires_grad]
        self.reason: str | None = None
        if like is None:
            generator = torch.Generator().manual_seed(0)
            self.seeds = [torch.rand(out.shape, generator=generator).to(out.device) for out in self.outputs]
        else:
            self.seeds = self._seeds_like(like, cut)
        if self.reason is None:
            torch.autograd.backward(self.outputs, self.seeds)
        self.grads = {name: p.grad for name, p in block.named_parameters()}

    def _seeds_like(self, like: _Run, cut: ShardingContext) -> list[Tensor]:
        """The seeds of `like`, or this rank's part for outputs that come in parts, as tables of positions do."""
        if len(self.outputs) != len(like.outputs):
            self.reason = f"it has {len(self.outputs)} outputs with a gradient instead of {len(like.outputs)}"
            return []
        seeds = []
        for got, expected, seed in zip(self.outputs, like.outputs, like.seeds, strict=True):
            rows = _part_of(got, expected, cut.degree)
            if rows is not None:
                expected, seed = rows.take(expected, cut.rank), rows.take(seed, cut.rank)
            if got.shape != expected.shape or not _close(got, expected):
                self.reason = "its output differs from the whole block's"
            seeds.append(seed)
        return seeds


def _part_of(got: Tensor, whole: Tensor, degree: int) -> Rows | None:
    """The cut of `whole`, if `got` is the size of a part of it along one dim."""
    if got.dim() != whole.dim() or got.shape == whole.shape:
        return None
    dims = [dim for dim in range(got.dim()) if got.shape[dim] != whole.shape[dim]]
    if len(dims) != 1 or got.shape[dims[0]] * degree != whole.shape[dims[0]]:
        return None
    return Rows.even(dims[0], whole.shape[dims[0]], degree)


def _gradients_differ(layout: BlockLayout, expected: _Run, got: _Run, rank: int) -> str | None:
    for place, tensor in expected.inputs.items():
        if tensor.grad is not None and not _close(_grad_of(got.inputs[place]), tensor.grad):
            return f"the gradient of its argument {place} differs from the whole block's"
    parts = {name: rows for group in layout.groups for name, rows in group.rows.items()}
    norms = [float(grad.norm()) for grad in expected.grads.values() if grad is not None]
    # Some gradients, such as that of a bias of keys, are zero but for rounding.
    rounding = ROUNDING * max(norms, default=0.0)
    for name, whole in expected.grads.items():
        if whole is None:
            continue
        part = got.grads[name]
        if part is not None and hasattr(part, "to_local"):
            whole, part = parts[name].take(whole, rank), part.to_local()
        if part is None or not _close(part, whole, rounding):
            return f"the gradient of {name} differs from the whole block's"
    return None


def _grad_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _own_arguments(layout: BlockLayout, rank: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    inputs = {place: rows for group in layout.groups for place, rows in group.inputs.items()}

    def cut(place: str, tensor: Tensor) -> Tensor:
        rows = inputs.get(place)
        return tensor if rows is None else rows.take(tensor, rank)

    return map_by_place(cut, (args, kwargs))


def _span(rows: Rows, rank: int) -> tuple[int, int]:
    start, stop = rows.by_rank[rank][0]
    return start, stop - start


def _close(got: Tensor, expected: Tensor, rounding: float = 1e-6) -> bool:
    """True if two tensors agree up to rounding; non-finite values agree with nothing."""
    error = (got.detach() - expected.detach()).norm()
    return bool(error <= CLOSE * expected.detach().norm() + rounding)
