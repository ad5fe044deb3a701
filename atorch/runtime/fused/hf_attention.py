"""Eager attention → `scaled_dot_product_attention` in Hugging Face models.

Attention layers of transformers look up the function they call in `config._attn_implementation` each time they run,
so nothing is replaced in the tree: the model is told, through its own `set_attn_implementation`, for each of its
configurations (a CLIP has three). What changes is what SDPA cannot give: attention weights. With
`output_attentions=True` transformers warns and returns none, and under dropout other elements are dropped for the same
seed. Masks are built by the model for the implementation it is on; rows that are masked everywhere (padding queries)
hold other numbers than before, which no loss may read.

The configuration object is changed, so other models that were built from the same object change too.
Nothing here imports transformers: a model is one of its models where its class has the two members that are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from atorch.model.module_swap import KeptModule, Swap, SwapReport


def use_sdpa(model: nn.Module) -> SwapReport:
    """Put every Hugging Face (sub)model that computes attention eagerly on SDPA, in place.

    The report names the submodels by their names in `model` ("" is the model itself); those that stay are there with
    the reason, also those that are on SDPA already. A model that is none of transformers' gives an empty report.
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
    """The submodels that know which attention they may use."""
    for name, module in model.named_modules():
        cls = type(module)  # not the module: wrappers such as peft's pass names on to what they wrap
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
    """Set this one configuration; its sub-configurations have owners of their own. Returns why not, undone."""
    try:
        module.set_attn_implementation({"": "sdpa"})
    except ValueError as error:
        module.set_attn_implementation({"": "eager"})
        return str(error)
    return None


def _without_owner(model: nn.Module, seen: set[int]) -> Iterator[KeptModule]:
    """Eager attention under a configuration that no submodel answers for."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "eager" and id(config) not in seen:
            seen.add(id(config))
            yield KeptModule(
                name, f"no submodel says whether SDPA serves the {type(config).__name__} of {type(module).__name__}"
            )
