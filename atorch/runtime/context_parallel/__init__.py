"""Context parallelism: each rank has a shard of every sequence; attention passes keys and values from rank to rank."""

from atorch.runtime.context_parallel.load_balancing import Deal
from atorch.runtime.context_parallel.ring import RingExchange, UlyssesRing, ring_attention

__all__ = ["Deal", "RingExchange", "UlyssesRing", "ring_attention"]
