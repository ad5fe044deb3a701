"""The attention calls of any block, intercepted while its forward runs, and exchanges of tokens for heads around them.

`scaled_dot_product_attention` is the one operation that mixes tokens in blocks that can be split by tokens. A mode is
active while the block's forward runs. It passes these calls to a chain of steps, the last added first. Each step calls
the rest of the chain, and the last one the operation itself. Nothing of torch is patched.

`Ulysses` exchanges split tokens for split heads before attention, and back after it:

    queries, keys, values (batch, heads, tokens / n, width) → (batch, heads / n, tokens, width) → attention → back

Four all-to-alls, each with its inverse all-to-all in backward (Jacobs et al. 2023, arXiv 2309.14509, section 3). Every
rank's attention sees all tokens, so that any mask works unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from atorch.model.wrapper import override
from atorch.runtime.gradients.backward import mapped

CHAIN = "_attention_chain"  # attribute of a block that holds its chain


class AttentionCall(NamedTuple):
    """One call of `scaled_dot_product_attention`: queries, keys and values are (batch, heads, tokens, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


Attend = Callable[[AttentionCall], Tensor]


class Exchange(Protocol):
    """A step around attention, for ranks that have a part of the tokens each."""

    def unfit(self, call: AttentionCall) -> str | None:
        """The reason why a call with all tokens cannot be split in this way, or None."""

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        """The rank's part of the result, from its part of queries, keys and values, and the full mask."""


AttentionWrapper = Callable[[AttentionCall, Attend], Tensor]


class Chain(TorchFunctionMode):
    """Steps around attention, the first of which is called first."""

    def __init__(self, *steps: AttentionWrapper) -> None:
        super().__init__()
        self.steps = list(steps)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.steps:
            return self._attend(0, AttentionCall(*args, **kwargs))
        return func(*args, **kwargs)

    def _attend(self, index: int, call: AttentionCall) -> Tensor:
        if index == len(self.steps):
            return F.scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        return self.steps[index](call, partial(self._attend, index + 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return Chain(*self.steps)


def exchange_attention(block: nn.Module, step: AttentionWrapper) -> None:
    """Add `step` to the chain of the block's attention, before all earlier steps. Recomputed forwards use it too."""
    if CHAIN not in vars(block):
        vars(block)[CHAIN] = Chain()
        override(block, "forward", _attended)
    vars(block)[CHAIN].steps.insert(0, step)


def _attended(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with vars(self)[CHAIN]:
            return original(self, *args, **kwargs)

    return forward


class Ulysses:
    """The exchange over the ranks of a group. Each has one contiguous piece of the tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def unfit(self, call: AttentionCall) -> str | None:
        """The reason why ranks cannot share the query heads evenly, or None. There may be fewer key heads."""
        if call.query.dim() != 4:
            return f"its queries have {call.query.dim()} dims, and heads are exchanged as the second of 4"
        heads, size = call.query.shape[1], self._group.size()
        if heads % size:
            fit = ", ".join(str(divisor) for divisor in range(2, heads + 1) if heads % divisor == 0)
            return f"{size} ranks do not divide its {heads} heads; give the axis a size of {fit}"
        return None

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        """Attention to all tokens with this rank's heads."""
        key, value = (to_heads(_repeated(tensor, self._group.size()), self._group) for tensor in (call.key, call.value))
        query, mask = to_heads(call.query, self._group), call.attn_mask
        if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
            heads = query.shape[1]
            mask = mask.narrow(-3, heads * self._group.rank(), heads)
        return to_tokens(attend(call._replace(query=query, key=key, value=value, attn_mask=mask)), self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ulysses:
        return self


def _repeated(x: Tensor, size: int) -> Tensor:
    """Repeat each head until `size` divides their number; the order keeps query heads at their key heads."""
    times = math.lcm(x.shape[1], size) // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads, tokens / n, width) → (batch, heads / n, tokens, width)."""
    return mapped(x, lambda x: _exchange(x, 1, 2, group), lambda grad: _exchange(grad, 2, 1, group))


def to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, heads / n, tokens, width) → (batch, heads, tokens / n, width)."""
    return mapped(x, lambda x: _exchange(x, 2, 1, group), lambda grad: _exchange(grad, 1, 2, group))


def _exchange(x: Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    """The r-th of equal pieces along `cut` from all ranks, for rank r, concatenated along `joined`."""
    size = group.size()
    pieces = x.unflatten(cut, (size, x.shape[cut] // size)).movedim(cut, 0).contiguous()
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received.movedim(0, joined).flatten(joined, joined + 1)
