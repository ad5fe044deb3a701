"""Context parallelism: each rank has a shard of every sequence; attention passes keys and values from rank to rank."""

from atorch.runtime.context_parallel.load_balancing import Deal
from atorch.runtime.context_parallel.ring import ring_attention
from atorch.runtime.context_parallel.ring_dispatch import RingExchange, UlyssesRing

__all__ = ["Deal", "RingExchange", "UlyssesRing", "ring_attention"]
