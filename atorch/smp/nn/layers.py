"""Layers of `smp.nn`: linear maps and embeddings that the first step splits over the ranks, and a fused layer norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atorch.errors import ArgumentError, shown
from atorch.logs import log_once
from atorch.runtime.fused import optional

WITHOUT_EFFECT: Mapping[str, str] = {
    "fused_softmax": "torch's attention is one kernel",
    "flash_attention": "torch chooses the kernel of its attention",
    "query_key_layer_scaling": "torch's attention scales before it sums",
    "attention_in_fp32": "torch's attention keeps its softmax in fp32",
    "fused_bias_gelu": "torch.compile fuses it",
    "fused_dropout": "torch.compile fuses it",
    "distribute_embedding": "an embedding that is marked is split",
    "zero_init": "sharded parameters are whole on a process until the first step, or delayed",
}
"""Keywords of `tensor_parallelism` that chose among the original's kernels, and why they have no effect here."""


class DistributedModule(nn.Module):
    """The base of modules that are split over the tensor ranks at the first step, unless they are marked against it.

    Until then it has its whole weights and computes as a plain module does. A subclass adds nothing else: the split
    follows from its computation.
    """


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
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, _weight: Tensor | None = None,
        initializer_range: float = 0.02, _skip_allgather: bool = False, _skip_scatter_and_merge: bool = False,
    ) -> None:  # fmt: skip
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


def refuse(cls: str, settings: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Raise an ArgumentError for an argument that asks for an unsupported feature.

    neutral: the accepted values, which ask for nothing, by name.
    """
    for name, value in settings.items():
        if value != neutral[name]:
            raise ArgumentError(
                f"{cls} was given {name} {shown(value)}, which atorch.smp has not; leave it at {neutral[name]!r}"
            )


def need_layernorm(cls: str, pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raise an ArgumentError if a layer has no layer norm at all."""
    if not (pre_layernorm or post_layernorm):
        raise ArgumentError(
            f"{cls} was given pre_layernorm False and post_layernorm False; at least one of them has to be True"
        )


@torch.no_grad()
def drawn_normal(module: nn.Module, initializer_range: float) -> None:
    """Draw normal weights of this standard deviation for linear layers and embeddings in `module`; biases are 0."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            layer.weight.normal_(0.0, initializer_range)
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            layer.bias.zero_()


_APEX = "apex.normalization.fused_layer_norm"
NormShape = int | list[int] | torch.Size


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, computed by apex's kernel for CUDA inputs if apex is installed, else by torch.

    torch computes it in one operation, too. A missing apex is logged once.

    Args:
        normalized_shape: the last dimensions of the input, over which to normalize.
        eps: added to the variance.
        elementwise_affine: multiply by `weight` and add `bias`, each of that shape.
    """

    def __init__(self, normalized_shape: NormShape, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self._kernel = "fused_layer_norm_affine" if elementwise_affine else "fused_layer_norm"
        self._has_apex = optional(_APEX, self._kernel) is not None  # a search for a missing package is slow
        if not self._has_apex:
            log_once(
                "smp.nn.FusedLayerNorm is torch's layer_norm, which computes the same: apex is not installed (build "
                "NVIDIA's from its repository)"
            )

    def forward(self, input: Tensor) -> Tensor:
        """`input` of `(…, *normalized_shape)`, normalized."""
        if not self._has_apex or not _is_cuda(input):
            return super().forward(input)
        affine = (self.weight, self.bias) if self.elementwise_affine else ()
        kernel: Callable[..., Tensor] = optional(_APEX, self._kernel)
        return kernel(input, *affine, self.normalized_shape, self.eps)


def _is_cuda(input: Tensor) -> bool:
    return input.is_cuda
