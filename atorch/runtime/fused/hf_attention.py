"""Eager attention → `scaled_dot_product_attention` in Hugging Face models.

Attention layers of transformers look up their function in `config._attn_implementation` at each call. So no module is
replaced. Instead `set_attn_implementation` of the model is called for each of its configurations (a CLIP has three).
SDPA returns no attention weights: with `output_attentions=True` transformers warns and returns none. Dropout drops
other elements for the same seed. The model builds masks for its implementation. Rows that are masked everywhere
(padding queries) get other values than before, which no loss should read.

The configuration object changes, and so do other models that were built from it. This module does not import
transformers; it recognizes a transformers model by the two members of its class that are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from atorch.model.module_swap import KeptModule, Swap, SwapReport


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
    """The submodels with a configurable attention implementation."""
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
