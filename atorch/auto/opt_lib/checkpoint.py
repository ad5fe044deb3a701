"""checkpoint: keep a block's inputs, and compute the rest again when backward needs it.

Memory: the activations inside the blocks shrink to the blocks' inputs, plus one block's activations while it is
recomputed. Work: one more forward pass of the blocks (Chen et al. 2016, arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from torch import nn
from typing_extensions import Self

from atorch.auto.context import Context
from atorch.auto.strategy.method import Method, Phase, method
from atorch.blocks import find_modules, module_names, repeated_blocks
from atorch.cluster import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.runtime.recompute import checkpoint_wrapper


@method("checkpoint", phase=Phase.RECOMPUTE)
class Checkpoint(Method):
    """Recompute activations in the backward pass."""

    wrap_class: tuple[str, ...] | None = None
    """Classes or names of the modules to checkpoint; None for the model's repeated blocks."""
    no_reentrant: bool = True
    """False takes torch's reentrant implementation, for models that the other cannot serve."""
    offload_to_cpu: bool = False
    """Keep the checkpointed inputs in (pinned) CPU memory."""
    max_checkpoint_module_num: Annotated[int, Field(ge=1)] | None = None
    """Checkpoint at most this many modules, the first ones; None for all."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Also takes a module class, a name, or several of either."""
        if config is None or isinstance(config, cls):
            return super().of(config)
        if not isinstance(config, Mapping):
            if isinstance(config, (set, frozenset)) or not isinstance(config, (str, type, tuple, list)):
                raise StrategyError(f"checkpoint was given {config!r}; give module classes or names, or a dict")
            config = {"wrap_class": config}
        if config.get("wrap_class") is not None:
            config = {**config, "wrap_class": module_names(config["wrap_class"], "checkpoint wrap_class")}
        return super().of(config)

    def cost(self, cost: Cost) -> Cost:
        """The blocks' inputs instead of their activations, one block's while it is recomputed, and its forward again.

        What the blocks communicate in forward, half of what they do, they communicate again.
        """
        most = self.max_checkpoint_module_num
        share = 1.0 if most is None or not cost.num_blocks else min(1.0, most / cost.num_blocks)
        return replace(
            cost,
            recompute=share,
            recompute_keeps="nothing" if self.offload_to_cpu else "inputs",
            comm=tuple(
                replace(each, num_bytes=each.num_bytes * (1 + share / 2), count=each.count * (1 + share / 2))
                if each.scales_with == "blocks"
                else each
                for each in cost.comm
            ),
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """All repeated blocks, where the model has some."""
        if profile.blocks:
            yield cls()

    def apply(self, ctx: Context) -> Context:
        """Checkpoint the chosen modules of every part in place."""
        for part in ctx.parts:
            if self.wrap_class is None:
                chosen = repeated_blocks(part)
            else:
                chosen = find_modules(part, self.wrap_class, "checkpoint wrap_class")
            if not chosen:
                raise StrategyError(
                    f"checkpoint finds no repeated blocks in {type(part).__name__}; name the modules to checkpoint, "
                    'e.g. ("checkpoint", ("MyBlock",))'
                )
            _turn_off_caches(part)
            for module in list(chosen.values())[: self.max_checkpoint_module_num]:
                checkpoint_wrapper(module, offload_to_cpu=self.offload_to_cpu, reentrant=not self.no_reentrant)
        return ctx


def _turn_off_caches(model: nn.Module) -> None:
    """Stop forward from filling a key/value cache (`config.use_cache` of transformers' models).

    A recompute would append to it a second time, and read both. Generation has a setting of its own and keeps it.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        if getattr(config, "use_cache", None):
            config.use_cache = False
            logger.info("checkpoint turned %s.use_cache off", type(config).__name__)
