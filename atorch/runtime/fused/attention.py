"""`scaled_dot_product_attention` for `nn.MultiheadAttention`, and for eager attention of Hugging Face models.

If `need_weights` is True, torch computes attention step by step, and saves weights of shape (batch, heads, queries,
keys) for backward. That is its default, so the many models that take `self.attention(x, x, x)[0]` pay for unused
weights. The replacement always runs SDPA, and returns weights that are computed when first read. They come from torch's
own step-by-step path, so they are the same tensor with the same gradients.

One thing differs. In training with dropout, torch returns the weights after dropout. SDPA does not return its dropout
mask, so reading the weights then is an error.

Attention layers of transformers look up their function in `config._attn_implementation` at each call. So no module is
replaced: `set_attn_implementation` of the model is called for each of its configurations (a CLIP has three), which
other models may share. With `output_attentions=True` transformers warns and returns none. Dropout drops other elements
for the same seed. Rows that are masked everywhere (padding queries) get other values, which no loss should read.
transformers is not imported: a model is recognized by the two members of its class that are used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from atorch.model.module_swap import KeptModule, Swap, SwapReport, recast, swap_candidates


def use_sdpa(model: nn.Module) -> SwapReport:
    """Switch every Hugging Face (sub)model with eager attention to SDPA, in place.

    The report has the submodels by their names in `model` ("" is the model itself). Those that stay have a reason, as
    do those that use SDPA already. The report is empty for a model that is not from transformers.
    """
    swapped: list[Swap] = []
    kept: list[KeptModule] = []
    seen: set[int] = set()
    for name, module in _pretrained(model):
        if id(module.config) in seen:
            continue
        seen.add(id(module.config))
        reason = _why_not(module) or _switch(module)
        if reason is None:
            swapped.append(Swap((name,), f"eager attention of {type(module).__name__}", "scaled_dot_product_attention"))
        else:
            kept.append(KeptModule(name, reason))
    kept.extend(_without_owner(model, seen))
    return SwapReport(tuple(swapped), tuple(kept))


def _pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        cls = type(module)  # not the module, since wrappers such as peft's forward attribute lookups
        if callable(getattr(cls, "set_attn_implementation", None)) and isinstance(
            getattr(getattr(module, "config", None), "_attn_implementation", None), str
        ):
            yield name, module


def _why_not(module: Any) -> str | None:
    config, cls = module.config, type(module).__name__
    if config._attn_implementation != "eager":
        return f"{cls} is on {config._attn_implementation} already"
    if not module._supports_sdpa:
        return f"transformers says that {cls} does not support SDPA"
    if not module._can_set_attn_implementation():
        return f"{cls} does not choose its attention by its configuration"
    if getattr(config, "output_attentions", False):
        return f"the configuration of {cls} asks for output_attentions, which SDPA does not compute"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{cls} caps its attention logits (attn_logit_softcapping), which SDPA does not"
    if getattr(config, "reorder_and_upcast_attn", False):
        return f"{cls} asks for attention in fp32 (reorder_and_upcast_attn), which SDPA does not keep"
    return None


def _switch(module: Any) -> str | None:
    """Set this one configuration, without its sub-configurations. Undoes a failure and returns its reason."""
    try:
        module.set_attn_implementation({"": "sdpa"})
    except ValueError as error:
        module.set_attn_implementation({"": "eager"})
        return str(error)
    return None


def _without_owner(model: nn.Module, seen: set[int]) -> Iterator[KeptModule]:
    """Modules with eager attention under a configuration that belongs to no submodel."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "eager" and id(config) not in seen:
            seen.add(id(config))
            yield KeptModule(
                name, f"no submodel says whether SDPA serves the {type(config).__name__} of {type(module).__name__}"
            )


class SdpaMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` (same arguments, attributes and state dict) that computes weights only when read."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as torch's module does; needed weights are computed when first read."""
        inputs = (query, key, value, key_padding_mask)
        output, _ = super().forward(*inputs, need_weights=False, attn_mask=attn_mask, is_causal=is_causal)
        if not need_weights:
            return output, None
        compute = partial(super().forward, *inputs, attn_mask=attn_mask, average_attn_weights=average_attn_weights)
        if torch.compiler.is_compiling() and not (self.training and self.dropout):
            # A compiler drops unused weights by itself, and cannot trace a deferred tensor.
            return output, compute()[1]
        return output, _Deferred(self._weights_later(compute, query, key, value))

    def _weights_later(self, compute: Callable[[], Any], *inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`compute` under the current modes; it raises if it would no longer give the current weights."""
        device = inputs[0].device.type
        autocast = torch.autocast(
            device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
        )
        grad = torch.is_grad_enabled()
        tensors = [tensor for tensor in (*inputs, *self.parameters()) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        had_dropout = self.training and self.dropout > 0

        def weights() -> torch.Tensor:
            if had_dropout or (self.training and self.dropout > 0):
                raise RuntimeError(
                    "the attention weights of an SdpaMultiheadAttention were read in training with dropout "
                    f"{self.dropout}; which of them were dropped is not known. Keep torch's module there, or read them "
                    "in eval mode"
                )
            if versions != [tensor._version for tensor in tensors]:
                raise RuntimeError(
                    "the attention weights of an SdpaMultiheadAttention were first read after its inputs or parameters "
                    "had been changed in place, such as by an optimizer step; read them (w.clone()) before that"
                )
            with torch.set_grad_enabled(grad), autocast:
                value: torch.Tensor = compute()[1]
            return value

        return weights


class _Deferred(torch.Tensor):
    """A tensor that `compute` makes when the first function takes it."""

    _compute: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, compute: Callable[[], torch.Tensor]) -> _Deferred:
        tensor = torch.Tensor._make_subclass(cls, torch.empty(0))
        tensor._compute, tensor._value = compute, None
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(_Deferred, _Deferred._read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _read(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if self._value is None:
                self._value = self._compute()
            return self._value


def fuse_multihead_attention(model: nn.Module) -> SwapReport:
    """Replace every `nn.MultiheadAttention` by `SdpaMultiheadAttention`, in place; parameters and names stay.

    Subclasses stay. So do modules inside torch's own encoder and decoder layers, which request no weights and thus use
    SDPA already. The report has them with this reason.
    """
    torchs_own = {
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in model.named_modules()
        if type(layer) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        for name in ("self_attn", "multihead_attn")
    }

    def build(name: str, module: nn.Module) -> nn.Module | str:
        if name in torchs_own:
            return "torch's transformer layers run it by SDPA already"
        return recast(module, SdpaMultiheadAttention)

    return swap_candidates(model, lambda module: type(module) is nn.MultiheadAttention, build)
