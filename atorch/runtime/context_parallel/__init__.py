"""Context parallelism: sequences are spread over ranks; attention sees all of them by passing keys and values on."""

from atorch.runtime.context_parallel.load_balancing import Deal
from atorch.runtime.context_parallel.ring import ring_attention
from atorch.runtime.context_parallel.ring_dispatch import RingExchange
from atorch.runtime.context_parallel.ulysses_ring import UlyssesRing

__all__ = ["Deal", "RingExchange", "UlyssesRing", "ring_attention"]
