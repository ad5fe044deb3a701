"""`smp.nn.DistributedLinear` and `smp.nn.DistributedEmbedding`: torch's layers, split over the tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atorch.smp.nn.distributed_module import DistributedModule, refuse


class DistributedLinear(DistributedModule, nn.Linear):
    """`nn.Linear`, (…, in_features) → (…, out_features), with sizes summed over the tensor ranks.

    Each rank computes some of the output's columns, which are then gathered. Between two consecutive layers only one
    sum is communicated.
    """


class DistributedEmbedding(DistributedModule, nn.Embedding):
    """`nn.Embedding`, (…) → (…, embedding_dim), with the rows split over the tensor ranks.

    Args:
        _weight: initial values of shape (num_embeddings, embedding_dim).
        initializer_range: standard deviation of normal initial values, without `_weight`.

    Raises:
        ArgumentError: `_skip_allgather` or `_skip_scatter_and_merge` is true: the result is whole on every rank.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        flags: dict[str, Any] = {"_skip_allgather": _skip_allgather, "_skip_scatter_and_merge": _skip_scatter_and_merge}
        refuse("DistributedEmbedding", flags, dict.fromkeys(flags, False))
        self._initializer_range = initializer_range
        nn.Embedding.__init__(
            self, num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.normal_(0.0, self._initializer_range)
        if self.padding_idx is not None:
            self.weight[self.padding_idx].zero_()
