"""checkpoint: keeps a block's inputs, and recomputes the rest when backward needs it.

Memory: the activations inside the blocks shrink to the blocks' inputs, plus one block's activations while it is
recomputed. Work: one more forward pass of the blocks (Chen et al. 2016, arXiv 1604.06174). With `selective`, results of
matmuls and attention are kept, and only the rest is recomputed (Korthikanti et al. 2022, arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from atorch.auto.opt_lib.shared.model_requirements import changes_modules
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.errors import StrategyError
from atorch.logs import logger

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context


@method("checkpoint", phase=Phase.RECOMPUTE)
class ActivationCheckpoint(Method):
    """Recompute activations in the backward pass."""

    saves_memory: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True

    wrap_class: tuple[str, ...] | None = None
    """Classes or names of the modules to checkpoint; None for the model's repeated blocks, or its
    largest children where nothing repeats."""
    no_reentrant: bool = True
    """False selects torch's reentrant implementation, for models that the default does not support."""
    offload_to_cpu: bool = False
    """Keep the checkpointed inputs in (pinned) CPU memory."""
    selective: bool = False
    """Keep the results of matmuls and attention as well, and recompute only the operations between them."""
    max_checkpoint_module_num: Annotated[int, Field(ge=1)] | None = None
    """Checkpoint at most this many modules, the first ones; None for all."""

    @model_validator(mode="after")
    def _hold(self) -> Self:
        if self.selective and not self.no_reentrant:
            raise ValueError("selective needs a forward that is not reentrant; leave no_reentrant out")
        if self.selective and self.offload_to_cpu:
            raise ValueError("selective keeps results on the device, and inputs add little; give one of them")
        return self

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Accept a module class, a name, or several of either, too."""
        from atorch.model.structure import module_names

        if config is None or isinstance(config, cls):
            return super().of(config)
        if not isinstance(config, Mapping):
            if isinstance(config, (set, frozenset)) or not isinstance(config, (str, type, tuple, list)):
                raise StrategyError(f"checkpoint was given {config!r}; give module classes or names, or a dict")
            config = {"wrap_class": config}
        if config.get("wrap_class") is not None:
            config = {**config, "wrap_class": module_names(config["wrap_class"], "checkpoint wrap_class")}
        return super().of(config)

    @property
    def joins_backward(self) -> str:
        runs_once = self.selective or not self.no_reentrant
        return "lets backward run once: leave selective and no_reentrant at their defaults" if runs_once else ""

    def cost(self, cost: Cost) -> Cost:
        """The blocks' inputs instead of their activations, those of the block being recomputed, and its forward again.

        Selective recompute keeps the results of all matmuls and of attention as well, and repeats only the rest.
        """
        most = self.max_checkpoint_module_num
        share = 1.0 if most is None or not cost.num_blocks else min(1.0, most / cost.num_blocks)
        keeps: Literal["inputs", "results", "nothing"] = "nothing" if self.offload_to_cpu else "inputs"
        return cost.replace(recompute=share, recompute_keeps="results" if self.selective else keeps)

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """All repeated blocks, if there are any; also selectively, if that leaves something to recompute."""
        if profile.blocks:
            yield cls()
            kept = [(block.inside.selective_bytes + block.outside.selective_bytes, block) for block in profile.blocks]
            if any(0 < num_bytes < block.saved_bytes for num_bytes, block in kept):
                yield cls(selective=True)

    def check(self, ctx: Context) -> None:
        for part in ctx.parts if self.wrap_class is None or not changes_modules(ctx) else ():
            self._chosen(part)

    def _chosen(self, part: nn.Module) -> dict[str, nn.Module]:
        from atorch.model.structure import find_modules, largest_children, repeated_blocks

        if self.wrap_class is not None:
            return find_modules(part, self.wrap_class, "checkpoint wrap_class")
        chosen = repeated_blocks(part) or largest_children(part)
        if not chosen:
            raise StrategyError(
                f"checkpoint finds no repeated blocks in {type(part).__name__}, nor modules inside of it; name the "
                'modules to checkpoint, e.g. ("checkpoint", ("MyBlock",))'
            )
        return chosen

    def apply(self, ctx: Context) -> Context:
        from atorch.model.structure import repeated_blocks
        from atorch.runtime.memory.recompute import checkpoint_wrapper, turn_off_caches

        for part in ctx.parts:
            chosen = self._chosen(part)
            if self.wrap_class is None and not repeated_blocks(part):
                logger.warning(
                    "checkpoint finds no repeated blocks in %s and takes its largest children: %s",
                    type(part).__name__,
                    ", ".join(chosen),
                )
            turn_off_caches(part)
            for module in list(chosen.values())[: self.max_checkpoint_module_num]:
                checkpoint_wrapper(
                    module,
                    offload_to_cpu=self.offload_to_cpu,
                    reentrant=not self.no_reentrant,
                    selective=self.selective,
                )
        return ctx
