"""`smp.nn`: modules that the first step splits over the tensor ranks, and a fused layer norm."""

from atorch.smp.nn import huggingface
from atorch.smp.nn.layers import DistributedEmbedding, DistributedLinear, DistributedModule, FusedLayerNorm
from atorch.smp.nn.transformer import (
    DistributedAttentionLayer,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer", "DistributedEmbedding", "DistributedLinear", "DistributedModule",
    "DistributedTransformer", "DistributedTransformerLMHead", "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer", "FusedLayerNorm", "huggingface",
]  # fmt: skip
