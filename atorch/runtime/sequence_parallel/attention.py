"""The attention of a block, seen where it is called, whoever wrote the block.

`scaled_dot_product_attention` is the one operation through which tokens meet in blocks that can be split by tokens. A
mode that is on while the block's forward runs hands its calls to a chain of exchanges, the last added first; what is
left of the chain, and in the end the operation itself, is what each of them calls. Nothing of torch is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from atorch.model.method_override import override

CHAIN = "_attention_chain"  # the attribute of a block that has one


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
    """Work around attention where a rank has a part of the tokens."""

    def unfit(self, call: AttentionCall) -> str | None:
        """Why a call that has all tokens cannot be split in this way, or None."""
        ...

    def __call__(self, call: AttentionCall, attend: Attend) -> Tensor:
        """The rank's part of the result, for the rank's part of queries, keys and values, and the whole mask."""
        ...


AttentionWrapper = Callable[[AttentionCall, Attend], Tensor]


class Chain(TorchFunctionMode):
    """Work around the attention of one block."""

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

    def _attend(self, at: int, call: AttentionCall) -> Tensor:
        if at == len(self.steps):
            return F.scaled_dot_product_attention(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)
        return self.steps[at](call, partial(self._attend, at + 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        twin = Chain()
        twin.steps = list(self.steps)
        return twin


def chain_of(block: nn.Module) -> Chain:
    """The chain around the attention of `block`, made where there is none. It also serves recomputations."""
    chain: Chain | None = vars(block).get(CHAIN)
    if chain is None:
        chain = Chain()
        vars(block)[CHAIN] = chain
        override(block, "forward", _attended)
    return chain


def exchange_attention(block: nn.Module, step: AttentionWrapper) -> None:
    """Let `step` be called for the block's attention before those that are there already."""
    chain_of(block).steps.insert(0, step)


@contextmanager
def watching(block: nn.Module, step: AttentionWrapper) -> Iterator[None]:
    """`exchange_attention` inside alone."""
    had_chain, cls = CHAIN in vars(block), type(block)
    chain = chain_of(block)
    chain.steps.insert(0, step)
    try:
        yield
    finally:
        chain.steps.remove(step)
        if not had_chain:
            del vars(block)[CHAIN]
            block.__class__ = cls


def _attended(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with vars(self)[CHAIN]:
            return theirs(self, *args, **kwargs)

    return forward
