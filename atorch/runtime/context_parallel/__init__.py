"""Context parallelism: sequences are spread over ranks; attention sees all of them by passing keys and values on."""

from atorch.runtime.context_parallel.balance import Deal
from atorch.runtime.context_parallel.exchange import RingExchange
from atorch.runtime.context_parallel.ring import ring_attention

__all__ = ["Deal", "RingExchange", "ring_attention"]
