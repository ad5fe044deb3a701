"""Methods for the tests of strategies, so that these do not depend on what the real ones take."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from torch import nn
from typing_extensions import Self

from atorch.auto.strategy import Method, Phase, Recipe


class ToyMesh(Method):
    """A method with nested knobs."""

    name, phase, slot = "toy_mesh", Phase.MESH, "toy_mesh"

    slices: tuple[tuple[str, int], ...] = (("data", 1),)
    order: tuple[int, ...] | None = None


class ToyAmp(Method):
    """A method with a short form."""

    name, phase, slot = "toy_amp", Phase.PRECISION, "toy_precision"

    dtype: Literal["fp16", "bf16"] = "fp16"
    skip: bool = False

    @classmethod
    def of(cls, config: Any = None) -> Self:
        return super().of({"dtype": config} if isinstance(config, str) else config)


class ToyHalf(Method):
    """What excludes ToyAmp."""

    name, phase, slot = "toy_half", Phase.PRECISION, "toy_precision"


class ToyShard(Method):
    """A method that applies late, with a number and free data."""

    name, phase, slot = "toy_shard", Phase.SHARD, "toy_shard"

    share: float = Field(default=1.0, gt=0.0, le=1.0)
    use_ds_zero: bool = False
    extra: dict[str, Any] = Field(default_factory=dict)

    def cost(self, cost: Any) -> Any:
        return [*cost, "toy_shard"]

    def apply(self, ctx: Any) -> Any:
        return dataclasses.replace(ctx, applied=(*ctx.applied, "toy_shard"))


class ToyCompile(Method):
    """A method that applies before ToyShard."""

    name, phase, slot = "toy_compile", Phase.COMPILE, "toy_compile"

    def cost(self, cost: Any) -> Any:
        return [*cost, "toy_compile"]

    def apply(self, ctx: Any) -> Any:
        return dataclasses.replace(ctx, applied=(*ctx.applied, "toy_compile"))


@dataclasses.dataclass(frozen=True)
class ToyContext:
    """What has been applied, and the strategy that is being applied."""

    applied: tuple[str, ...] = ()
    strategy: Any = None
    root: nn.Module = dataclasses.field(default_factory=nn.Identity, compare=False)


class ToyRecipe(Recipe):
    """Stands for a mesh and, where nothing shards, a shard."""

    name = "toy_recipe"

    @classmethod
    def expand(cls, config: Any, others: tuple[Method, ...]) -> tuple[Method, ...]:
        mesh = ToyMesh.of(config if isinstance(config, Mapping) else None)
        return (mesh,) if any(isinstance(each, ToyShard) for each in others) else (mesh, ToyShard.of())


TOYS = (ToyMesh, ToyAmp, ToyHalf, ToyShard, ToyCompile)
