"""Whole numbers in a block's modules that count what is split: numbers of heads, widths of projections; torch's module.

A forward with `x.view(batch, length, self.num_heads, -1)` needs another number on a rank with some of the heads. Trials
find these numbers. Candidates are those that the region's modules hold and forward reads. The fewest that let a rank
alone reproduce its part are divided, and then every rank must reproduce its part.

torch's own forward of `nn.MultiheadAttention` hides its products in one function. It is replaced by one with products
that can be split. A rank has no attention weights of other ranks' heads, so that the returned weights are always None.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from atorch.model.copy import duplicate
from atorch.model.module_swap import recast, swap_modules, why_unswappable
from atorch.model.wrapper import override
from atorch.runtime.tensor_parallel.apply import is_configuration
from atorch.runtime.tensor_parallel.derive.block_sandbox import ForwardCall, fresh
from atorch.runtime.tensor_parallel.derive.split_validation import Ranks, Replay
from atorch.runtime.tensor_parallel.layout import BlockLayout, SplitRegion, common_path

MOST = 4  # maximum numbers to divide in one group

Numbers = Mapping[str, Mapping[str, int]]
"""Whole numbers by module and name."""


def with_attributes(block: nn.Module, layout: BlockLayout, call: ForwardCall, ranks: Ranks) -> BlockLayout:
    """The layout with the numbers to divide for each group; a group that fails with all of them is kept whole.

    Each process searches as rank 0, and then tries the result as its own ranks.
    """
    replay, read = Replay(block, call), numbers_read(block, call)
    while (failure := replay.first_failure(layout, 0)) is not None:
        index, why = failure
        if index == len(layout.groups):
            return _without(layout, layout.groups, why)
        fixed = _search(replay, layout, index, read, ranks.degree)
        layout = _without(layout, [layout.groups[index]], why) if fixed is None else fixed
    while (failure := _first_on_any_rank(replay, layout, ranks)) is not None:
        layout = _without(layout, [layout.groups[min(failure[0], len(layout.groups) - 1)]], failure[1])
    return layout


def _first_on_any_rank(replay: Replay, layout: BlockLayout, ranks: Ranks) -> tuple[int, str] | None:
    failures = (replay.first_failure(layout, rank) for rank in ranks.own)
    first = min((failure for failure in failures if failure is not None), default=None)
    return min((failure for failure in ranks.gather(first) if failure is not None), default=None)


def numbers_read(block: nn.Module, call: ForwardCall) -> Numbers:
    """The whole numbers above 1 that modules of the block hold and forward reads."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in block.parameters()}
    clone = duplicate(block, memo)
    read: dict[str, dict[str, int]] = {}
    for path, module in clone.named_modules():
        _watch(module, read.setdefault(path, {}))
    (args, kwargs), _ = fresh(call)
    with torch.no_grad():
        clone(*args, **kwargs)
    return read


def _watch(module: nn.Module, read: dict[str, int]) -> None:
    """Record in `read` the whole numbers read from a module, and from its configurations as `config.<name>`."""
    for name, value in list(vars(module).items()):
        if is_configuration(value):
            vars(module)[name] = copied = copy.copy(value)
            _note_reads(copied, read, f"{name}.")
    _note_reads(module, read, "")


def _note_reads(holder: Any, read: dict[str, int], prefix: str) -> None:
    def noting(theirs: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(self: Any, name: str) -> Any:
            value = theirs(self, name)
            if type(value) is int and value > 1 and not name.startswith("__"):
                read[f"{prefix}{name}"] = value
            return value

        return get

    override(holder, "__getattribute__", noting)


def _search(replay: Replay, layout: BlockLayout, index: int, read: Numbers, degree: int) -> BlockLayout | None:
    """The layout with the fewest divided numbers with which rank 0 alone reproduces the group `index`, or None."""
    for attributes in _choices(layout.groups[index], read, degree):
        groups = list(layout.groups)
        groups[index] = replace(groups[index], attributes=attributes)
        attempt = replace(layout, groups=tuple(groups))
        failure = replay.first_failure(attempt, 0)
        if failure is None or failure[0] > index:
            return attempt
    return None


def _choices(group: SplitRegion, read: Numbers, degree: int) -> Iterator[dict[str, dict[str, int]]]:
    region = common_path(group.parameters)
    inside = [path for path in read if path.split(".")[: len(region)] == region]
    places = [(path, name) for path in inside for name in read[path]]
    # If query heads outnumber ranks but key heads do not, their numbers are divided by different factors.
    shared = any(rows.is_shared for rows in group.columns.values())
    divisors = [divisor for divisor in range(degree, 1, -1) if degree % divisor == 0] if shared else [degree]
    for count in range(1, MOST + 1):
        for chosen in combinations(places, count):
            for factors in product(divisors, repeat=count):
                if all(read[path][name] % f == 0 for (path, name), f in zip(chosen, factors, strict=True)):
                    attributes: dict[str, dict[str, int]] = {}
                    for (path, name), factor in zip(chosen, factors, strict=True):
                        attributes.setdefault(path, {})[name] = factor
                    yield attributes


def _without(layout: BlockLayout, dropped: Sequence[SplitRegion], why: str) -> BlockLayout:
    return layout.without(lambda group: why if group in dropped else None)


class SplittableAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` (same arguments and state dict) for any number of its heads."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Compute torch's forward, without attention weights."""
        is_batched = query.dim() == 3
        batch_dim = 0 if self.batch_first else 1
        weights, biases = self._projections()
        heads = []
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            projected = F.linear(x, weight, bias)
            if is_batched and batch_dim:
                projected = projected.transpose(0, 1)
            projected = projected if is_batched else projected.unsqueeze(0)
            heads.append(projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        mask = _combined(attn_mask, key_padding_mask, heads[0], is_batched)
        q, k, v = heads
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        mixed = mixed.transpose(1, 2).flatten(2)
        if not is_batched:
            mixed = mixed.squeeze(0)
        elif batch_dim:
            mixed = mixed.transpose(0, 1)
        return self.out_proj(mixed), None

    def _projections(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        fused: Tensor | None = self.in_proj_weight
        weights = fused.chunk(3) if fused is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias: Tensor | None = self.in_proj_bias
        return weights, (None, None, None) if bias is None else bias.chunk(3)


def _combined(mask: Tensor | None, padding: Tensor | None, queries: Tensor, is_batched: bool) -> Tensor | None:
    """Both masks as one bias of the scores, (batch or 1, heads or 1, queries or 1, keys)."""
    total: Tensor | None = None
    if mask is not None:
        total = _added(mask, queries)
        total = total.unflatten(0, (queries.shape[0], -1)) if mask.dim() == 3 else total[None, None]
    if padding is not None:
        padding = _added(padding if is_batched else padding[None], queries)[:, None, None]
        total = padding if total is None else total + padding
    return total


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, float("-inf"))


def make_splittable(model: nn.Module) -> None:
    """Replace every `nn.MultiheadAttention` below `model`, in place; those with extra keys and subclasses stay."""

    def choose(name: str, module: nn.Module) -> nn.Module | None:
        is_plain = type(module) is nn.MultiheadAttention and why_unswappable(module) is None
        if not name or not is_plain or module.bias_k is not None or module.add_zero_attn:
            return None
        clone = recast(module, SplittableAttention)
        clone._qkv_same_embed_dim = False  # torch's transformer layers then call forward, in evaluation too
        return clone

    swap_modules(model, choose)
