"""The base of the precision methods: a 16-bit type, and the knobs of fp16's loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from typing_extensions import Self

from atorch.auto.context import Context
from atorch.auto.opt_lib.shared.model_requirements import need_real_parameters
from atorch.auto.strategy.method import Method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Comm, Cost, ModelProfile
from atorch.logs import logger
from atorch.runtime.precision.amp import LossScale

if TYPE_CHECKING:
    from atorch.auto.strategy import Strategy

DTYPES: Mapping[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES: Mapping[Any, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
}

NAMES: Mapping[str, str] = {"fp16": "float16", "bf16": "bfloat16"}
"""The names that costs and clusters know the types by."""


def compute_dtype(ctx: Context) -> torch.dtype | None:
    """The dtype that the precision method of the strategy being applied computes in, also before it has acted."""
    precision = next((each for each in ctx.strategy or () if isinstance(each, Precision)), None)
    return ctx.compute_dtype if precision is None else DTYPES[precision.dtype]


def keeps_masters(strategy: Strategy | None) -> bool:
    """True if a method of the strategy keeps fp32 masters itself, and divides gradients by the loss scale."""
    return any(each.keeps_masters for each in strategy or ())


def is_fp32(profile: ModelProfile) -> bool:
    """True if the model's parameters are in fp32, so that 16 bits would change something."""
    return profile.param_bytes == 4 * profile.num_params


class Precision(Method):
    """Base of the methods that compute in 16 bits."""

    dtype: Literal["fp16", "bf16"] = "fp16"
    """The 16-bit type of the matmuls."""
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    """fp16: a constant loss scale; None for a dynamic one, as the knobs below say."""
    init_scale: float = Field(default=2.0**16, gt=0)
    """fp16: the first loss scale."""
    growth_factor: float = Field(default=2.0, gt=0)
    """fp16: what the scale is multiplied by after `growth_interval` good steps in a row."""
    backoff_factor: float = Field(default=0.5, gt=0)
    """fp16: what the scale is multiplied by after a skipped step."""
    growth_interval: int = Field(default=2000, ge=1)
    """fp16: good steps before the scale grows."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Also takes the type alone: "fp16", "bf16" or a torch dtype."""
        if isinstance(config, (str, torch.dtype)):
            config = {"dtype": config}
        if isinstance(config, Mapping) and isinstance(config.get("dtype"), (str, torch.dtype)):
            config = {**config, "dtype": _NAMES.get(config["dtype"], config["dtype"])}
        return super().of(config)

    def unmet(self, cluster: ClusterSpec) -> str | None:
        """bf16 needs tensor cores of compute capability 8.0 on CUDA."""
        capability = cluster.device.capability
        if self.dtype == "bf16" and cluster.device.type == "cuda" and capability is not None and capability < (8, 0):
            have = ".".join(map(str, capability))
            return f"bf16 needs compute capability 8.0; {cluster.device.name} has {have}. Use fp16"
        return None

    def check(self, ctx: Context) -> None:
        need_real_parameters(ctx, self.name, "for which there is no type of 16 bits")

    def make_scale(self) -> LossScale:
        """The loss scale of one model: fp16's, or one that stays 1."""
        if self.dtype == "bf16" or self.loss_scale is not None:
            return LossScale(1.0 if self.dtype == "bf16" else self.loss_scale or 1.0, growth=1.0, backoff=1.0)
        return LossScale(
            self.init_scale, growth=self.growth_factor, backoff=self.backoff_factor, interval=self.growth_interval
        )

    @staticmethod
    def agree(cost: Cost) -> Cost:
        """One flag a step over all processes, whether all gradients are finite."""
        return cost.send(Comm("all_reduce", tuple(cost.axes), 4.0))


def tell_of_16_bits(ctx: Context, strategy: Strategy) -> None:
    """Warn of 16-bit parameters that the optimizer steps as they are, as checkpoints are often loaded."""
    if ctx.make_optimizer is None or ctx.world.rank or "half" in strategy.names() or keeps_masters(strategy):
        return
    trained = [each for each in ctx.root.parameters() if each.requires_grad]
    low = [each.dtype for each in trained if each.dtype in (torch.float16, torch.bfloat16)]
    if low:
        logger.warning(
            "%d of %d trainable parameters are in %s, and the optimizer steps them as they are: updates smaller than "
            "1/256 of a value (bfloat16) are lost. Load the model in fp32 (dtype=torch.float32) and add amp_native, or "
            "add half, which steps fp32 copies",
            len(low), len(trained), str(low[0]).removeprefix("torch."),
        )  # fmt: skip
