"""The base of the precision methods: a 16-bit type, and the knobs of fp16's loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import Self

from atorch.auto.opt_lib.shared.model_requirements import need_real_parameters
from atorch.auto.strategy.method import Method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Comm, Cost, ModelProfile
from atorch.logs import logger

if TYPE_CHECKING:
    import torch
    from torch import nn

    from atorch.auto.context import Context
    from atorch.auto.strategy import Strategy
    from atorch.runtime.precision.amp import LossScale

NAMES: Mapping[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Names of the types in costs and cluster specs."""


def short_name(value: Any) -> Any:
    """The knob's name of a torch dtype, or of torch's name for one; any other value unchanged."""
    plain = str(value).removeprefix("torch.")
    return next((short for short, name in NAMES.items() if name == plain), value)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a knob's name."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]


def compute_dtype(ctx: Context) -> torch.dtype | None:
    """The dtype that the strategy's precision method computes in, even before that method is applied."""
    precision = next((method for method in ctx.strategy if isinstance(method, Precision)), None)
    return ctx.compute_dtype if precision is None else torch_dtype(precision.dtype)


def keeps_masters(strategy: Strategy) -> bool:
    """True if a method of the strategy keeps fp32 masters itself, and divides gradients by the loss scale."""
    return any(method.keeps_masters for method in strategy)


def is_fp32(profile: ModelProfile) -> bool:
    """True if all parameters of the model are in fp32."""
    return profile.param_bytes == 4 * profile.num_params


class Precision(Method):
    """Base of the methods that compute in 16 bits."""

    dtype: Literal["fp16", "bf16"] = "fp16"
    """The 16-bit type of the matmuls."""
    loss_scale: Annotated[float, Field(gt=0)] | None = None
    """fp16: a constant loss scale; None for a dynamic one, set by the knobs below."""
    init_scale: float = Field(default=2.0**16, gt=0)
    """fp16: the first loss scale."""
    growth_factor: float = Field(default=2.0, gt=0)
    """fp16: the factor on the scale after `growth_interval` consecutive finite steps."""
    backoff_factor: float = Field(default=0.5, gt=0)
    """fp16: the factor on the scale after a skipped step."""
    growth_interval: int = Field(default=2000, ge=1)
    """fp16: consecutive finite steps before the scale grows."""

    @classmethod
    def of(cls, config: Any = None) -> Self:
        """Accept the type alone, too: "fp16", "bf16" or a torch dtype."""
        if isinstance(config, str) or type(config).__name__ == "dtype":
            config = {"dtype": config}
        if isinstance(config, Mapping) and "dtype" in config:
            config = {**config, "dtype": short_name(config["dtype"])}
        return super().of(config)

    def unmet(self, cluster: ClusterSpec) -> str | None:
        capability = cluster.device.capability
        if self.dtype == "bf16" and cluster.device.type == "cuda" and capability is not None and capability < (8, 0):
            have = ".".join(map(str, capability))
            return f"bf16 needs compute capability 8.0; {cluster.device.name} has {have}. Use fp16"
        return None

    def settled(self, model: nn.Module) -> Self:
        """The method with the model's type if none is given: a checkpoint in bf16 stays in bf16."""
        import torch

        types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if "dtype" in self.model_fields_set or types != {torch.bfloat16}:
            return self
        return self.model_copy(update={"dtype": "bf16"})

    def check(self, ctx: Context) -> None:
        need_real_parameters(ctx, self.name, "for which there is no type of 16 bits")

    def make_scale(self) -> LossScale:
        """The loss scale of one model; for bf16 it is constantly 1."""
        from atorch.runtime.precision.amp import LossScale

        if self.dtype == "bf16" or self.loss_scale is not None:
            return LossScale(1.0 if self.dtype == "bf16" else self.loss_scale or 1.0, growth=1.0, backoff=1.0)
        return LossScale(
            self.init_scale, growth=self.growth_factor, backoff=self.backoff_factor, interval=self.growth_interval
        )

    @staticmethod
    def agree(cost: Cost) -> Cost:
        """Add the all-reduce of one flag a step, by which all processes agree if gradients are finite."""
        return cost.send(Comm("all_reduce", tuple(cost.axes), 4.0))


def warn_of_16_bits(ctx: Context, strategy: Strategy) -> None:
    """Warn of 16-bit parameters that the optimizer would step without fp32 copies."""
    import torch

    if ctx.make_optimizer is None or ctx.world.rank or strategy.uses("half") or keeps_masters(strategy):
        return
    trained = [parameter for parameter in ctx.root.parameters() if parameter.requires_grad]
    low = [parameter.dtype for parameter in trained if parameter.dtype in (torch.float16, torch.bfloat16)]
    if low:
        logger.warning(
            "%d of %d trainable parameters are in %s, and the optimizer steps them as they are. Updates smaller than "
            "1/256 of a value (bfloat16) are lost. Load the model in fp32 (dtype=torch.float32) and add amp_native, or "
            "add half, which steps fp32 copies",
            len(low), len(trained), str(low[0]).removeprefix("torch."),
        )  # fmt: skip
