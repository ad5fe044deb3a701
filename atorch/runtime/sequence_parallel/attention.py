"""The attention calls of any block, intercepted while its forward runs.

`scaled_dot_product_attention` is the one operation that mixes tokens in blocks that can be split by tokens. A mode is
active while the block's forward runs. It passes these calls to a chain of steps, the last added first. Each step calls
the rest of the chain, and the last one the operation itself. Nothing of torch is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from atorch.model.method_override import lift, override

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
        ...

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        """The rank's part of the result, from its part of queries, keys and values, and the full mask."""
        ...


AttentionWrapper = Callable[[AttentionCall, Attend], Tensor]


class Chain(TorchFunctionMode):
    """The steps around the attention of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[AttentionWrapper] = []  # the first is called first

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.steps:
            return self._attend(0, AttentionCall(*args, **kwargs))
        return func(*args, **kwargs)

    def _attend(self, index: int, call: AttentionCall) -> Tensor:
        if index == len(self.steps):
            return F.scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        return self.steps[index](call, partial(self._attend, index + 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        twin = Chain()
        twin.steps = list(self.steps)
        return twin


def chain_of(block: nn.Module) -> Chain:
    """The chain around the attention of `block`, made at its first use. Recomputed forwards use it too."""
    chain: Chain | None = vars(block).get(CHAIN)
    if chain is None:
        chain = Chain()
        vars(block)[CHAIN] = chain
        override(block, "forward", _attended)
    return chain


def exchange_attention(block: nn.Module, step: AttentionWrapper) -> None:
    """Add `step` to the chain of the block's attention, before all earlier steps."""
    chain_of(block).steps.insert(0, step)


@contextmanager
def watching(block: nn.Module, step: AttentionWrapper) -> Iterator[None]:
    """Add `step` as `exchange_attention` does, inside the context only."""
    had_chain = CHAIN in vars(block)
    chain = chain_of(block)
    chain.steps.insert(0, step)
    try:
        yield
    finally:
        chain.steps.remove(step)
        if not had_chain:
            del vars(block)[CHAIN]
            lift(block, "forward", _attended)


def _attended(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with vars(self)[CHAIN]:
            return original(self, *args, **kwargs)

    return forward
