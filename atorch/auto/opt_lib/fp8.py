"""fp8: Linear layers multiply in 8-bit floats, by transformer-engine or torchao.

Parameters and activations keep their dtypes, but fsdp and zero2 gather weights in 8 bits. On hardware with fp8,
matmuls of converted layers take little more than half the time of bf16. Casts of their inputs cost a part of the gain.
Attention does not change. The output layer loses too much accuracy: {"exclude": ("lm_head",)}.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator
from typing_extensions import Self

from atorch.auto.opt_lib.fsdp import Fsdp
from atorch.auto.opt_lib.offload import Offload
from atorch.auto.opt_lib.shared.model_requirements import changes_modules
from atorch.auto.strategy.method import Method, Phase, method
from atorch.cluster.spec import ClusterSpec
from atorch.cost import Cost, ModelProfile
from atorch.cost.parallelism import AXES
from atorch.errors import StrategyError
from atorch.logs import logger
from atorch.runtime.precision.fp8_recipe import MIN_CAPABILITY, Backend, Fp8Recipe, choose_backend

if TYPE_CHECKING:
    from torch import nn

    from atorch.auto.context import Context
    from atorch.runtime.precision.fp8 import Fp8Report


@method("fp8", phase=Phase.MODULE)
class Fp8(Method):
    """Multiply in fp8 in the model's Linear layers."""

    needs_values: ClassVar[bool] = True

    include: tuple[str, ...] | None = None
    """Substrings, one of which a layer's dotted name must have; None for all layers."""
    exclude: tuple[str, ...] | None = None
    """Substrings, none of which a layer's name may have."""
    verbose: bool = False
    """Log the name of every layer that is converted."""
    margin: int = Field(default=0, ge=0)
    """Delayed scaling: scales are divided by 2**margin."""
    interval: int = Field(default=1, ge=1)
    """Delayed scaling: steps between new scales."""
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    """HYBRID has gradients in e5m2 and the rest in e4m3, E4M3 all in e4m3."""
    amax_history_len: int = Field(default=1024, ge=1)
    """Delayed scaling: number of steps whose largest values are kept."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Delayed scaling: the largest of the kept values, or the last one."""
    reduce_amax: bool = True
    """Delayed scaling: ranks that hold the same layers share their largest values."""
    backend: Literal["auto", "te", "torchao"] = "auto"
    """te (delayed scaling) or torchao (current scaling). auto is te if it is installed, on CUDA, unless a method
    checkpoints activations, or gives processes parts of weights or of tokens."""
    scaling: Literal["tensorwise", "rowwise", "rowwise_gw_hp"] = "tensorwise"
    """torchao: a scale for each tensor, or for each of its rows, all in e4m3, which rounds outliers' neighbours less;
    rowwise_gw_hp also computes gradients of weights in the original dtype."""
    emulate: bool | None = None
    """torchao: quantize, but multiply in the original dtype. The only way without fp8 hardware; never faster."""
    fsdp_float8_all_gather: bool | None = None
    """torchao with scales of tensors, under fsdp or zero2: gather weights in 8 bits, with the same results. None: where
    the other methods allow it."""

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def _recipe(self) -> Fp8Recipe:
        return Fp8Recipe(**{field.name: getattr(self, field.name) for field in fields(Fp8Recipe)})

    precision_level = "fp8"

    @property
    def numbers(self) -> str:
        return "the products of the converted Linear layers are of numbers rounded to 8 bits, under scales"

    def unmet(self, cluster: ClusterSpec) -> str | None:
        device = cluster.device
        if not self.emulate:
            if device.type != "cuda":
                return f'fp8 needs a GPU with fp8 matmuls; this is {device.type} ({{"emulate": True}} only quantizes)'
            if device.capability is not None and device.capability < MIN_CAPABILITY:
                need, have = (f"{major}.{minor}" for major, minor in (MIN_CAPABILITY, device.capability))
                return f"fp8 needs compute capability {need}; this is {have}"
        choose_backend(self.backend, self._recipe(), self.emulate, device.type)
        return None

    def cost(self, cost: Cost) -> Cost:
        """Matmuls of converted layers in 8 bits, and the casts before them; emulation changes no cost."""
        if self.emulate:
            return cost
        is_delayed = self.backend == "te" or self.backend == "auto" and bool(self._recipe().delayed())
        outside = self.include is None and not self.exclude
        gathers = self.scaling == "tensorwise" and not is_delayed and self.fsdp_float8_all_gather is not False
        return cost.replace(
            fp8="delayed" if is_delayed else self.scaling,
            fp8_outside=outside,
            fp8_sent="none" if not gathers else "all" if outside else "blocks",
        )

    @classmethod
    def choices(cls, profile: ModelProfile, cluster: ClusterSpec) -> Iterable[Self]:
        """The Linear layers of the repeated blocks; the head would lose too much accuracy."""
        if "Linear" in (profile.block_classes if profile.blocks else profile.module_classes):
            lists = sorted({block.name.rpartition(".")[0] for block in profile.blocks} - {""})
            by_shape = bool(profile.blocks) and not lists  # a profile from a shape has no module names
            yield cls(include=tuple(lists) or None, exclude=("head",) if by_shape else None)

    def check(self, ctx: Context) -> None:
        reason = self._why_no_gather(ctx)
        if self.fsdp_float8_all_gather and reason is not None:
            raise StrategyError(f"fp8 was given fsdp_float8_all_gather=True {reason}; leave it out")
        for part in ctx.parts:
            if not changes_modules(ctx, self.name) and not any(True for _ in self._chosen(part)):
                raise StrategyError(
                    f"fp8 converts nothing in {type(part).__name__}: none of its layers is an nn.Linear"
                    f"{' of the names in include and exclude' if self.include or self.exclude else ''}. Leave fp8 out, "
                    "or change include"
                )

    def _chosen(self, part: nn.Module) -> Iterable[str]:
        """Names of the nn.Linear layers that `include` and `exclude` select."""
        from torch import nn

        for name, module in part.named_modules():
            included = self.include is None or any(substring in name for substring in self.include)
            excluded = self.exclude is not None and any(substring in name for substring in self.exclude)
            if name and type(module) is nn.Linear and included and not excluded:
                yield name

    def apply(self, ctx: Context) -> Context:
        from atorch.runtime.precision.fp8 import convert_linears

        mesh = ctx.mesh
        pipelined = mesh is not None and mesh.size("pipeline") > 1
        group = mesh.group(*(axis for axis in AXES if axis != "pipeline")) if mesh is not None and pipelined else None
        for part in ctx.parts:
            report = convert_linears(
                part,
                include=self.include,
                exclude=self.exclude,
                backend=self._suitable_backend(ctx),
                recipe=self._recipe(),
                emulate=self.emulate,
                device=ctx.device,
                group=group,
                fsdp_float8_all_gather=self.fsdp_float8_all_gather is not False and self._why_no_gather(ctx) is None,
            )
            self._log_report(type(part).__name__, report)
        return ctx

    def _why_no_gather(self, ctx: Context) -> str | None:
        """A reason why weights are not gathered in 8 bits, to follow "was given …"."""
        backend = choose_backend(self._suitable_backend(ctx), self._recipe(), self.emulate, ctx.device.type)
        sharding, offload = ctx.strategy.get(Fsdp), ctx.strategy.get(Offload)
        if backend == "te":
            return "with transformer-engine, which casts whole weights"
        if self.scaling != "tensorwise":
            return f"with scaling {self.scaling!r}, but a shard has no scale of its rows and columns alike"
        if sharding is None or sharding.engine:
            return "without fsdp or zero2 (by its fsdp backend), which gather weights"
        if not isinstance(sharding.reshard_after_forward, bool | None):
            return f"with {sharding.name}'s reshard_after_forward={sharding.reshard_after_forward}, which keeps parts"
        if sharding.cpu_offload or (offload is not None and offload.parameters):
            return "with parameters in host memory, which are sent in their own dtype"
        if ctx.find_unused_parameters:
            return "with find_unused_parameters=True, for which zeros in 8 bits would stand in as gradients"
        return None

    def _suitable_backend(self, ctx: Context) -> Backend:
        """The backend that suits the other methods."""
        reason = next((reason for method in ctx.strategy if (reason := _why_not_te(method))), None)
        if reason is None and self.fsdp_float8_all_gather:
            reason = "fsdp_float8_all_gather, which torchao alone has"
        if reason is None:
            return self.backend
        if self.backend == "te":
            raise StrategyError(f'fp8 was given backend "te" with {reason}; use backend="torchao", or leave it out')
        return "torchao" if self.backend == "auto" else self.backend

    def _log_report(self, model: str, report: Fp8Report) -> None:
        reasons = "; ".join(map(str, report.left))
        if not report.converted:
            raise StrategyError(
                f"fp8 converts nothing in {model}: {reasons or 'it has no nn.Linear'}. Leave fp8 out, or change include"
            )
        how = f"{report.backend}, emulated" if report.emulated else report.backend
        logger.info("fp8: %d Linear layers of %s by %s", len(report.converted), model, how)
        if self.verbose:
            for name in report.converted:
                logger.info("fp8: %s", name)
        if report.left:
            logger.info("fp8 leaves %s", reasons)


def _why_not_te(method: Method) -> str | None:
    if method.recomputes:
        return f"{method.name}, whose recompute does not run in te's fp8 region"
    if method.phase == Phase.TENSOR:
        return f"{method.name}, which splits what te's layers keep whole"
    return None
