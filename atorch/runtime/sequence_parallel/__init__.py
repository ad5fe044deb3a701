"""Sequence parallelism: sequences are split by tokens over ranks, and attention sees all tokens."""

from atorch.runtime.sequence_parallel.attention import AttentionCall, Exchange, Ulysses
from atorch.runtime.sequence_parallel.megatron import check_tokens, split_between
from atorch.runtime.sequence_parallel.token_partition import TokenPartition
from atorch.runtime.sequence_parallel.token_split import split_stream

__all__ = ["AttentionCall", "Exchange", "TokenPartition", "Ulysses", "check_tokens", "split_between", "split_stream"]
